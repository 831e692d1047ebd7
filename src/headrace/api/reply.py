"""Sending a whole response over raw ASGI."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Send

from headrace.api.anthropic_errors import in_anthropic_form
from headrace.api.errors import HttpError
from headrace.api.exchange import Exchange

JSON = b"application/json"
_PIECE_BYTES = 64 * 1024


async def send_body(
    send: Send, exchange: Exchange, body: bytes, *, status: int = 200, content_type: bytes = JSON
) -> None:
    """Send one complete response.

    A large body goes in pieces: each ``send`` waits for the transport to drain, so a client that does not
    read leaves at most a piece in memory besides the body itself.
    """
    exchange.status = status
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": exchange.headers(content_type, len(body)),
        }
    )
    start = 0
    while len(body) - start > _PIECE_BYTES:
        piece = body[start : start + _PIECE_BYTES]
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        start += _PIECE_BYTES
    await send({"type": "http.response.body", "body": body[start:] if start else body})


async def send_json(send: Send, exchange: Exchange, value: Any, *, status: int = 200) -> None:
    """Send ``value`` as a JSON response."""
    await send_body(send, exchange, msgspec.json.encode(value), status=status)


async def send_error(send: Send, exchange: Exchange, error: HttpError) -> None:
    """Send an error that was translated by ``errors.to_http``, in the form of the API that was spoken."""
    if exchange.error_form == "anthropic":
        error = in_anthropic_form(error, exchange.request_id)
    exchange.outcome = error.outcome
    exchange.extra_headers.extend(error.headers)
    await send_body(send, exchange, error.body, status=error.status)
