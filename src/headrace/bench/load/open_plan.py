"""Open loop: every request has its time, whatever becomes of the others.

The arrival process gives slots; each slot goes to a class drawn by weight, independently of all others, so a class's
share of the slots is binomial. A class without sessions sends one request a slot.

A class with sessions must send as many requests as it has slots, first turns and later turns together, and its later
turns must come at their think times. So: a later turn is sent when it is due and uses up the class's next free slot;
a slot that no later turn has used up begins a new conversation. Up to any time the class has sent one request for
each slot, plus only those later turns that are ahead of the slots they will use up. A run begins without
conversations: at first all requests of such a class are first turns (the warm-up cut is for this). When slots end or
become rare (all at once, after a burst), conversations that are under way still go on, on top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heappop, heappush

from headrace.bench.load.class_plan import ClassPlan, IllegalPlan, LiveSession
from headrace.bench.planned import PlannedRequest


class Timeline:
    """Requests in order of time. What is known before its time waits for it; what is due at or after the run's end
    never comes."""

    def __init__(self, duration_ns: int) -> None:
        self.requests: list[PlannedRequest] = []
        self._duration_ns = duration_ns
        self._waiting: list[tuple[int, int, Callable[[int], None]]] = []
        self._added = 0
        self._taken = 0

    @property
    def next_index(self) -> int:
        return self._taken + len(self.requests)

    def take(self) -> list[PlannedRequest]:
        """The requests since the last time, which are then forgotten here."""
        taken, self.requests = self.requests, []
        self._taken += len(taken)
        return taken

    def later(self, due_ns: int, send: Callable[[int], None]) -> None:
        """``send`` is called with ``due_ns`` when that time has come."""
        if due_ns < self._duration_ns:
            # The count keeps those of one time in order.
            heappush(self._waiting, (due_ns, self._added, send))
            self._added += 1

    def advance(self, now_ns: int) -> None:
        """Send all that is due before ``now_ns`` or at it."""
        while self._waiting and self._waiting[0][0] <= now_ns:
            due_ns, _, send = heappop(self._waiting)
            send(due_ns)

    def finish(self) -> list[PlannedRequest]:
        """Send what is left; all requests."""
        self.advance(self._duration_ns)
        return self.requests


def stream_open(
    plans: dict[str, ClassPlan],
    classes: Iterator[str],
    illegal: IllegalPlan,
    times_ns: Iterable[int],
    duration_ns: int,
) -> Iterator[PlannedRequest]:
    """All requests in order of time, one after the other, none of them kept. ``classes`` draws each slot's class,
    ``times_ns`` are the slots, sorted."""
    timeline = Timeline(duration_ns)
    sessions = {name: SessionSlots(plan, timeline) for name, plan in plans.items() if plan.in_sessions}
    for time_ns, next_ns in with_next(times_ns, duration_ns):
        timeline.advance(time_ns)
        yield from timeline.take()
        name = next(classes)
        if name in sessions:
            sessions[name].slot(time_ns)
        else:
            single = plans[name].single(timeline.next_index, due_ns=time_ns, user=None, think_ns=0)
            timeline.requests.append(single)
        add_illegal(timeline, illegal, time_ns, next_ns)
    yield from timeline.finish()


class SessionSlots:
    """One class's slots and conversations."""

    def __init__(self, plan: ClassPlan, timeline: Timeline) -> None:
        self._plan = plan
        self._timeline = timeline
        self._ahead = 0
        """Later turns sent that have not used up a slot yet."""

    def slot(self, time_ns: int) -> None:
        """The class's next slot: used up by a later turn sent before it, or a new conversation's beginning."""
        if self._ahead:
            self._ahead -= 1
        else:
            self._send(self._plan.begin(), time_ns)

    def _later_turn(self, live: LiveSession, due_ns: int) -> None:
        self._ahead += 1
        self._send(live, due_ns)

    def _send(self, live: LiveSession, due_ns: int) -> None:
        turn = self._plan.turn(live, self._timeline.next_index, due_ns=due_ns, user=None, think_ns=0)
        self._timeline.requests.append(turn)
        if not live.ended:
            self._timeline.later(due_ns + live.next_turn.think_ns, partial(self._later_turn, live))


def add_illegal(timeline: Timeline, illegal: IllegalPlan, time_ns: int, next_ns: int) -> None:
    """Maybe an illegal request, somewhere between a legal arrival and the next: they come in the same rhythm."""
    place = illegal.place()
    if place is not None:
        due_ns = time_ns + int(place * (next_ns - time_ns))
        timeline.later(due_ns, lambda due: timeline.requests.append(illegal.request(timeline.next_index, due_ns=due)))


def with_next(times_ns: Iterable[int], end_ns: int) -> Iterator[tuple[int, int]]:
    """Each time with the one after it; the last with ``end_ns``."""
    before: int | None = None
    for time_ns in times_ns:
        if before is not None:
            yield before, time_ns
        before = time_ns
    if before is not None:
        yield before, max(before, end_ns)
