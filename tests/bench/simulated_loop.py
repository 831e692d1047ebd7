"""An event loop whose time is simulated: when nothing is ready it jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """``now_ns`` is its time. Waiting for something that no timer brings raises RuntimeError."""

    def __init__(self) -> None:
        self._simulated_s = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._simulated_s

    def now_ns(self) -> int:
        return round(self._simulated_s * 1e9)

    def jump(self, seconds: float) -> None:
        self._simulated_s += seconds


class _Jumping(selectors.SelectSelector):
    """Never waits."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits and no timer is set")
        if timeout > 0:
            self._loop.jump(timeout)
        return super().select(0)


def simulate(loop: SimulatedLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end in simulated time."""
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
