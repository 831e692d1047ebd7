"""From sampled tokens to text that may be sent: whole UTF-8 characters only, and never part of a stop
string. Pure: bytes in, text out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Text of one sequence as it grows.

    ``push`` takes the bytes of one token and returns the text that is now certain. Bytes of an unfinished
    character and text that could still become a stop string are held back until the next push or
    ``finish``. After a stop string was found (``stopped_by`` is set) nothing more comes out.
    """

    __slots__ = ("_decoder", "_held", "_include_stop", "_longest", "_stops", "stopped_by")

    def __init__(self, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._include_stop = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, data: bytes) -> str:
        """Add a token's bytes; returns the text that can be sent now (may be empty)."""
        return self._release(self._decoder.decode(data), final=False)

    def finish(self) -> str:
        """No more bytes will come: returns what was held back (an unfinished character as U+FFFD)."""
        return self._release(self._decoder.decode(b"", True), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        if self.stopped_by is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        found = self._first_stop(pending)
        if found is not None:
            position, stop = found
            self.stopped_by = stop
            self._held = ""
            return pending[: position + len(stop)] if self._include_stop else pending[:position]
        keep = 0 if final else self._possible_stop_length(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Earliest stop string in ``text``; the one that was complete first, the longer one on a tie."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            position = text.find(stop)
            if position >= 0:
                candidate = (position + len(stop), -len(stop), stop)
                if best is None or candidate < best:
                    best = candidate
        return None if best is None else (best[0] - len(best[2]), best[2])

    def _possible_stop_length(self, text: str) -> int:
        """Length of the longest end of ``text`` with which some stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops if len(stop) > length):
                return length
        return 0
