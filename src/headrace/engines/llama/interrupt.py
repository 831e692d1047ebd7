"""Stopping a forward pass that is under way: libllama's abort callback.

libllama asks the callback before every operation of a graph (about a thousand times a pass), on the thread that called
``llama_decode``; the answer True ends the pass. CPU backends ask, others do not: there a pass runs to its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

ASK_INTERVAL_S = 0.002
"""A question may cost tens of microseconds (a look at a socket); libllama's own asking is far more frequent."""


class Interrupt:
    """The callback of one context."""

    def __init__(self, api: Any, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        # libllama keeps only the pointer: the object has to live as long as the context.
        self._callback = api.ggml_abort_callback(self._asked)
        self._no_callback = api.ggml_abort_callback()
        self._cut: Callable[[], bool] = _never
        self._next_s = 0.0
        self._error: Exception | None = None

    def _asked(self, _data: object) -> bool:
        now_s = self._clock()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + ASK_INTERVAL_S
        try:
            return self._cut()
        except Exception as error:  # nothing may travel through libllama: raised again once it has returned
            self._error = error
            return True

    @contextlib.contextmanager
    def watching(self, context: Any, cut: Callable[[], bool]) -> Iterator[None]:
        """While the block runs, ``cut`` is asked about every ``ASK_INTERVAL_S``; once it says True, passes of
        ``context`` end. What ``cut`` raises ends the pass too and is raised at the end of the block."""
        self._cut = cut
        self._next_s = self._clock() + ASK_INTERVAL_S
        self._api.llama_set_abort_callback(context, self._callback, None)
        try:
            yield
        finally:
            self._api.llama_set_abort_callback(context, self._no_callback, None)
            self._cut = _never
        error, self._error = self._error, None
        if error is not None:
            raise error


def _never() -> bool:
    return False
