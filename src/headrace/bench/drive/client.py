"""One request over HTTP, and what came back as a record: every time taken where it happens, nothing repeated.

**sent** is taken just before the first byte that this request causes: of its own on a kept connection, of the
handshake when it opens a new one (``connected_ns`` says when that stood, so either can be left out).
**Chunk times** are taken when a read of the socket is handed over: events that came in one read share a time, one
that came in several counts when it is complete. A chunk's time is never before the server wrote it; how long
after is the network and the event loop, whose lag is measured beside (``health``).

Nothing is sent twice: redirects are not followed, and where aiohttp would repeat a request on a new connection
(it does so for idempotent methods when a kept one turns out to be dead) the second attempt is stopped. Such a
request is ``cut``. To make it rare, a connection idle for KEEPALIVE_S is not used again: common servers close
theirs after 5 s.
"""

from __future__ import annotations

import asyncio
import errno
import io
import math
import ssl
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp
import msgspec
from yarl import URL

from headrace.bench.drive.reply import MAX_ERROR_CHARS, Reply, error_text
from headrace.bench.drive.send_times import Attempt, Resent, trace_config
from headrace.bench.drive.sse import EventTooLarge, SseParser
from headrace.bench.drive.target import FixedResolver, Target, resolve
from headrace.bench.planned import PlannedRequest
from headrace.bench.records import GENERATOR_FAULT, Outcome, RequestRecord, new_record
from headrace.bench.requests.bodies import Wire
from headrace.errors import ConfigError

KEEPALIVE_S = 3.0

AFTER_DONE_S = 1.0
"""How long a stream may stay open after ``[DONE]`` (usage may come late): then it counts as ended there."""

MAX_WHOLE_BYTES = 64 * 1024 * 1024
"""The longest body that is read of an answer that is no stream."""

MAX_QUESTION_BYTES = 4 * 1024 * 1024
"""The longest body that is read of an answer to a question before the run."""

MAX_QUESTION_S = 30.0
"""How long such a question may take, where a request of the run may take longer."""

_MAX_ERROR_BODY_BYTES = 64 * 1024
_LARGE_BODY_BYTES = 2**19  # from here on a body is written in pieces, so that one write does not hold the loop
_OWN_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}
_NO_ROUNDING = 1e9

_NOBODY = PlannedRequest(index=-1, class_name="", input_tokens=0, output_tokens=0)


class Sent(NamedTuple):
    """What came of a request. ``text``: the answer's text when it was asked for."""

    record: RequestRecord
    text: str


class ClientSettings(NamedTuple):
    """``timeout_s`` bounds a request from before its connection to its last byte, ``connect_timeout_s`` the
    connection alone. ``user_agent`` is sent."""

    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    user_agent: str = "headrace-bench"


