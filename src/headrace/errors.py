"""Every error headrace raises on purpose, in one small tree.

::

    HeadraceError
    ├── ConfigError                  the operator's YAML, flags or environment are wrong
    ├── AdminRequestFailed           a command got no answer, or a refusal, from the server it speaks to
    ├── GateError                    a gate could not measure, or what it guards is refused
    ├── ModelError                   a model file cannot be fetched, read or converted
    ├── RequestError                 the client's fault: 4xx, never counts against an engine
    │   ├── AuthenticationFailed     401
    │   ├── PermissionDenied         403
    │   ├── NotFound                 404 (unknown model, unknown stored completion, unknown path)
    │   ├── RequestTimedOut          408 (the body did not arrive in time)
    │   ├── BodyTooLarge             413
    │   ├── QuotaExceeded            429 with Retry-After: the tenant asks for more than it may
    │   └── ContextTooLong           400, code ``context_length_exceeded``
    ├── Overloaded                   429 with Retry-After: shed on purpose
    └── EngineError                  503 (or an error event once bytes were sent)
        ├── EngineNotReady           still loading, or draining
        ├── EngineGone               the engine process died while the request ran
        └── RemoteFailure            a remote engine could not be reached, refused, was too slow, broke off or sent junk

Foreign exceptions (ctypes, OSError, msgspec, YAML) are translated into one of these at the edge where
they appear; ``api.errors`` is the only place that turns them into HTTP.
"""

from __future__ import annotations

from typing import Literal


class HeadraceError(Exception):
    """Base of the tree. ``str(error)`` is a sentence for a person: what was wrong, where, what to do."""


class ConfigError(HeadraceError):
    """Configuration is wrong. ``where`` is a path such as ``lanes.realtime.slo.p99_e2e_s`` (may be empty)."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class AdminRequestFailed(HeadraceError):
    """A running server was asked by a command: it is not there, is not headrace's, or refuses. ``str`` says what to
    do."""


class ModelError(HeadraceError):
    """A model cannot be fetched, verified, read or converted."""


class RequestError(HeadraceError):
    """The client sent something that cannot be served as it stands.

    ``param`` names the offending field in OpenAI's notation (``messages[0].content``); ``code`` is a short
    machine-readable word.
    """

    status = 400
    type = "invalid_request_error"
    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code if code is not None else self.default_code


class AuthenticationFailed(RequestError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDenied(RequestError):
    status = 403
    type = "permission_error"
    default_code = "permission_denied"


class NotFound(RequestError):
    status = 404
    type = "not_found_error"
    default_code = "not_found"


class RequestTimedOut(RequestError):
    status = 408
    default_code = "request_timeout"


class BodyTooLarge(RequestError):
    status = 413
    default_code = "body_too_large"


class ContextTooLong(RequestError):
    default_code = "context_length_exceeded"


class QuotaExceeded(RequestError):
    """A tenant asks for more than its limits allow. ``reason`` names the limit, ``retry_after_s`` is when there is room
    again. It says nothing of how the server does: it is the client's doing, not a request that was shed."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, reason: str, retry_after_s: float) -> None:
        super().__init__(message, code=reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Overloaded(HeadraceError):
    """Shed on purpose. ``reason`` is a metric label, ``retry_after_s`` the predicted time until room, ``kv_level`` the
    level of KV memory where that is why."""

    def __init__(self, message: str, *, reason: str, retry_after_s: float, kv_level: str | None = None) -> None:
        super().__init__(message)
        self.kv_level = kv_level
        self.reason = reason
        self.retry_after_s = retry_after_s


class EngineError(HeadraceError):
    """The engine could not serve the request although the request was right."""


class EngineNotReady(EngineError):
    """The engine is loading, restarting or draining."""


class EngineGone(EngineError):
    """The engine died while the request ran."""


class GateError(HeadraceError):
    """A gate could not measure, its result cannot be believed, or what it guards is refused."""


FailureKind = Literal["connect", "busy", "status", "timeout", "cut", "junk"]
"""How a remote engine failed: no connection; no room (429, 503); another 5xx or a refusal of headrace itself; too slow;
broken off; not what an OpenAI-compatible server sends."""


class RemoteFailure(EngineError):
    """A remote engine failed on a request. ``str`` names no address: a client may read it. ``retry_after_s`` is what a
    busy engine asked for."""

    def __init__(self, message: str, *, kind: FailureKind, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.retry_after_s = retry_after_s
