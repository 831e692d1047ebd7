"""From a lane's SLO to one request's deadlines and output limit. Pure."""

from __future__ import annotations

from headrace.lanes.lane import SLO, Lane


def effective_slo(lane: Lane, override: SLO | None) -> SLO:
    """The lane's SLO, with the targets that a request brought itself (``x-slo-ttft-ms``) in their place."""
    if override is None:
        return lane.slo
    return SLO(
        p99_ttft_s=lane.slo.p99_ttft_s if override.p99_ttft_s is None else override.p99_ttft_s,
        p99_tpot_s=lane.slo.p99_tpot_s if override.p99_tpot_s is None else override.p99_tpot_s,
        p99_e2e_s=lane.slo.p99_e2e_s if override.p99_e2e_s is None else override.p99_e2e_s,
    )


def deadline_s(lane: Lane, arrived_s: float, slo_override: SLO | None = None) -> float | None:
    """When the request first misses a target if it has not begun to answer: a time on ``arrived_s``' clock.

    That is arrival plus the smaller of the TTFT and E2E targets. TPOT says nothing about the first token
    and gives no deadline. None when neither target is set: the request can wait for ever.
    """
    slo = effective_slo(lane, slo_override)
    targets = [target for target in (slo.p99_ttft_s, slo.p99_e2e_s) if target is not None]
    return arrived_s + min(targets) if targets else None


def finish_by_s(lane: Lane, arrived_s: float, slo_override: SLO | None = None) -> float | None:
    """When the last token is due, on ``arrived_s``' clock: arrival plus the E2E target; None without one."""
    target_s = effective_slo(lane, slo_override).p99_e2e_s
    return None if target_s is None else arrived_s + target_s


def output_limit(lane: Lane, requested: int | None, room_tokens: int) -> int:
    """The most tokens to generate: what was asked (else the lane's default, else all the room), within the
    lane's cap and ``room_tokens``, the context that the prompt leaves. Never negative; 0 means none."""
    limit = requested
    if limit is None:
        limit = lane.default_max_tokens if lane.default_max_tokens is not None else room_tokens
    if lane.max_tokens is not None:
        limit = min(limit, lane.max_tokens)
    return max(0, min(limit, room_tokens))
