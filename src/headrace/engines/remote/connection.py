"""HTTP/1.1 to one server: connections that are kept, one request at a time on each.

httptools parses; a client of a larger kind was measured at half the chunks per second
(docs/decisions, the HTTP client of remote engines).
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import httptools

from headrace.errors import RemoteFailure

MAX_HEAD_BYTES: Final = 64 * 1024
IDLE_S: Final = 4.0
"""How long a connection is kept unused: many servers close theirs after 5 s."""

MAX_IDLE: Final = 256


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. ``host`` is a name or an address, ``server_name`` what a certificate must name and the
    ``Host`` header says, ``base_path`` what comes before ``/v1``."""

    host: str
    port: int
    tls: bool = False
    server_name: str = ""
    base_path: str = ""

    @classmethod
    def of(cls, url: str) -> Address:
        """From ``http://HOST:PORT[/PATH]``; an ending ``/v1`` is left out. Raises ValueError."""
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.fragment
            or parts.username
        ):
            raise ValueError("must look like http://HOST:PORT")
        tls = parts.scheme == "https"
        port = parts.port if parts.port is not None else (443 if tls else 80)
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, tls, parts.hostname, path)

    @property
    def host_header(self) -> str:
        name = self.server_name or self.host
        return f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}"


class Listener(Protocol):
    """Who waits for a response. Nothing is called after ``ended``."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def body(self, piece: bytes) -> None: ...

    def ended(self, problem: RemoteFailure | None) -> None:
        """The response is complete (None) or will not be."""


class Connection(asyncio.Protocol):
    """One connection. ``send`` a request when ``free``."""

    def __init__(self, on_free: Callable[[Connection], None], on_lost: Callable[[Connection], None]) -> None:
        self._on_free = on_free
        self._on_lost = on_lost
        self._listener: Listener | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._in_head = True
        self._keep = False
        self._until_close = False
        self._paused = False
        self._wanted = True
        self.transport: asyncio.Transport | None = None
        self.responses = 0
        """How many responses have begun on it."""

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    @property
    def listener(self) -> Listener | None:
        """Who waits for the response that is under way."""
        return self._listener

    def release(self) -> None:
        """Give it back unused."""
        self._on_free(self)

    def send(self, request: bytes, listener: Listener, *, keep: bool = True) -> None:
        """Send a request. Without ``keep`` the connection is closed after its answer."""
        assert self.transport is not None and self._listener is None
        self._listener = listener
        self._wanted = keep
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._head_bytes, self._in_head, self._until_close = {}, 0, True, False
        self.transport.write(request)

    def abort(self) -> None:
        """Close at once; the listener hears nothing more. An engine takes that for the client's going away."""
        self._listener = None
        if self.transport is not None:
            self.transport.abort()

    def pause(self, paused: bool) -> None:
        """Stop or go on reading: the server is held back by TCP."""
        if self.transport is None or self.transport.is_closing() or paused == self._paused:
            return
        self._paused = paused
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are not asyncio's classes.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        listener, self._listener = self._listener, None
        del self._parser  # it holds this connection
        self._on_lost(self)
        if listener is None:
            return
        if self._until_close and not self._in_head and exc is None:
            listener.ended(None)
        else:
            listener.ended(RemoteFailure("the engine closed the connection", kind="cut"))

    def data_received(self, data: bytes) -> None:
        if self._listener is None:
            # Nothing was asked for: whatever this is, the next response could be taken for it.
            self.abort()
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and b"\r\n\r\n" not in data[: MAX_HEAD_BYTES + 4]:
                self._fail(RemoteFailure(f"the engine sent a head of more than {MAX_HEAD_BYTES} bytes", kind="junk"))
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, RemoteFailure):
                raise
            self._fail(cause)
        except httptools.HttpParserError:
            self._fail(RemoteFailure("the engine does not speak HTTP as it should", kind="junk"))

    def _fail(self, failure: RemoteFailure) -> None:
        listener = self._listener
        self.abort()
        if listener is not None:
            listener.ended(failure)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._in_head = False
        self.responses += 1
        self._keep = self._parser.should_keep_alive()
        chunked = b"chunked" in self._headers.get(b"transfer-encoding", b"").lower()
        self._until_close = not chunked and b"content-length" not in self._headers
        if self._listener is not None:
            self._listener.head(status, self._headers)

    def on_body(self, piece: bytes) -> None:
        if self._listener is not None:
            self._listener.body(piece)

    def on_message_complete(self) -> None:
        if self._in_head:  # 100 Continue and its kin
            self._headers = {}
            return
        listener, self._listener = self._listener, None
        if self._keep and self._wanted and self.open:
            self.pause(False)
            self._on_free(self)
        elif self.transport is not None:
            self.transport.abort()
        if listener is not None:
            listener.ended(None)


