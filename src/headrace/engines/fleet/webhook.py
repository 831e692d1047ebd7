"""POST JSON to an operator's webhook."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

from headrace.engines.remote.connection import Address, Pool, fetch
from headrace.errors import RemoteFailure

TIMEOUT_S: Final = 5.0
_MAX_ANSWER_BYTES: Final = 64 * 1024


def webhook(url: str) -> Callable[[bytes], Awaitable[int]]:
    """A function that posts a body to ``url`` and returns the status. It raises OSError."""
    parts = urlsplit(url)
    address = Address.of(f"{parts.scheme}://{parts.netloc}")
    path = parts.path or "/"
    pool = Pool(address, clock=time.monotonic, connect_s=TIMEOUT_S)

    async def post(body: bytes) -> int:
        try:
            status, _ = await fetch(pool, path, b"", body=body, limit_bytes=_MAX_ANSWER_BYTES, timeout_s=TIMEOUT_S)
        except RemoteFailure as error:
            raise OSError(str(error).replace("the engine", "the webhook")) from error
        except asyncio.CancelledError:
            pool.close()
            raise
        return status

    return post
