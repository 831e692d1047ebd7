"""Request bodies made ahead of their time, so that nothing is written at the moment of sending.

Before the run as many bodies are made as the budget holds, in the order of sending (most runs fit whole). After
that a thread makes the next one whenever one was taken. A later turn of a conversation, whose body holds the
reply before it, is made as soon as that reply is there, ahead of everything else. Once the thread runs, nothing
else calls the maker.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from headrace.bench.planned import PlannedRequest
from headrace.bench.requests.bodies import Turn, Wire

BUDGET_BYTES = 256 * 1024 * 1024

_OVERHEAD_BYTES = 1024  # of the objects around a body


class BodyMaker(Protocol):
    """``bodies.RequestBodies``: writes one request. Must be pure."""

    def build(self, request: PlannedRequest, history: Sequence[Turn] = ()) -> Wire: ...


class BodyWindow:
    """``upcoming`` are the requests without a turn before them, in the order of sending."""

    def __init__(
        self, maker: BodyMaker, upcoming: Iterable[PlannedRequest], *, budget_bytes: int = BUDGET_BYTES
    ) -> None:
        self._maker = maker
        self._upcoming = deque(upcoming)
        self._budget_bytes = budget_bytes
        self._held_bytes = 0
        self._ready: dict[int, Wire] = {}
        self._claimed: set[int] = set()  # made, being made, or ordered
        self._urgent: deque[tuple[PlannedRequest, Sequence[Turn]]] = deque()
        self._waiting: dict[int, asyncio.Future[Wire]] = {}
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def fill(self) -> None:
        """Make what the budget holds, before the run. Raises what the maker raises."""
        while self._upcoming and self._held_bytes < self._budget_bytes:
            request = self._upcoming.popleft()
            wire = self._maker.build(request)
            self._claimed.add(request.index)
            self._held_bytes += _size(wire)
            self._ready[request.index] = wire

    def start(self) -> None:
        """Start the thread. Call it in the event loop that will take."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._make, name="bench-bodies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def order(self, request: PlannedRequest, history: Sequence[Turn] = ()) -> None:
        """Make this one next, unless it is made or being made."""
        with self._changed:
            if request.index not in self._claimed:
                self._claimed.add(request.index)
                self._urgent.append((request, history))
                self._changed.notify()

    async def take(self, request: PlannedRequest) -> Wire:
        """The request's body: at once when it was made ahead, else as soon as it is made. Raises what the maker
        raised."""
        wire = self._ready.pop(request.index, None)
        if wire is None:
            wire = await self._wait(request)
        with self._changed:
            self._held_bytes -= _size(wire)
            if self._upcoming:
                self._changed.notify()
        return wire

    async def _wait(self, request: PlannedRequest) -> Wire:
        if self._failure is not None:
            raise self._failure
        self.order(request)
        future: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
        self._waiting[request.index] = future
        try:
            return await future
        finally:
            del self._waiting[request.index]

    def _make(self) -> None:
        """The thread's life."""
        assert self._loop is not None
        while (job := self._next_job()) is not None:
            request, history = job
            try:
                wire = self._maker.build(request, history)
            except Exception as error:
                self._loop.call_soon_threadsafe(self._fail, error)
                return
            with self._changed:
                self._held_bytes += _size(wire)
            self._loop.call_soon_threadsafe(self._give, request.index, wire)

    def _next_job(self) -> tuple[PlannedRequest, Sequence[Turn]] | None:
        with self._changed:
            while not self._closed:
                if self._urgent:
                    return self._urgent.popleft()
                while self._upcoming and self._upcoming[0].index in self._claimed:
                    self._upcoming.popleft()
                if self._upcoming and self._held_bytes < self._budget_bytes:
                    request = self._upcoming.popleft()
                    self._claimed.add(request.index)
                    return request, ()
                self._changed.wait()
        return None

    def _give(self, index: int, wire: Wire) -> None:
        future = self._waiting.get(index)
        if future is None or future.done():
            self._ready[index] = wire
        else:
            future.set_result(wire)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def _size(wire: Wire) -> int:
    return len(wire.body) + _OVERHEAD_BYTES
