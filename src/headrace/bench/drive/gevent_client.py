"""HTTP for load that runs on gevent (Locust's users): one request over one connection, and what came back as a record.

The client is geventhttpclient, the one under Locust's FastHttpUser, without that class around it: its
``iter_content`` and ``iter_lines`` give a stream out in blocks of 1,024 bytes, dozens of tokens late, and take a cut
stream for a whole one. ``readline`` gives a line as soon as it is there, and raises when the answer breaks off.
(HttpUser's ``iter_content`` reads as it comes only where the server sends HTTP chunks, and takes several times the
processor time.) Nothing is sent twice: a POST is never repeated and no redirect is followed.

Times are taken as ``client`` takes them, except that a new connection's begin is not told from its request's.
"""

from __future__ import annotations

import errno
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from socket import gaierror

import gevent
import msgspec
from geventhttpclient.client import HTTPClient
from geventhttpclient.response import HTTPSocketPoolResponse

from headrace import __version__
from headrace.bench.drive.client import (
    AFTER_DONE_S,
    KEEPALIVE_S,
    MAX_QUESTION_BYTES,
    MAX_QUESTION_S,
    MAX_WHOLE_BYTES,
)
from headrace.bench.drive.reply import Reply, error_text
from headrace.bench.drive.sse import EventTooLarge, SseParser
from headrace.bench.drive.target import Target, api_key, parse_target
from headrace.bench.records import Outcome, RequestRecord
from headrace.bench.requests.bodies import Wire
from headrace.errors import ConfigError

TIMEOUT_S = 600.0
"""Of a request, from before its connection to its last byte."""
CONNECT_TIMEOUT_S = 10.0

_MAX_ERROR_BODY_BYTES = 64 * 1024
_ANSWERED: frozenset[Outcome] = frozenset({"ok", "shed", "rejected", "http_error"})
_NO_CONNECTION = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE}


