"""Reading a request body: bounded in bytes and in time."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from headrace.api.errors import ClientDisconnected
from headrace.api.exchange import header
from headrace.config.schema import ServerConfig
from headrace.errors import BodyTooLarge, RequestError, RequestTimedOut


async def read_body(scope: Scope, receive: Receive, server: ServerConfig) -> bytes:
    """The whole body.

    Raises BodyTooLarge (by the announced or by the counted length), RequestTimedOut when it does not arrive
    within ``body_timeout_s``, ClientDisconnected when the client goes away first.
    """
    announced = header(scope, b"content-length")
    if announced is not None:
        if not announced.isascii() or not announced.isdigit():
            raise RequestError(f"content-length {announced[:32]!r} is not a number")
        if len(announced) > 18 or int(announced) > server.max_body_bytes:
            raise _too_large(server)
    try:
        async with asyncio.timeout(server.body_timeout_s):
            return await _collect(receive, server)
    except TimeoutError as error:
        raise RequestTimedOut(f"the request body did not arrive within {server.body_timeout_s:g} s") from error


async def _collect(receive: Receive, server: ServerConfig) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > server.max_body_bytes:
            raise _too_large(server)
        if piece:
            pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(server: ServerConfig) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than the limit of {server.max_body_bytes} bytes")
