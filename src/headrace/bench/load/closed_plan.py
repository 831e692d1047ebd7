"""Closed loop: so many users, each with one request at a time.

Every user has a row of requests of its own; the class of each is drawn by weight, independently of all others. A
class with sessions is a conversation that the user has open: whenever the class is drawn, the user sends that
conversation's next turn, or begins a new one when it has ended. So shares of requests are the weights from the first
request on, and a user's conversations alternate with its other requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Final

from headrace.bench.load.class_plan import ClassPlan, IllegalPlan, LiveSession
from headrace.bench.planned import PlannedRequest

LEAST_ROUND_S: Final = 0.02
"""No request of a closed loop is taken to end sooner than this."""

MOST_REQUESTS: Final = 1_000_000
"""A closed loop's schedule holds no more than this, over all users (but at least one a user)."""


def requests_per_user(users: int, duration_s: float, think_s: float) -> int:
    """How many requests a user's row holds: enough to last the run when each takes ``LEAST_ROUND_S`` and the
    think time, unless that is more than ``MOST_REQUESTS`` over all users."""
    enough = ceil(duration_s / (think_s + LEAST_ROUND_S)) + 1
    return max(1, min(enough, MOST_REQUESTS // users))


def plan_closed(
    plans: dict[str, ClassPlan],
    classes: Iterator[str],
    illegal: IllegalPlan,
    *,
    users: int,
    per_user: int,
    think_ns: int,
) -> list[PlannedRequest]:
    """All users' rows, user by user within each round: ``per_user`` legal requests each.

    A request's ``think_ns``, the time between the end of the user's last request and this one, is ``think_ns`` (0
    for a user's first); a later turn's is its conversation's own.
    """
    requests: list[PlannedRequest] = []
    open_sessions: dict[tuple[int, str], LiveSession] = {}
    for round_ in range(per_user):
        for user in range(users):
            plan = plans[next(classes)]
            pause_ns = think_ns if round_ else 0
            index = len(requests)
            if plan.in_sessions:
                live = open_sessions.get((user, plan.name))
                if live is None or live.ended:
                    live = open_sessions[user, plan.name] = plan.begin()
                wait_ns = live.next_turn.think_ns if live.turn else pause_ns
                requests.append(plan.turn(live, index, due_ns=None, user=user, think_ns=wait_ns))
            else:
                requests.append(plan.single(index, due_ns=None, user=user, think_ns=pause_ns))
            if illegal.place() is not None:
                requests.append(illegal.request(len(requests), due_ns=None, user=user, think_ns=think_ns))
    return requests
