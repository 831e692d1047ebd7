"""One sequence's outputs on their way to the request that reads them.

A hand-made iterator instead of an ``asyncio.Queue`` behind an async generator: between two steps the caches
are cold from the arithmetic, and every layer that a token passes was measured at about ten microseconds of a
core that the arithmetic wants back. For the same reason a reader may leave a ``sink``: what it takes never
wakes the reader's task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from headrace.errors import EngineError
from headrace.messages.engine import SequenceOutput

MOST_UNREAD: Final = 64

Pressure = Callable[[bool], None]
Sink = Callable[[SequenceOutput], bool]
"""Takes an output on the spot (True), or leaves it to the iterator (False). Must not raise."""


class OutputStream:
    """An async iterator over a sequence's outputs; ends after the one with ``finish``.

    ``begin`` is called at the first ``anext`` (it sends the request, or raises), ``abort`` when the stream is
    closed before its end.
    """

    __slots__ = ("_abort", "_begin", "_ended", "_items", "_pressed", "_pressure", "_sink", "_started", "_waiter")

    def __init__(self, begin: Callable[[OutputStream], None], abort: Callable[[OutputStream], None]) -> None:
        self._begin = begin
        self._abort = abort
        self._items: deque[SequenceOutput | EngineError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._pressure: Pressure | None = None
        self._pressed = False
        self._started = False
        self._ended = False

    def forward(self, sink: Sink) -> None:
        """From now on offer each output to ``sink`` first, as it arrives.

        Only while the reader waits for the next one, so the order stays: what came before has been read and
        dealt with. The last output and errors always go to the reader.
        """
        self._sink = sink

    def bound(self, pressure: Pressure) -> None:
        """Say to ``pressure`` when ``MOST_UNREAD`` outputs wait for a reader that is slow (True), and when it has
        caught up (False). Whoever pushes bounds memory by that."""
        self._pressure = pressure

    @property
    def pressed(self) -> bool:
        """Whether so many outputs wait that no more should come."""
        return self._pressed

    def push(self, item: SequenceOutput | EngineError) -> None:
        """Hand over an output, or the error that ends the stream."""
        waiter = self._waiter
        waiting = waiter is not None and not waiter.done()
        if (
            waiting
            and self._sink is not None
            and not isinstance(item, EngineError)
            and item.finish is None
            and self._sink(item)
        ):
            return
        self._items.append(item)
        if waiter is not None and waiting:
            waiter.set_result(None)
        elif self._pressure is not None and not self._pressed and len(self._items) >= MOST_UNREAD:
            self._pressed = True
            self._pressure(True)

    def fail(self, error: EngineError) -> None:
        """End the stream with an error for its reader, and abort what runs behind it."""
        if self._started and not self._ended:
            self._items.append(error)
            waiter = self._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            self._abort(self)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> SequenceOutput:
        if self._ended:
            raise StopAsyncIteration
        if not self._started:
            self._started = True
            try:
                self._begin(self)
            except EngineError:
                self._let_go()
                raise
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                await self.aclose()  # as an async generator would: nobody may be left who could
                raise
            finally:
                self._waiter = None
        item = self._items.popleft()
        if self._pressed and self._pressure is not None and len(self._items) <= MOST_UNREAD // 4:
            self._pressed = False
            self._pressure(False)
        if isinstance(item, EngineError):
            self._let_go()
            raise item
        if item.finish is not None:
            self._let_go()
        return item

    async def aclose(self) -> None:
        """End the stream; aborts the sequence when it has begun and not ended."""
        if self._started and not self._ended:
            self._abort(self)
        self._let_go()

    def _let_go(self) -> None:
        """It has ended: whoever made it and reads it is let go of. They hold it in turn, and thousands of such cycles
        would wait for the collector, whose pauses every other stream would see."""
        self._ended = True
        self._begin = self._abort = _nothing
        self._sink = self._pressure = None


def _nothing(_: OutputStream) -> None:
    return
