"""Errors in the form of the Messages API: the same status, another body."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec

from headrace.api.errors import HttpError

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_OVERLOADED: Final = frozenset({"engine_busy", "engine_not_ready"})


def in_anthropic_form(error: HttpError, request_id: str | None = None) -> HttpError:
    """The error with its body as ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""
    said: dict[str, Any] = msgspec.json.decode(error.body)["error"]
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    if error.status >= 500 and said["code"] in _OVERLOADED:
        kind = "overloaded_error"
    body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": said["message"]}}
    if request_id is not None:
        body["request_id"] = request_id
    return replace(error, body=msgspec.json.encode(body))
