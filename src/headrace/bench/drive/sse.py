"""Server-sent events, incrementally: bytes in as the network cuts them, whole events out.

The stream format is the one of the WHATWG HTML standard, section 9.2.6, with one addition: a field named
``error`` (older llama-server) is an event of type ``error`` with that value. An event counts when the empty
line after it has arrived; a half-received one is kept until then, and text is not decoded before it is whole,
so characters split between two reads are safe.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""A server that sends more than this without an empty line is not sending events."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """One event. ``type`` is ``message`` unless the server named another."""

    type: str
    data: bytes


class EventTooLarge(Exception):
    """An event grew beyond MAX_EVENT_BYTES."""


class SseParser:
    """Feed it every read of one response body, in order."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line: list[bytes] = []  # pieces of the line whose end has not arrived
        self._event_bytes = 0
        self._data: list[bytes] = []
        self._type = ""
        self._has_data = False
        self._after_cr = False
        self._at_start = True

    @property
    def pending(self) -> bool:
        """True while part of an event has arrived: at the end of the stream it means that the event was cut."""
        return bool(self._line) or self._has_data

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that ``data`` completes, in order. Raises EventTooLarge."""
        if self._after_cr and data:
            # A carriage return ended the last line at once; a line feed behind it belongs to it.
            self._after_cr = False
            if data[0] == 0x0A:
                data = data[1:]
        if not data:
            return []
        if b"\n" not in data and b"\r" not in data:
            self._count(len(data))
            self._line.append(data)
            return []
        if self._line:
            self._event_bytes -= sum(map(len, self._line))  # counted again as part of the whole line
            data = b"".join((*self._line, data))
            self._line.clear()
        if self._at_start:
            self._at_start = False
            data = data.removeprefix(_BYTE_ORDER_MARK)
        events: list[SseEvent] = []
        for line in data.splitlines(keepends=True):  # of bytes: at \n, \r and \r\n only
            last = line[-1]
            if last != 0x0A and last != 0x0D:
                self._count(len(line))
                self._line.append(line)
                break
            self._take(line.rstrip(b"\r\n"), events)
        else:
            self._after_cr = data[-1] == 0x0D
        return events

    def _count(self, size: int) -> None:
        self._event_bytes += size
        if self._event_bytes > self._max_event_bytes:
            raise EventTooLarge(f"an event of more than {self._max_event_bytes} bytes")

    def _take(self, line: bytes, events: list[SseEvent]) -> None:
        """One whole line, without its end."""
        if not line:
            if self._has_data:
                events.append(SseEvent(self._type or "message", b"\n".join(self._data)))
            self._data.clear()
            self._type, self._has_data, self._event_bytes = "", False, 0
            return
        self._count(len(line))
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._has_data = True
        elif name == b"event":
            self._type = value.decode("utf-8", "replace")
        elif name == b"error":
            self._type = "error"
            self._data.append(value)
            self._has_data = True
        # Comments (an empty name), ids, retry times and unknown fields carry nothing that is measured.