class Client:
    """Sends requests to one target. Use as an asynchronous context manager.

    ``clock`` gives monotonic nanoseconds; record times count from ``origin_ns``. ``wall_clock`` gives seconds
    since the epoch (a Retry-After may be a date). ``chunks_seen`` counts content chunks so far, for a display.
    """

    def __init__(
        self,
        target: Target,
        settings: ClientSettings,
        *,
        api_key: str | None,
        clock: Callable[[], int],
        wall_clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._settings = settings
        self._api_key = api_key
        self._clock = clock
        self._wall_clock = wall_clock
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self.origin_ns = 0
        self.chunks_seen = 0

    async def __aenter__(self) -> Self:
        """Resolves the target's name. Raises ConfigError when it has no address."""
        addresses = await resolve(self._target)
        headers = {"User-Agent": self._settings.user_agent, "Accept-Encoding": "identity"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEPALIVE_S,
                resolver=FixedResolver(addresses),
                ssl=_trusted_by_system() if self._target.scheme == "https" else True,
                ttl_dns_cache=None,
                timeout_ceil_threshold=_NO_ROUNDING,
            ),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._settings.connect_timeout_s, ceil_threshold=_NO_ROUNDING
            ),
            trace_configs=[trace_config()],
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def send(
        self, planned: PlannedRequest, request: Wire, *, due_ns: int, ready_ns: int, keep_text: bool = False
    ) -> Sent:
        """Send it now and read the answer to its end. ``due_ns`` and ``ready_ns`` count from ``origin_ns``.

        Never raises for what the server or the network does: the record says it. When the task is cancelled, it
        ends with a record whose outcome is ``cancelled``.
        """
        record = new_record(planned, due_ns, ready_ns)
        reply = Reply(keep_text=keep_text, asked_tokens=planned.output_tokens)
        attempt = Attempt(record, self._clock, self.origin_ns)
        try:
            outcome = await self._exchange(record, reply, attempt, request)
        except asyncio.CancelledError:
            outcome = "cancelled"
            reply.fail("the run ended before the answer did")
        except TimeoutError as error:
            outcome = "timeout"
            where = "connecting" if isinstance(error, aiohttp.ConnectionTimeoutError) else "the request"
            limit_s = self._settings.connect_timeout_s if where == "connecting" else self._settings.timeout_s
            reply.fail(f"{where} took more than {limit_s:g} s")
        except aiohttp.ClientConnectorError as error:
            outcome = "refused"
            own = GENERATOR_FAULT if error.errno in _OWN_ERRNOS else ""
            reply.fail(f"{own}{error}")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, Resent) as error:
            outcome = "cut"
            reply.fail(f"the connection broke: {str(error) or type(error).__name__}")
        except (aiohttp.ClientError, EventTooLarge) as error:
            outcome = "error"
            reply.fail(f"the answer is none: {error}")
        record.outcome = outcome
        if record.end_ns is None:
            record.end_ns = self._clock() - self.origin_ns
        self._conclude(record, reply)
        return Sent(record, reply.text)

    async def _exchange(self, record: RequestRecord, reply: Reply, attempt: Attempt, request: Wire) -> Outcome:
        assert self._session is not None
        body = request.body
        async with asyncio.timeout(self._settings.timeout_s):
            response = await self._session.request(
                "POST",
                self._url(request.path),
                data=io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body or None,
                headers=request.headers,
                allow_redirects=False,
                trace_request_ctx=attempt,
            )
            async with response:
                record.headers_ns = self._clock() - self.origin_ns
                record.status = status = response.status
                self._read_headers(record, response.headers)
                if not 200 <= status < 300:
                    reply.fail(await _error_body(response.content))
                    return _refusal(status, retry_after="Retry-After" in response.headers)
                if "event-stream" in response.headers.get("Content-Type", "").lower():
                    return await self._read_stream(record, reply, response.content)
                return await self._read_whole(record, reply, response.content)

    async def _read_stream(self, record: RequestRecord, reply: Reply, content: aiohttp.StreamReader) -> Outcome:
        clock, origin_ns = self._clock, self.origin_ns
        parser = SseParser()
        while data := await content.readany():
            now_ns = clock() - origin_ns
            before = len(reply.chunk_ns)
            for event in parser.feed(data):
                reply.take(event, now_ns)
            self.chunks_seen += len(reply.chunk_ns) - before
            if reply.done:
                record.end_ns = now_ns
                if not content.at_eof():
                    await self._read_after_done(record, reply, content, parser)
                break
        else:
            record.end_ns = clock() - origin_ns
        if reply.error is not None:
            return "error"
        if not reply.whole:
            reply.fail("the stream ended inside an event" if parser.pending else "the stream ended early")
            return "cut"
        return "ok"

    async def _read_after_done(
        self, record: RequestRecord, reply: Reply, content: aiohttp.StreamReader, parser: SseParser
    ) -> None:
        """What comes after ``[DONE]``. Everything was said: a connection that breaks or stays open is no failure."""
        try:
            async with asyncio.timeout(AFTER_DONE_S):
                while data := await content.readany():
                    record.end_ns = now_ns = self._clock() - self.origin_ns
                    for event in parser.feed(data):
                        reply.take(event, now_ns)
                record.end_ns = self._clock() - self.origin_ns
        except (TimeoutError, aiohttp.ClientError):
            return

    async def _read_whole(self, record: RequestRecord, reply: Reply, content: aiohttp.StreamReader) -> Outcome:
        parts: list[bytes] = []
        size = 0
        now_ns = self._clock() - self.origin_ns
        while data := await content.readany():
            now_ns = self._clock() - self.origin_ns
            parts.append(data)
            size += len(data)
            if size > MAX_WHOLE_BYTES:
                reply.fail(f"the answer is longer than {MAX_WHOLE_BYTES} bytes")
                return "error"
        record.end_ns = self._clock() - self.origin_ns
        reply.take_whole(b"".join(parts), now_ns)
        self.chunks_seen += len(reply.chunk_ns)
        return "ok" if reply.error is None else "error"

    async def post_json(self, path: str, fields: dict[str, object]) -> tuple[int, object]:
        """POST a JSON object before the run: the status, and the answer's JSON (None when it is none).

        Raises ConfigError when there is no answer within MAX_QUESTION_S, or one beyond MAX_QUESTION_BYTES.
        """
        limit_s = min(self._settings.timeout_s, MAX_QUESTION_S)
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.post(
                    self._url(path),
                    data=msgspec.json.encode(fields),
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                    trace_request_ctx=Attempt(new_record(_NOBODY, 0, 0), self._clock, 0),
                ) as response,
            ):
                parts: list[bytes] = []
                while data := await response.content.readany():
                    parts.append(data)
                    if sum(map(len, parts)) > MAX_QUESTION_BYTES:
                        message = f"{self._target.base_url}{path} answers with more than {MAX_QUESTION_BYTES} bytes"
                        raise ConfigError(message, where="--target")
        except (aiohttp.ClientError, TimeoutError, Resent) as error:
            late = f"not within {limit_s:g} s" if isinstance(error, TimeoutError) else type(error).__name__
            what = self._without_key(str(error) or late)
            raise ConfigError(f"{self._target.base_url} does not answer: {what}", where="--target") from error
        try:
            return response.status, msgspec.json.decode(b"".join(parts))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return response.status, None

    def _url(self, path: str) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = self._target.url(path)
        return url

    def _read_headers(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        record.served_lane = _kept(headers.get("x-headrace-lane"))
        record.request_id = _kept(headers.get("x-request-id"))
        after = headers.get("Retry-After")
        if after is not None:
            record.retry_after_s = _retry_after_s(after, self._wall_clock)

    def _conclude(self, record: RequestRecord, reply: Reply) -> None:
        """Everything of the reply that the record keeps."""
        record.chunk_ns = reply.chunk_ns
        record.first_ns = reply.chunk_ns[0] if reply.chunk_ns else None
        record.chunk_tokens = reply.chunk_tokens
        record.finish_reason = _kept(reply.finish_reason)
        record.request_id = record.request_id or _kept(reply.id)
        counted, record.prompt_tokens, record.cached_tokens = reply.counts
        record.usage_seen = counted is not None
        record.output_tokens = len(reply.chunk_ns) if counted is None else counted
        record.note = reply.usage_note
        if record.outcome != "ok":
            record.error = _kept(self._without_key(reply.error or ""))

    def _without_key(self, text: str) -> str:
        """Some servers repeat the key that they refuse."""
        return text if self._api_key is None else text.replace(self._api_key, "***")


def _kept(text: str | None) -> str | None:
    """What a record keeps of a text of the server's: its beginning, without what cannot be written as UTF-8
    (aiohttp gives a header's other bytes as lone surrogates)."""
    return None if text is None else text[:MAX_ERROR_CHARS].encode("utf-8", "replace").decode()


def _trusted_by_system() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _refusal(status: int, *, retry_after: bool) -> Outcome:
    """The outcome of a status that is not 2xx."""
    if status == 429 or (status == 503 and retry_after):
        return "shed"
    return "rejected" if 400 <= status < 500 else "http_error"


async def _error_body(content: aiohttp.StreamReader) -> str:
    """The message of an error's body; of its beginning when it is long or breaks off."""
    parts: list[bytes] = []
    try:
        while sum(map(len, parts)) < _MAX_ERROR_BODY_BYTES and (data := await content.readany()):
            parts.append(data)
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
        pass  # the status says what matters
    return error_text(b"".join(parts))


def _retry_after_s(value: str, wall_clock: Callable[[], float]) -> float | None:
    """Seconds, or a date; None when it is neither."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - wall_clock())
        except (ValueError, OverflowError):
            return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
