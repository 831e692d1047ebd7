"""Noticing that the client went away while its answer is being made."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from headrace.api.errors import ClientDisconnected


class CancelOnDisconnect:
    """Cancels the enclosed block the moment the client disconnects, and raises ClientDisconnected.

    Use after the body was read whole. Works as ``asyncio.timeout`` does: a cancellation from elsewhere goes
    through untouched.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._disconnected = False
        self._cancelling = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None and self._watcher is not None
        self._watcher.cancel()
        # The cancelled watcher's traceback holds this object: with a way back, every request would be a cycle, and
        # thousands of them would wait for the collector.
        task, self._task, self._watcher = self._task, None, None
        if not self._disconnected:
            return
        if task.uncancel() <= self._cancelling and kind is not None:
            # Whatever the block raised on its way out, nobody is there to hear it.
            raise ClientDisconnected from error

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                break
        if self._task is not None:
            self._disconnected = True
            self._task.cancel()
