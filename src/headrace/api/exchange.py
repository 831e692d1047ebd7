"""One HTTP exchange: who asked, in which lane, and what became of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from starlette.types import Scope

from headrace.admission.front import Verdict
from headrace.lanes.lane import SLO
from headrace.telemetry.timing import RequestTiming

Outcome = Literal["ok", "rejected", "shed", "error", "aborted"]
"""``ok``: answered. ``rejected``: the client's fault (4xx). ``shed``: refused on purpose (429). ``error``: ours
(5xx or an error event). ``aborted``: the client went away."""

HeaderList = list[tuple[bytes, bytes]]

_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY = "headrace.exchange"


@dataclass(slots=True)
class Exchange:
    """Facts gathered on the way of a request; they end up in response headers, metrics and the access log.

    ``path`` includes a lane's prefix, ``started_s`` is seconds of the injected clock. ``measured`` requests
    (those for tokens) count in the request metrics; ``timing`` and ``slo`` are there once one was planned.
    """

    request_id: str
    method: str
    path: str
    started_s: float
    status: int = 0
    outcome: Outcome = "ok"
    tenant: str | None = None
    lane: str | None = None
    lane_rule: str | None = None
    ignored: tuple[str, ...] = ()
    measured: bool = False
    prompt_tokens: int = 0
    slo: SLO | None = None
    timing: RequestTiming | None = None
    extra_headers: HeaderList = field(default_factory=list)
    error_form: Literal["openai", "anthropic"] = "openai"
    """In whose form errors are told."""

    def headers(self, content_type: bytes, content_length: int | None = None) -> HeaderList:
        """The response headers that every answer carries, errors too."""
        headers = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode("ascii"))]
        if content_length is not None:
            headers.append((b"content-length", b"%d" % content_length))
        if self.lane is not None:
            headers.append((b"x-headrace-lane", header_value(self.lane)))
        if self.lane_rule is not None:
            headers.append((b"x-headrace-lane-rule", header_value(self.lane_rule)))
        if self.ignored:
            headers.append((b"x-headrace-ignored", header_value(", ".join(self.ignored))))
        headers.extend(self.extra_headers)
        return headers

    def admitted(self, verdict: Verdict) -> None:
        """Say in the response's headers what admission made of the request."""
        if verdict.predicted is not None:
            milliseconds = b"%d" % math.ceil(verdict.predicted.ttft_s * 1000)
            self.extra_headers.append((b"x-headrace-predicted-ttft-ms", milliseconds))
        if verdict.max_tokens is not None:
            self.extra_headers.append((b"x-headrace-degraded", b"max_tokens=%d" % verdict.max_tokens))


def attach(scope: Scope, exchange: Exchange) -> None:
    """Make the exchange reachable from the ASGI scope."""
    scope[_KEY] = exchange


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that the edge attached to this scope."""
    exchange = scope[_KEY]
    assert isinstance(exchange, Exchange)
    return exchange


def header(scope: Scope, name: bytes) -> str | None:
    """The first request header of that (lower-case) name, as text."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def sane_request_id(proposed: str | None) -> str | None:
    """The client's own request id when it is safe to repeat, else None."""
    return proposed if proposed is not None and _SANE_REQUEST_ID.fullmatch(proposed) else None


def header_value(text: str, limit: int = 1024) -> bytes:
    """Text as a header value: printable ASCII, cut at ``limit`` characters."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:limit]).encode("ascii")
