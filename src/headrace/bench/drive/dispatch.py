"""Sends a schedule: every request at its time, whatever became of the others.

*Open loop*: a request is ready when it is due, and a later turn of a conversation when the turn before it has
ended too (in whatever way: a shed turn does not take the load of the next one away). Nothing else holds a request
back: no pool, no cap, no wait for answers.

*Closed loop*: each user sends its row in order. Its first request is due at once, each next one ``think_ns`` after
the last one ended. At the duration's end nothing more is sent.

The run ends when all is answered and the duration is over, or ``drain_s`` after it: what is in flight then is
cancelled. In an open loop the requests that could not be sent by then (their conversations were behind) have
records too, so every request that was due is accounted for.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from headrace.bench.drive.client import Sent
from headrace.bench.planned import PlannedRequest, Schedule
from headrace.bench.records import INTERRUPTED, RequestRecord, new_record
from headrace.bench.requests.bodies import Turn, Wire
from headrace.errors import ConfigError

_NS = 1_000_000_000
_MS_NS = 1_000_000


class Sender(Protocol):
    """``client.Client``: sends one request and reads its answer; never raises for what the server does."""

    async def send(
        self, planned: PlannedRequest, request: Wire, *, due_ns: int, ready_ns: int, keep_text: bool = False
    ) -> Sent: ...


class Bodies(Protocol):
    """``body_window.BodyWindow``."""

    def order(self, request: PlannedRequest, history: Sequence[Turn] = ()) -> None: ...

    async def take(self, request: PlannedRequest) -> Wire: ...


class _Entry(NamedTuple):
    """A request that waits for its time. Sorts by it."""

    ready_ns: int
    request_index: int
    due_ns: int


class Dispatcher:
    """Runs one schedule once. ``now_ns`` is the time since the run's start; ``on_record`` gets every record as
    soon as its request has ended."""

    def __init__(
        self,
        schedule: Schedule,
        bodies: Bodies,
        sender: Sender,
        *,
        drain_s: float,
        now_ns: Callable[[], int],
        on_record: Callable[[RequestRecord], None],
    ) -> None:
        self._planned = {request.index: request for request in schedule.requests}
        self._bodies = bodies
        self._sender = sender
        self._now_ns = now_ns
        self._on_record = on_record
        self._closed_loop = schedule.concurrency is not None
        self._duration_ns = round(schedule.duration_s * _NS)
        self._drain_ns = round(drain_s * _NS)
        self._deadline_ns = self._duration_ns + self._drain_ns
        self._interrupted_ns: int | None = None
        self._ended_at_once = False
        self._sending = True
        self._queue: list[_Entry] = []
        self._rows: dict[int, deque[PlannedRequest]] = defaultdict(deque)
        self._turns_after: dict[int, list[_Entry]] = defaultdict(list)
        self._turns_to_come = Counter(request.after for request in schedule.requests if request.after is not None)
        self._history: dict[int, tuple[Turn, ...]] = {}  # up to and with a turn that ended
        self._past: dict[int, tuple[Turn, ...]] = {}  # before a turn that was released
        self._running: dict[int, asyncio.Task[None]] = {}
        self._open: dict[int, _Entry] = {}
        self._failure: Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        self._wake_ns = 0
        self.sent = 0
        self.peak_in_flight = 0
        self.users_without_work = 0
        """Users of a closed loop whose row was empty before the duration ended: the load was smaller after that."""

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended."""
        return len(self._running)

    @property
    def interrupted_ns(self) -> int | None:
        """When the first interrupt came."""
        return self._interrupted_ns

    def next_due_ns(self) -> int | None:
        """When the next request is to be sent, as far as that is known."""
        return self._queue[0].ready_ns if self._queue else None

    def interrupt(self) -> None:
        """The first time: send nothing more, let what is in flight end within the drain time. The second time:
        end now; the error of what was cancelled by it is INTERRUPTED."""
        now_ns = self._now_ns()
        if self._interrupted_ns is None:
            self._interrupted_ns = now_ns
            self._sending = False
            self._deadline_ns = min(self._deadline_ns, now_ns + self._drain_ns)
        else:
            self._deadline_ns = now_ns
            self._ended_at_once = True
        self._ring()

    async def run(self) -> None:
        """Send everything and wait for the end. Raises what the body maker raised."""
        self._plan()
        try:
            while True:
                now_ns = self._now_ns()
                if self._closed_loop and now_ns >= self._duration_ns:
                    self._sending = False
                if self._sending:
                    self._launch_due(now_ns)
                if self._failure is not None:
                    raise self._failure
                if now_ns >= self._deadline_ns or self._is_over(now_ns):
                    break
                await self._sleep(now_ns, self._next_event_ns(now_ns))
        finally:
            await self._cancel_running()
        self._account_for_unsent()

    def _plan(self) -> None:
        """What is known before the run: open loop, all times; closed loop, everybody's first request."""
        unknown = self._turns_to_come.keys() - self._planned.keys()
        if unknown:
            raise ConfigError(f"requests come after {sorted(unknown)[:3]}, which are not in it", where="schedule")
        if self._closed_loop:
            for request in self._planned.values():
                assert request.user is not None
                self._rows[request.user].append(request)
            for user in list(self._rows):
                self._next_of(user, 0)
            return
        for request in self._planned.values():
            assert request.due_ns is not None
            entry = _Entry(request.due_ns, request.index, request.due_ns)
            if request.after is None:
                self._queue.append(entry)
            else:
                self._turns_after[request.after].append(entry)
        heapq.heapify(self._queue)

    def _next_of(self, user: int, free_ns: int) -> None:
        """The next request of a user who is free from ``free_ns`` on."""
        row = self._rows[user]
        if not row:
            if free_ns < self._duration_ns:
                self.users_without_work += 1
            return
        request = row.popleft()
        due_ns = free_ns + request.think_ns if free_ns else 0
        entry = _Entry(due_ns, request.index, due_ns)
        if request.after is not None and request.after not in self._history:
            self._turns_after[request.after].append(entry)
        else:
            self._release(entry, free_ns)

    def _release(self, entry: _Entry, now_ns: int) -> None:
        """From now on only its time holds this request back; for a later turn its body can be made."""
        request = self._planned[entry.request_index]
        if request.after is not None:
            history = self._history[request.after]
            self._turns_to_come[request.after] -= 1
            if not self._turns_to_come[request.after]:
                del self._history[request.after]
            self._past[request.index] = history
            self._bodies.order(request, history)
        heapq.heappush(self._queue, entry._replace(ready_ns=max(entry.due_ns, now_ns)))
        if self._queue[0].request_index == entry.request_index and entry.ready_ns < self._wake_ns:
            self._ring()

    def _launch_due(self, now_ns: int) -> None:
        loop = asyncio.get_running_loop()
        queue = self._queue
        while queue and queue[0].ready_ns <= now_ns:
            entry = heapq.heappop(queue)
            self._open[entry.request_index] = entry
            self._running[entry.request_index] = loop.create_task(self._one(self._planned[entry.request_index], entry))
            self.sent += 1
        self.peak_in_flight = max(self.peak_in_flight, len(self._running))

    async def _one(self, request: PlannedRequest, entry: _Entry) -> None:
        """One request from its body to its record."""
        try:
            wire = await self._bodies.take(request)
            sent = await self._sender.send(
                request,
                wire,
                due_ns=entry.due_ns,
                ready_ns=entry.ready_ns,
                keep_text=self._turns_to_come[request.index] > 0,
            )
            self._end(request, wire, sent)
        except Exception as error:  # raised again by run(): nothing of this is the server's doing
            self._failure = error
        del self._running[request.index]
        if self._failure is not None or not self._running:
            self._ring()

    def _end(self, request: PlannedRequest, wire: Wire, sent: Sent) -> None:
        record = sent.record
        past = self._past.pop(request.index, ())
        del self._open[request.index]
        if self._turns_to_come[request.index]:
            reply = sent.text if record.outcome == "ok" else ""
            self._history[request.index] = (*past, Turn(request, wire.question, reply))
        if self._ended_at_once and record.outcome == "cancelled":
            record.error = INTERRUPTED
        self._on_record(record)
        if not self._sending:
            return
        end_ns = self._now_ns() if record.end_ns is None else record.end_ns
        for entry in self._turns_after.pop(request.index, ()):
            self._release(entry, end_ns)
        if self._closed_loop:
            assert request.user is not None
            self._next_of(request.user, end_ns)

    def _is_over(self, now_ns: int) -> bool:
        if self._running or (self._sending and self._queue):
            return False
        return self._interrupted_ns is not None or now_ns >= self._duration_ns

    def _next_event_ns(self, now_ns: int) -> int:
        """When something is to be done, unless a request ends before. ``now_ns`` is when it was looked for the end:
        were the clock read anew, a duration that ended in between would be slept through, up to the drain's end."""
        next_ns = self._deadline_ns
        if self._queue and self._sending:
            next_ns = min(next_ns, self._queue[0].ready_ns)
        if now_ns < self._duration_ns:
            next_ns = min(next_ns, self._duration_ns)
        return next_ns

    async def _sleep(self, now_ns: int, until_ns: int) -> None:
        """Until then, or until rung. Event loops count in milliseconds: rounding up sends up to 1 ms late and
        batches what is due together, rounding down would spin until the time has come."""
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        self._wake_ns = until_ns
        delay_ms = max(1, -((now_ns - until_ns) // _MS_NS))
        timer = loop.call_later(delay_ms / 1e3, self._ring)
        try:
            await self._wake
        finally:
            timer.cancel()
            self._wake = None

    def _ring(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _cancel_running(self) -> None:
        """End what is in flight; ``_one`` writes the records of those that had begun."""
        self._sending = False
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _account_for_unsent(self) -> None:
        """Records of requests that were due and not sent. What was due after an interrupt was not offered."""
        now_ns = self._now_ns()
        unsent = list(self._open.values())
        if not self._closed_loop:
            until_ns = self._duration_ns if self._interrupted_ns is None else self._interrupted_ns
            waiting = [*self._queue, *(entry for turns in self._turns_after.values() for entry in turns)]
            unsent += [entry for entry in waiting if entry.due_ns <= until_ns]
        for entry in sorted(unsent, key=lambda entry: entry.request_index):
            record = new_record(self._planned[entry.request_index], entry.due_ns, max(entry.ready_ns, now_ns))
            record.end_ns = now_ns
            record.error = INTERRUPTED if self._ended_at_once else "the run ended before it was sent"
            self._on_record(record)
