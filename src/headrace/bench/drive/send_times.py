"""When a request was sent: taken through aiohttp's trace signals, which it awaits at exactly these points."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp

from headrace.bench.records import RequestRecord


class Resent(Exception):
    """aiohttp was about to send a request a second time."""


class Attempt:
    """Times of the way out, taken by aiohttp's trace signals."""

    __slots__ = ("_body_began", "_clock", "_connects", "_has_connection", "_origin_ns", "_record")

    def __init__(self, record: RequestRecord, clock: Callable[[], int], origin_ns: int) -> None:
        self._record = record
        self._clock = clock
        self._origin_ns = origin_ns
        self._has_connection = False
        self._connects = False
        self._body_began = False

    def take_connection(self, *, new: bool) -> None:
        """A connection is taken from the kept ones, or begun. Raises Resent at the second time."""
        if self._has_connection:
            raise Resent("a kept connection was dead when it was used again")
        self._has_connection = True
        self._connects = new
        if new:
            self._record.sent_ns = self._clock() - self._origin_ns

    def connected(self) -> None:
        self._record.connected_ns = self._clock() - self._origin_ns

    def write_headers(self) -> None:
        """The headers are made. They leave with the body's first bytes, or by themselves when there is no body."""
        if not self._connects:
            self._record.sent_ns = self._clock() - self._origin_ns

    def write_body(self) -> None:
        """The next thing that happens is a write of body bytes."""
        if self._body_began:
            return
        self._body_began = True
        if not self._connects:
            self._record.sent_ns = self._clock() - self._origin_ns


def trace_config() -> aiohttp.TraceConfig:
    """Signals that aiohttp awaits at the points where a request's times are taken."""

    async def on_new(session: aiohttp.ClientSession, context: SimpleNamespace, _: Any) -> None:
        context.trace_request_ctx.take_connection(new=True)

    async def on_connected(session: aiohttp.ClientSession, context: SimpleNamespace, _: Any) -> None:
        context.trace_request_ctx.connected()

    async def on_kept(session: aiohttp.ClientSession, context: SimpleNamespace, _: Any) -> None:
        context.trace_request_ctx.take_connection(new=False)

    async def on_headers(session: aiohttp.ClientSession, context: SimpleNamespace, _: Any) -> None:
        context.trace_request_ctx.write_headers()

    async def on_body(session: aiohttp.ClientSession, context: SimpleNamespace, _: Any) -> None:
        context.trace_request_ctx.write_body()

    config = aiohttp.TraceConfig()
    config.on_connection_create_start.append(on_new)
    config.on_connection_create_end.append(on_connected)
    config.on_connection_reuseconn.append(on_kept)
    config.on_request_headers_sent.append(on_headers)
    config.on_request_chunk_sent.append(on_body)
    config.freeze()
    return config