class Pool:
    """The connections to one server."""

    def __init__(self, address: Address, *, clock: Callable[[], float], connect_s: float) -> None:
        self.address = address
        self.connect_s = connect_s
        self._clock = clock
        self._free: deque[tuple[Connection, float]] = deque()
        self._all: set[Connection] = set()
        self._tls = ssl.create_default_context() if address.tls else None
        self._closed = False

    @property
    def connections(self) -> int:
        """Connections that are open, used or not."""
        return len(self._all)

    @property
    def closed(self) -> bool:
        return self._closed

    def take(self) -> Connection | None:
        """A free connection, the one used last, or None."""
        self._drop_old()
        while self._free:
            connection, _ = self._free.pop()
            if connection.open:
                return connection
        return None

    async def connect(self) -> Connection:
        """A new connection. Raises RemoteFailure (connect)."""
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            async with asyncio.timeout(self.connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._freed, self._all.discard),
                    address.host,
                    address.port,
                    ssl=self._tls,
                    server_hostname=(address.server_name or None) if address.tls else None,
                )
        except TimeoutError as error:
            message = f"the engine accepted no connection within {self.connect_s:g} s"
            raise RemoteFailure(message, kind="connect") from error
        except OSError as error:
            raise RemoteFailure("the engine accepts no connections", kind="connect") from error
        if self._closed:
            connection.abort()
            raise RemoteFailure("the engine was taken out of service", kind="connect")
        self._all.add(connection)
        return connection

    def close(self) -> None:
        """End every connection, used ones too."""
        self._closed = True
        for connection in list(self._all):
            connection.abort()
        self._all.clear()
        self._free.clear()

    def _freed(self, connection: Connection) -> None:
        self._drop_old()
        if self._closed or len(self._free) >= MAX_IDLE:
            connection.abort()
        else:
            self._free.append((connection, self._clock()))

    def _drop_old(self) -> None:
        now_s = self._clock()
        while self._free and (now_s - self._free[0][1] > IDLE_S or not self._free[0][0].open):
            self._free.popleft()[0].abort()


async def fetch(
    pool: Pool, path: str, headers: bytes, *, limit_bytes: int, timeout_s: float, body: bytes | None = None
) -> tuple[int, bytes]:
    """GET a small document, or POST ``body``: the answer's status and body. Raises RemoteFailure."""
    collector = _Collector(limit_bytes)
    if body is None:
        request = _head(pool.address, "GET", path, headers) + b"\r\n"
    else:
        request = post(pool.address, path, headers, body)
    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await pool.connect()
            connection.send(request, collector, keep=False)
            return await collector.done
    except TimeoutError as error:
        raise RemoteFailure(f"the engine did not answer {path} within {timeout_s:g} s", kind="timeout") from error
    finally:
        if connection is not None and not collector.done.done():
            connection.abort()
        collector.done.cancel()


def post(address: Address, path: str, headers: bytes, body: bytes) -> bytes:
    """A POST request of JSON, as bytes."""
    length = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
    return _head(address, "POST", path, headers) + length + b"\r\n" + body


def _head(address: Address, method: str, path: str, headers: bytes) -> bytes:
    line = f"{method} {address.base_path}{path} HTTP/1.1\r\nhost: {address.host_header}\r\n"
    return line.encode() + headers


class _Collector:
    """Gathers a bounded body."""

    def __init__(self, limit_bytes: int) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._limit_bytes = limit_bytes
        self._status = 0
        self._body = bytearray()

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def body(self, piece: bytes) -> None:
        self._body += piece
        if len(self._body) > self._limit_bytes:
            raise RemoteFailure(f"the engine's answer is larger than {self._limit_bytes} bytes", kind="junk")

    def ended(self, problem: RemoteFailure | None) -> None:
        if self.done.done():
            return
        if problem is None:
            self.done.set_result((self._status, bytes(self._body)))
        else:
            self.done.set_exception(problem)
