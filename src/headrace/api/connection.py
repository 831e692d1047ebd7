"""One HTTP connection, guarded against clients that stall.

uvicorn bounds how long an idle connection is kept, but not how long request headers may take, how long a
client may leave written bytes unread, or how long it may go on sending a body that was answered already.

Nor does it keep apart what belongs to different requests when a client sends nonsense. Here a request must be one that
every server and proxy on the way understands alike: one Host, one length, headers within bounds, nothing in the
trailers of a body that counts as a header. After anything else the connection ends: what follows on it could be taken
for somebody else's request.

It also lends each request a ``BodyWriter``, the short way for the tokens of a stream.
"""

from __future__ import annotations

import asyncio
import re
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.api.errors import error_body

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
"""Header lines of one request."""

_LINGER_S = 2.0
"""How long a refused client may go on sending before it is cut off."""

BODY_WRITER_KEY = "headrace.body_writer"

BodyWriter = Callable[[bytes], bool]
"""Writes a part of a begun chunked response at once, or returns False where ASGI's ``send`` must be used: the
client reads too slowly, or has left."""
_PHRASES = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds: for a request's head to arrive, for written bytes to make progress, and for the rest of a body
    that was answered already."""

    head_timeout_s: float
    write_timeout_s: float
    body_timeout_s: float


def guarded_protocol(limits: ConnectionLimits) -> type[GuardedProtocol]:
    """A protocol class for uvicorn's ``http`` setting. Other limits given to it hold for open connections too."""
    return type("Protocol", (GuardedProtocol,), {"limits": limits})


class _Refused(Exception):
    """Raised into the parser: the request being parsed is not served."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GuardedProtocol(HttpToolsProtocol):
    """A connection with ``limits``; made by ``guarded_protocol``."""

    limits: ConnectionLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = _Timer(self.loop, self._abort)
        self._writes = _Timer(self.loop, self._check_progress)
        self._body = _Timer(self.loop, self._abort)
        self._head_bytes = 0
        self._in_head = True
        self._unwritten = 0
        self._trailer_bytes = 0
        self._why: _Refused | None = None
        self._ended = False
        self._active: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head.start(self.limits.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._writes, self._body):
            timer.end()
        active = self._active
        super().connection_lost(exc)
        # With pipelined requests uvicorn tells only the last one; the one being answered must stop too.
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return  # the rest of what could not be understood
        if self._in_head:
            if not self._head.running:
                self._head.start(self.limits.head_timeout_s)
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self._head_may_be_over(data):
                self._refuse(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")
                return
            data = _without_upgrade(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._trailer_bytes = 0
        self._head.start(self.limits.head_timeout_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            # Trailers come after the headers were judged; as headers they would pass every proxy's filter.
            self._trailer_bytes += len(name) + len(value)
            if self._trailer_bytes > MAX_HEAD_BYTES:
                raise self._because(431, f"the body's trailers are larger than {MAX_HEAD_BYTES} bytes")
            return
        if len(self.headers) >= MAX_HEADERS:
            raise self._because(431, f"the request has more than {MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._head.stop()
        self._check_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._body.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        active = self._active
        super().on_response_complete()
        if active is not None and active.more_body:
            self._body.start(self.limits.body_timeout_s)
        # No more writes will come that could find the connection stuck.
        if self.transport.get_write_buffer_size():
            self._watch_writes()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        self._writes.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        why = self._why or _Refused(400, "this is not a valid HTTP request")
        self._refuse(why.status, str(why))

    def _because(self, status: int, message: str) -> _Refused:
        self._why = _Refused(status, message)
        return self._why

    def _check_head(self) -> None:
        """Raise _Refused for a head that another server could understand differently (RFC 9112, 3.2 and 6.3)."""
        counts = Counter(name for name, _ in self.headers)
        host, length, coding = counts[b"host"], counts[b"content-length"], counts[b"transfer-encoding"]
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise self._because(400, "this version of HTTP is not spoken here")
        if host > 1 or (host == 0 and version == "1.1"):
            raise self._because(400, "a request needs one Host header")
        if length > 1 or coding > 1 or (length and coding):
            raise self._because(400, "a request has one Content-Length, or one Transfer-Encoding, or neither")
        if coding and version != "1.1":
            raise self._because(400, "Transfer-Encoding needs HTTP/1.1")
        for name, value in self.headers:
            if name == b"content-length" and not value.isdigit():
                raise self._because(400, "Content-Length must be a number")
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise self._because(400, "the only Transfer-Encoding that is understood is chunked")
            if b"\x00" in value or b"\r" in value or b"\n" in value:
                raise self._because(400, "a header's value must not contain line ends or zero bytes")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        cycle.scope[BODY_WRITER_KEY] = _body_writer(cycle)  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def _refuse(self, status: int, message: str) -> None:
        """End the connection, with an answer when no request before is still owed one: nobody may take this answer for
        that one's."""
        self._ended = True
        self._head.stop()
        self.pipeline.clear()
        active = self._active
        if active is not None and not active.response_complete and not active.more_body:
            active.keep_alive = False  # it was a whole request and gets its answer
            return
        if active is not None and active.more_body and active.response_started:
            self.transport.close()
            return
        phrase = _PHRASES[status]
        body = error_body(message, type_="invalid_request_error")
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            status,
            phrase,
            len(body),
        )
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        # Closing at once, with bytes of the client still unread, would reset the connection and take the answer away.
        self.transport.write_eof()
        self._body.start(_LINGER_S)

    def _head_may_be_over(self, data: bytes) -> bool:
        """A head of allowed size may arrive in one piece with a part of its body."""
        end = data.find(b"\r\n\r\n")
        return end >= 0 and self._head_bytes - len(data) + end <= MAX_HEAD_BYTES

    def _watch_writes(self) -> None:
        self._unwritten = self.transport.get_write_buffer_size()
        self._writes.start(self.limits.write_timeout_s)

    def _check_progress(self) -> None:
        """The write timeout passed: give up unless the client read something meanwhile."""
        left = self.transport.get_write_buffer_size()
        if left >= self._unwritten > 0:
            self._abort()
        elif left:
            self._watch_writes()

    def _abort(self) -> None:
        self.transport.abort()


def _body_writer(cycle: RequestResponseCycle) -> BodyWriter:
    reference = weakref.ref(cycle)  # the cycle owns the scope, which holds this

    def write(body: bytes) -> bool:
        cycle = reference()
        if cycle is None or cycle.disconnected or cycle.flow.write_paused or cycle.response_complete:
            return False
        if not cycle.chunked_encoding:
            return False  # not begun yet, HTTP/1.0, or a length was promised
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return write


def _without_upgrade(data: bytes) -> bytes:
    """A request's head with its offer to change the protocol taken out.

    Some HTTP clients offer HTTP/2 with every request. A server may ignore that, but the parser takes what
    follows for the other protocol and the request's body would be lost.
    """
    found = _UPGRADE.search(data)
    if found is None or 0 <= data.find(b"\r\n\r\n") < found.start():
        return data
    return data[: found.start()] + b"\r\nx-ignored-upgrade:" + data[found.end() :]


class _Timer:
    """A restartable one-shot timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    @property
    def running(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float) -> None:
        self.stop()
        self._handle = self._loop.call_later(seconds, self._callback)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def end(self) -> None:
        """Stop for good, and let go of whom the callback belongs to."""
        self.stop()
        self._callback = _nothing


def _nothing() -> None:
    return