@dataclass(frozen=True)
class Server:
    """Where requests go, and what they all carry."""

    target: Target
    key: str | None
    tls: ssl.SSLContext | None

    @classmethod
    def at(cls, host: str, environment: Mapping[str, str]) -> Server:
        """``host`` as Locust has it: a base URL, with or without ``/v1``. The API key is the ``OPENAI_API_KEY`` of
        ``environment``, where there is one. Raises ConfigError."""
        try:
            target = parse_target(host)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix(f"{error.where}: "), where="--host") from error
        tls = ssl.create_default_context() if target.scheme == "https" else None
        return cls(target, api_key(environment), tls)

    def connect(self, timeout_s: float = TIMEOUT_S) -> HTTPClient:
        """A client with one connection, made when it is first used."""
        headers = {"User-Agent": f"headrace-stress-test/{__version__}", "Accept-Encoding": "identity"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return HTTPClient(
            self.target.host,
            port=self.target.port,
            headers=headers,
            connection_timeout=CONNECT_TIMEOUT_S,
            network_timeout=timeout_s,
            ssl=self.tls is not None,
            ssl_context_factory=self._tls_context,
        )

    def _tls_context(self, **_: object) -> ssl.SSLContext:
        """The same for every connection: reading the system's certificates takes tens of milliseconds."""
        assert self.tls is not None
        return self.tls

    def ask(self, method: str, path: str, fields: dict[str, object] | None = None) -> tuple[int, bytes]:
        """One question before the load: status and body. Raises ConfigError when there is no answer."""
        client = self.connect(MAX_QUESTION_S)
        body = b"" if fields is None else msgspec.json.encode(fields)
        headers = {"content-type": "application/json"}
        try:
            response = client.request(method, self.target.prefix + path, body, headers)
            answer = response.read(MAX_QUESTION_BYTES + 1)
            if len(answer) > MAX_QUESTION_BYTES:
                message = f"{self.target.base_url}{path} answers with more than {MAX_QUESTION_BYTES} bytes"
                raise ConfigError(message, where="--host")
            return response.status_code, bytes(answer)
        except (OSError, HTTPException) as error:
            raise ConfigError(f"{self.target.base_url} does not answer: {error}", where="--host") from error
        finally:
            client.close()

    def without_key(self, text: str) -> str:
        """Some servers repeat the key that they refuse."""
        return text if self.key is None else text.replace(self.key, "***")


class Connection:
    """One user's requests, one at a time; what came of each is in its record. Its connection is kept while it is
    used."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._http: HTTPClient | None = None
        self._used_ns = 0

    def close(self) -> None:
        """The next request opens a new connection."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def send(self, record: RequestRecord, wire: Wire, reply: Reply) -> None:
        """Send it and read the answer to its end into ``reply``; times (of the monotonic clock) and outcome go into
        ``record``, whatever the server and the network do.

        When the greenlet is killed meanwhile, that is raised, and the record says ``cancelled``.
        """
        reply.asked_tokens = record.wanted_output_tokens or None
        record.outcome, record.error = "cancelled", "the run ended before the answer did"
        try:
            record.outcome = self._limited(record, wire, reply)
            record.error = None if reply.error is None else self._server.without_key(reply.error)
        finally:
            if record.end_ns is None:
                record.end_ns = time.monotonic_ns()
            record.chunk_ns = reply.chunk_ns
            record.first_ns = reply.chunk_ns[0] if reply.chunk_ns else None
            counted = reply.completion_tokens
            record.usage_seen = counted is not None
            record.output_tokens = len(reply.chunk_ns) if counted is None else counted
            record.note = reply.usage_note
            if record.outcome not in _ANSWERED:
                self.close()  # what broke in the middle of its work is not used again
            self._used_ns = time.monotonic_ns()

    def _limited(self, record: RequestRecord, wire: Wire, reply: Reply) -> Outcome:
        limit = gevent.Timeout(TIMEOUT_S)
        try:
            with limit:
                return self._exchange(record, wire, reply)
        except gevent.Timeout as late:
            if late is not limit:
                raise
            reply.fail(f"the request took more than {TIMEOUT_S:g} s")
            return "timeout"
        except TimeoutError:
            reply.fail(f"connecting took more than {CONNECT_TIMEOUT_S:g} s")
            return "timeout"
        except (ConnectionRefusedError, gaierror) as error:
            reply.fail(str(error))
            return "refused"
        except OSError as error:
            reply.fail(f"the connection broke: {error}")
            return "refused" if error.errno in _NO_CONNECTION else "cut"
        except HTTPException as error:
            reply.fail(f"the answer broke off: {error}")
            return "cut"
        except EventTooLarge as error:
            reply.fail(f"the answer is none: {error}")
            return "error"

    def _exchange(self, record: RequestRecord, wire: Wire, reply: Reply) -> Outcome:
        http = self._connection()
        record.sent_ns = time.monotonic_ns()
        response = http.request("POST", self._server.target.prefix + wire.path, wire.body, headers=wire.headers)
        with response:
            record.headers_ns = time.monotonic_ns()
            record.status = status = response.status_code
            if not 200 <= status < 300:
                reply.fail(_error_body(response))
                if status == 429 or (status == 503 and "retry-after" in response):
                    return "shed"
                return "rejected" if 400 <= status < 500 else "http_error"
            if "event-stream" in str(response.get("content-type")).lower():
                return self._read_stream(record, reply, response)
            body = response.read(MAX_WHOLE_BYTES + 1)
            record.end_ns = time.monotonic_ns()
            reply.take_whole(body, record.end_ns)
            return "ok" if reply.error is None else "error"

    def _connection(self) -> HTTPClient:
        """The kept one, unless it has been idle so long that the server may be closing it at this moment."""
        if self._http is not None and time.monotonic_ns() - self._used_ns > KEEPALIVE_S * 1e9:
            self.close()
        if self._http is None:
            self._http = self._server.connect()
        return self._http

    def _read_stream(self, record: RequestRecord, reply: Reply, response: HTTPSocketPoolResponse) -> Outcome:
        parser = SseParser()
        while not reply.done and (line := response.readline(b"\n")):
            _take(parser, reply, line)
        record.end_ns = time.monotonic_ns()
        if reply.done:
            self._read_after_done(parser, reply, response)
        if reply.error is not None:
            return "error"
        if not reply.whole:
            reply.fail("the stream ended early")
            return "cut"
        return "ok"

    def _read_after_done(self, parser: SseParser, reply: Reply, response: HTTPSocketPoolResponse) -> None:
        """What comes after ``[DONE]`` (usage may). All was said: that it breaks or stays open is no failure."""
        limit = gevent.Timeout(AFTER_DONE_S)
        try:
            with limit:
                while line := response.readline(b"\n"):
                    _take(parser, reply, line)
        except gevent.Timeout as late:
            if late is not limit:
                raise
        except (OSError, HTTPException):
            return


def _take(parser: SseParser, reply: Reply, line: bytes) -> None:
    now_ns = time.monotonic_ns()
    for event in parser.feed(line):
        reply.take(event, now_ns)


def _error_body(response: HTTPSocketPoolResponse) -> str:
    try:
        return error_text(response.read(_MAX_ERROR_BODY_BYTES))
    except (OSError, HTTPException):
        return "the answer broke off"  # the status says what matters
