"""headrace's errors as HTTP: the only place that knows status codes for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace.api.exchange import HeaderList, Outcome, header_value
from headrace.errors import (
    EngineError,
    EngineGone,
    EngineNotReady,
    FailureKind,
    HeadraceError,
    Overloaded,
    QuotaExceeded,
    RemoteFailure,
    RequestError,
    RequestTimedOut,
)

_NOT_READY_RETRY_S = 2
_REMOTE_CODES: Final[dict[FailureKind, str]] = {
    "connect": "engine_unreachable",
    "busy": "engine_busy",
    "status": "engine_error",
    "timeout": "engine_timeout",
    "cut": "engine_gone",
    "junk": "engine_error",
}


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as it goes out: status, OpenAI-shaped JSON body, extra headers, and its outcome label."""

    status: int
    body: bytes
    headers: HeaderList
    outcome: Outcome


class ClientDisconnected(Exception):
    """The client closed its connection; nobody is there to answer."""


def error_body(message: str, *, type_: str, param: str | None = None, code: str | None = None) -> bytes:
    """OpenAI's error object as JSON."""
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})


def to_http(error: HeadraceError) -> HttpError:
    """How an error of headrace's own tree is told to a client."""
    message = str(error)
    match error:
        case RequestError():
            body = error_body(message, type_=error.type, param=error.param, code=error.code)
            headers: HeaderList = []
            if isinstance(error, RequestTimedOut):
                headers.append((b"connection", b"close"))
            if error.status == 401:
                headers.append((b"www-authenticate", b"Bearer"))
            if isinstance(error, QuotaExceeded):
                headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
                headers.append((b"x-headrace-shed-reason", header_value(error.reason)))
            return HttpError(error.status, body, headers, "rejected")
        case Overloaded():
            body = error_body(message, type_="rate_limit_error", code=error.reason)
            retry_s = max(1, math.ceil(error.retry_after_s))
            headers = [
                (b"retry-after", b"%d" % retry_s),
                (b"x-headrace-shed-reason", header_value(error.reason)),
            ]
            if error.kv_level is not None:
                headers.append((b"x-headrace-kv-level", header_value(error.kv_level)))
            return HttpError(429, body, headers, "shed")
        case EngineError():
            code = {EngineNotReady: "engine_not_ready", EngineGone: "engine_gone"}.get(type(error), "engine_error")
            retry_s = _NOT_READY_RETRY_S
            if isinstance(error, RemoteFailure):
                code = _REMOTE_CODES[error.kind]
                retry_s = max(1, math.ceil(error.retry_after_s or _NOT_READY_RETRY_S))
            body = error_body(message, type_="service_unavailable_error", code=code)
            return HttpError(503, body, [(b"retry-after", b"%d" % retry_s)], "error")
        case _:
            return internal_error()


def internal_error() -> HttpError:
    """A bug of ours; details go to the log, never to the client."""
    body = error_body("headrace failed on this request; the log names it by its x-request-id", type_="server_error")
    return HttpError(500, body, [], "error")
