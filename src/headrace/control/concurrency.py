"""How many requests a replica may have at once: a closed loop on what it shows. Pure.

Its own batch size cannot be changed from outside, but what is not sent cannot slow the others down, and waits in the
gateway, where the most urgent goes first. Every window the limit falls by a share when tokens came later than a lane's
target allows, to what really runs when the engine itself has requests waiting, and grows while it was used up and
there was time to spare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

SPARE: Final = 0.9
"""Growth only while times are below this share of their targets: noise must not make the limit swing."""

UNREACHABLE: Final = 1.5

FALL: Final = 0.85
GROW: Final = 0.05

LimitReason = Literal["slow_tokens", "slow_first_token", "engine_queue", "room", "unchanged"]


@dataclass(frozen=True, slots=True)
class LimitBounds:
    """The least and most that the limit may be: what the engine allows."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ReplicaTargets:
    """The strictest of the lanes that ran there; None: no lane has one. Seconds."""

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaWindow:
    """What a replica showed in one window. ``itl_s`` is the mean gap between tokens, ``ttft_s`` the P99 from sending to
    the first token, ``peak`` the most requests at once, ``engine_waiting`` what the engine says that waits in it (None:
    not known, or too old). ``least_itl_s`` and ``least_ttft_s`` are the least of many windows."""

    peak: int
    itl_s: float | None = None
    ttft_s: float | None = None
    engine_waiting: int | None = None
    least_itl_s: float | None = None
    least_ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """The next limit, and why."""

    limit: int
    reason: LimitReason


def next_limit(limit: int, window: ReplicaWindow, targets: ReplicaTargets, bounds: LimitBounds) -> LimitDecision:
    """The limit for the next window."""
    targets = ReplicaTargets(
        _reachable(targets.ttft_s, window.least_ttft_s), _reachable(targets.itl_s, window.least_itl_s)
    )
    used = min(limit, window.peak) if window.peak else limit
    if _late(window.itl_s, targets.itl_s):
        return _within(min(used - 1, int(used * FALL)), "slow_tokens", bounds)
    if window.engine_waiting:
        return _within(min(limit, max(1, used - window.engine_waiting)), "engine_queue", bounds)
    if _late(window.ttft_s, targets.ttft_s):
        return _within(min(used - 1, int(used * FALL)), "slow_first_token", bounds)
    spare = _spare(window.itl_s, targets.itl_s) and _spare(window.ttft_s, targets.ttft_s)
    if window.peak >= limit and spare:
        return _within(limit + max(1, int(limit * GROW)), "room", bounds)
    return _within(limit, "unchanged", bounds)


def _reachable(target_s: float | None, least_s: float | None) -> float | None:
    """A target that the engine misses even when it has little to do cannot be met by sending less: what it does then,
    and half of it more, is the target instead."""
    return target_s if target_s is None or least_s is None else max(target_s, UNREACHABLE * least_s)


def _late(seen_s: float | None, target_s: float | None) -> bool:
    return seen_s is not None and target_s is not None and seen_s > target_s


def _spare(seen_s: float | None, target_s: float | None) -> bool:
    return seen_s is None or target_s is None or seen_s <= SPARE * target_s


def _within(limit: int, reason: LimitReason, bounds: LimitBounds) -> LimitDecision:
    return LimitDecision(max(bounds.least, min(bounds.most, limit)), reason)
