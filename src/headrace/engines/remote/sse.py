"""Server-sent events out of bytes that come in pieces of any size. Pure."""

from __future__ import annotations

import re
from typing import Final

from headrace.errors import RemoteFailure

MAX_EVENT_BYTES: Final = 1024 * 1024
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class EventReader:
    """Collects the ``data`` of events. Comments and other fields are skipped; lines may end in LF, CRLF or CR, and
    be split anywhere. Raises RemoteFailure (junk) for an event beyond ``max_event_bytes``."""

    __slots__ = ("_data", "_held", "_max_bytes", "_size")

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._held = b""
        self._data: list[bytes] = []
        self._size = 0
        self._max_bytes = max_event_bytes

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that ``piece`` completes."""
        if not self._held and not self._data:
            # What nearly every packet is: one whole event of one line.
            end = len(piece) - 2
            if (
                piece.startswith(b"data: ")
                and piece.find(b"\n") == end
                and piece[end:] == b"\n\n"
                and b"\r" not in piece
            ):
                return [piece[6:end]]
        text = self._held + piece
        # A CR at the end may be half of a CRLF.
        whole_to = max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1)) + 1
        self._held = text[whole_to:]
        if len(self._held) + self._size > self._max_bytes:
            raise _too_large(self._max_bytes)
        events: list[bytes] = []
        if whole_to:
            for line in _LINE_END.split(text[:whole_to])[:-1]:
                self._line(line, events)
        return events

    def finish(self) -> list[bytes]:
        """The stream ended: an event without its empty line still counts."""
        events: list[bytes] = []
        if self._held:
            self._line(self._held.rstrip(b"\r"), events)
            self._held = b""
        self._line(b"", events)
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._size = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value) + 1
            if self._size > self._max_bytes:
                raise _too_large(self._max_bytes)


def _too_large(limit: int) -> RemoteFailure:
    return RemoteFailure(f"the engine sent an event of more than {limit} bytes", kind="junk")
