"""Who asked for more than its part of the engine, and how much: debts of lanes and tenants.

Beside the real engine an imaginary one is served: it takes every arrival's work in and divides each moment's capacity
max-min fairly among owners (a tenant in a lane) that have work left in it: between lanes by weight, in a lane between
its tenants evenly; whoever needs less than its part leaves the rest to the others. (Generalised processor sharing:
A. Parekh, R. Gallager, IEEE/ACM Transactions on Networking 1(3), 1993.)

What an owner has left there is what it asked for beyond its part. Its *debt* is how long that takes to serve at its
part, beyond the time that its deadlines leave. Whoever asks for no more than its part has none, however much of its
work really waits, and a flood has one until its backlog would be gone, even while it gets everything that it asks for.
What the least indebted of those who were there lately owes, nobody owes: who is alone has no debt. When nothing waits
in the real engine there is enough for all, and what is left is forgiven.

A debt is at most ``DEBT_LIMIT_S`` less the time without an admission, so that nobody is in debt for longer than that
without being served.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

SERVABLE: Final = 0.65
"""The work that the imaginary engine does in a second. Work is counted at the rates of full batches and large chunks;
under mixed traffic that meets its targets an engine does about so much of it (virtual clock, the mix of
``benchmarks.bursts``)."""
DEBT_LIMIT_S: Final = 20.0
FULL_DEBT_S: Final = 2.0
ALLOWED_SHARE: Final = 0.7
"""Of the time to its deadlines, how long an owner's work may take at its part without a debt."""
LEAST_ALLOWED_S: Final = 3.0
"""The same for work without a deadline, and the least for any: chance clusters of usual arrivals are no flood."""
MOST_ALLOWED_S: Final = 21.0
ACTIVE_S: Final = 10.0
"""An owner is there for so long after an arrival."""
_TICK_S: Final = 0.1
_NOTHING_S: Final = 1e-6

Owner = tuple[str, str | None]
"""Lane, tenant."""


@dataclass(slots=True)
class _Account:
    """``left_s`` is the work left in the imaginary engine. ``served_s`` is when a sequence was admitted last, or the
    first began to wait, ``seen_s`` the last arrival."""

    left_s: float = 0.0
    waiting: int = 0
    served_s: float = -math.inf
    seen_s: float = -math.inf
    allowed_s: float = MOST_ALLOWED_S


class Debts:
    """Accounts of all owners. ``debts_s`` are the debts above 0 as of ``refresh``, ``indebted`` the owners whose debt
    is above ``FULL_DEBT_S``: their waiting does not count."""

    def __init__(self) -> None:
        self.debts_s: dict[Owner, float] = {}
        self.indebted: frozenset[Owner] = frozenset()
        self._accounts: dict[Owner, _Account] = {}
        self._waiting = 0
        self._now_s = -math.inf

    def arrived(self, owner: Owner, work_s: float, now_s: float, to_deadline_s: float | None) -> None:
        """Work that was not there before."""
        account = self._accounts.setdefault(owner, _Account())
        account.left_s += work_s
        account.seen_s = now_s
        account.allowed_s = (
            LEAST_ALLOWED_S
            if to_deadline_s is None
            else min(MOST_ALLOWED_S, max(LEAST_ALLOWED_S, ALLOWED_SHARE * to_deadline_s))
        )

    def withdrawn(self, owner: Owner, work_s: float) -> None:
        """Work that arrived is not wanted any more."""
        account = self._accounts[owner]
        account.left_s = max(0.0, account.left_s - work_s)

    def waits(self, owner: Owner, now_s: float) -> None:
        """A sequence begins to wait."""
        account = self._accounts.setdefault(owner, _Account())
        if not account.waiting:
            account.served_s = now_s
        account.waiting += 1
        self._waiting += 1

    def waits_no_more(self, owner: Owner) -> None:
        """A sequence waits no longer, for whatever reason."""
        self._accounts[owner].waiting -= 1
        self._waiting -= 1

    def admitted(self, owner: Owner, now_s: float) -> None:
        """A sequence was admitted."""
        self._accounts[owner].served_s = now_s

    def refresh(self, now_s: float, weights: Mapping[str, float]) -> None:
        """It is ``now_s``: serve in the imaginary engine and see who is in debt, unless that was done just now."""
        if now_s < self._now_s + _TICK_S:
            return
        passed_s, self._now_s = now_s - self._now_s, now_s
        if not self._waiting:
            for account in self._accounts.values():
                account.left_s = 0.0
        lanes: dict[str, dict[Owner, _Account]] = {}
        for owner, account in list(self._accounts.items()):
            if account.left_s > _NOTHING_S:
                lanes.setdefault(owner[0], {})[owner] = account
            elif not account.waiting and account.seen_s < now_s - ACTIVE_S:
                del self._accounts[owner]
        debts_s = self._serve(lanes, weights, min(passed_s, 1e9)) if lanes else {}
        if debts_s and len(debts_s) == len(self._accounts):
            least_s = min(debts_s.values())
            debts_s = {owner: debt_s - least_s for owner, debt_s in debts_s.items() if debt_s > least_s}
        self.debts_s = debts_s
        self.indebted = frozenset([owner for owner, debt_s in self.debts_s.items() if debt_s > FULL_DEBT_S])

    def _serve(
        self, lanes: dict[str, dict[Owner, _Account]], weights: Mapping[str, float], passed_s: float
    ) -> dict[Owner, float]:
        left = {lane: sum([account.left_s for account in owners.values()]) for lane, owners in lanes.items()}
        level = water_level([(left[lane], weights.get(lane, 1.0)) for lane in lanes], SERVABLE * passed_s)
        debts_s: dict[Owner, float] = {}
        for lane, owners in lanes.items():
            granted_s = level * weights.get(lane, 1.0)
            if left[lane] <= granted_s:
                for account in owners.values():
                    account.left_s = 0.0
                continue
            part_s = water_level([(account.left_s, 1.0) for account in owners.values()], granted_s)
            for owner, account in owners.items():
                account.left_s = max(0.0, account.left_s - part_s)
                debt_s = account.left_s / part_s * passed_s - account.allowed_s
                if account.waiting:
                    debt_s = min(debt_s, DEBT_LIMIT_S - (self._now_s - account.served_s))
                if debt_s > 0:
                    debts_s[owner] = min(debt_s, DEBT_LIMIT_S)
        return debts_s


def water_level(asked: Iterable[tuple[float, float]], capacity: float) -> float:
    """The level at which ``min(work, level * weight)`` of all (work, weight) adds up to ``capacity``; inf when all of
    the work fits."""
    ordered = sorted(asked, key=lambda one: one[0] / one[1])
    left, weights = capacity, sum([weight for _, weight in ordered])
    for work, weight in ordered:
        if work * weights > left * weight:
            return left / weights
        left -= work
        weights -= weight
    return math.inf
