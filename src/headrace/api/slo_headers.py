"""``x-slo-ttft-ms`` and ``x-slo-tpot-ms``: a request's own targets."""

from __future__ import annotations

import math

from starlette.types import Scope

from headrace.api.exchange import header
from headrace.errors import RequestError
from headrace.lanes.lane import SLO

_MAX_MS = 24 * 3600 * 1000.0


def slo_of(scope: Scope, lane: SLO) -> SLO:
    """The lane's SLO, tightened by the request's headers; they never loosen it.

    Raises RequestError when a header is no positive number of milliseconds.
    """
    return SLO(
        p99_ttft_s=_tighter(lane.p99_ttft_s, _header_s(scope, "x-slo-ttft-ms")),
        p99_tpot_s=_tighter(lane.p99_tpot_s, _header_s(scope, "x-slo-tpot-ms")),
        p99_e2e_s=lane.p99_e2e_s,
    )


def _tighter(lane_s: float | None, asked_s: float | None) -> float | None:
    targets = [target for target in (lane_s, asked_s) if target is not None]
    return min(targets, default=None)


def _header_s(scope: Scope, name: str) -> float | None:
    text = header(scope, name.encode())
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MAX_MS:
        raise RequestError(f"{name} must be a positive number of milliseconds, not {text[:32]!r}", param=name)
    return value / 1000
