"""The client of a simulated run: sends a schedule as ``bench.drive.dispatch`` does, on the virtual clock.

Open loop: a request is sent when it is due, a later turn of a conversation when the one before has ended too. Closed
loop: each user sends its row in order, the next one its think time after the last one ended; nothing more is sent
after the load's duration.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from headrace.bench.planned import PlannedRequest
from headrace.bench.records import RequestRecord
from headrace.simulate.simulation import Event, Simulation, SimulationError

_NS: Final = 1e9

Send = Callable[[PlannedRequest, int, int, float], Iterable[Event]]
"""Send a request, with the time when it was due and when it was ready, nanoseconds, now, seconds."""


class Client:
    """``begin`` gives the first events; ``ended`` is to be called with every record. ``unsent`` are requests that were
    due and not sent."""

    def __init__(
        self,
        simulation: Simulation,
        requests: Iterator[PlannedRequest],
        send: Send,
        *,
        duration_s: float,
        closed: bool,
        network_s: float = 0.0,
    ) -> None:
        self._simulation = simulation
        self._requests = requests
        self._send = send
        self._duration_ns = round(duration_s * _NS)
        self._network_s = network_s
        self._closed = closed
        self._rows: dict[int, deque[PlannedRequest]] = defaultdict(deque)
        self._alive: set[int] = set()
        """Requests of conversations that were sent, or wait, and have not ended."""
        self._behind: dict[int, list[PlannedRequest]] = defaultdict(list)
        self.sent = 0
        self.exhausted = False

    def begin(self) -> Iterable[Event]:
        """The first arrivals."""
        if not self._closed:
            return self._next()
        for request in self._requests:
            assert request.user is not None
            self._rows[request.user].append(request)
        self.exhausted = True
        return [event for user in sorted(self._rows) for event in self._next_of(user, 0)]

    @property
    def unsent(self) -> list[PlannedRequest]:
        """Later turns that still wait for the ones before them."""
        return (
            []
            if self._closed
            else sorted(
                [request for behind in self._behind.values() for request in behind], key=lambda request: request.index
            )
        )

    def ended(self, record: RequestRecord, now_s: float) -> None:
        """A request has ended: whoever waited for it may go."""
        end_ns = record.end_ns if record.end_ns is not None else round(now_s * _NS)
        if record.index in self._alive:
            self._alive.discard(record.index)
            for request in self._behind.pop(record.index, ()):
                due_ns = request.due_ns if request.due_ns is not None else end_ns
                self._put(request, due_ns, max(due_ns, end_ns))
        if record.user is not None and end_ns < self._duration_ns:
            self._simulation.add(*self._next_of(record.user, end_ns))

    # ----------------------------------------------------------------------------------------- open loop

    def _next(self) -> Iterable[Event]:
        """The next request of the schedule. Its arrival brings the one after it."""
        request = next(self._requests, None)
        if request is None:
            self.exhausted = True
            return ()
        assert request.due_ns is not None
        return (Event(self._at_s(request.due_ns), partial(self._due, request)),)

    def _due(self, request: PlannedRequest, now_s: float) -> Iterable[Event]:
        assert request.due_ns is not None
        events = list(self._next())
        if request.session is not None:
            self._alive.add(request.index)
        if request.after is not None and request.after in self._alive:
            self._behind[request.after].append(request)
            return events
        return [*self._go(request, request.due_ns, request.due_ns, now_s), *events]

    # --------------------------------------------------------------------------------------- closed loop

    def _next_of(self, user: int, free_ns: int) -> list[Event]:
        """The next request of a user who is free from ``free_ns`` on: rows are in order, so the turn before it has
        ended."""
        row = self._rows[user]
        if not row:
            return []
        request = row.popleft()
        due_ns = free_ns + request.think_ns if free_ns else 0
        if due_ns >= self._duration_ns:
            row.clear()
            return []
        return [Event(self._at_s(due_ns), partial(self._go, request, due_ns, due_ns))]

    # ---------------------------------------------------------------------------------------------- both

    def _put(self, request: PlannedRequest, due_ns: int, ready_ns: int) -> None:
        self._simulation.add(Event(self._at_s(ready_ns), partial(self._go, request, due_ns, ready_ns)))

    def _go(self, request: PlannedRequest, due_ns: int, ready_ns: int, now_s: float) -> Iterable[Event]:
        self.sent += 1
        return self._send(request, due_ns, ready_ns, now_s)

    def _at_s(self, at_ns: int) -> float:
        """When the gateway has what was sent at ``at_ns``."""
        at_s = at_ns / _NS + self._network_s
        if at_s < self._simulation.now_s - 1e-6:
            raise SimulationError(f"a request due at {at_s} s comes too late: it is {self._simulation.now_s} s")
        return max(at_s, self._simulation.now_s)
