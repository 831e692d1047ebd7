"""The choice of a replica: the cheapest in seconds. Pure; the random source is handed in.

The cost of a replica is the time to the first token there as predicted: prompts that it has not begun, plus the part
of this prompt that it does not hold. Full KV memory costs too, since it evicts what others come back for, and so does
another zone. Where two cost about the same, two are drawn and the less loaded one gets the request: everybody going to
the same best one would make it the worst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal

KV_FREE: Final = 0.7
"""Up to this share of its KV memory a replica has room to keep what it holds."""

KV_COST_S: Final = 0.5
"""What a replica with full KV memory costs beside one with room."""

TIE_SHARE: Final = 0.1
TIE_S: Final = 0.005

NoReplica = Literal["no_replicas", "unhealthy", "too_long", "full", "breaker"]
Chosen = Literal["only", "cheapest", "prefix", "session", "tie"]


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as routing sees it. ``limit`` is how many requests it may have at once now. ``waiting_tokens`` are
    prompt tokens that it was sent and has given no first token for, ``prefill_tokens_per_s`` its measured rate (0: not
    known). ``kv_share`` None: not known, or too old to use. ``admits``: its breaker lets this lane's requests in."""

    name: str
    zone: str | None = None
    weight: float = 1.0
    healthy: bool = True
    draining: bool = False
    admits: bool = True
    in_flight: int = 0
    limit: int = 1
    max_context_tokens: int = 0
    waiting_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    kv_share: float | None = None

    @property
    def load(self) -> float:
        """Requests per place, by weight: what ties are broken by. Idle ones are equal, whatever their limit: one whose
        limit has fallen must get requests to show that it may rise."""
        return self.in_flight / max(1, self.limit) / self.weight


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What is to be routed. ``matched_tokens``: of its prompt, those that a replica was sent before. ``session`` is the
    replica that had the conversation so far, of ``session_tokens``. ``avoid``: replicas that it was tried on."""

    prompt_tokens: int
    output_tokens: int = 0
    matched_tokens: Mapping[str, int] = field(default_factory=dict)
    session: str | None = None
    session_tokens: int = 0
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """``own_zone`` None: no zone is preferred. ``zone_cost_s`` is what another zone costs."""

    own_zone: str | None = None
    zone_cost_s: float = 0.05


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Where to, or why nowhere. ``cost_s`` is the predicted time to the first token and the penalties."""

    replica: str | None
    reason: Chosen | NoReplica
    cost_s: float = 0.0
    cached_tokens: int = 0


def route(
    request: RouteRequest, replicas: Sequence[ReplicaView], settings: RouteSettings, randomness: Random
) -> RouteDecision:
    """The replica for a request. Replicas in ``avoid`` are taken only when there is no other."""
    fitting = [view for view in replicas if _fits(view, request)]
    usable = [view for view in fitting if view.healthy and not view.draining]
    admitting = [view for view in usable if view.admits]
    with_room = [view for view in admitting if view.in_flight < view.limit]
    if not with_room:
        return RouteDecision(None, _why_none(replicas, fitting, usable, admitting))
    fresh = [view for view in with_room if view.name not in request.avoid]
    candidates = fresh or with_room
    costs = {view.name: cost_s(view, request, settings, replicas) for view in candidates}
    best = min(candidates, key=lambda view: (costs[view.name], view.load, view.name))
    if len(candidates) == 1:
        return _decision(best, "only", request, costs)
    least_s = costs[best.name]
    near = [view for view in candidates if costs[view.name] <= least_s + max(TIE_S, TIE_SHARE * least_s)]
    if len(near) > 1:
        drawn = randomness.sample(near, 2)
        # Of two that are equally loaded the one drawn first.
        return _decision(min(drawn, key=lambda view: view.load), "tie", request, costs)
    if request.session == best.name and request.session_tokens > request.matched_tokens.get(best.name, 0):
        return _decision(best, "session", request, costs)
    return _decision(best, "prefix" if _cached(best, request) else "cheapest", request, costs)


def cost_s(view: ReplicaView, request: RouteRequest, settings: RouteSettings, replicas: Sequence[ReplicaView]) -> float:
    """Predicted seconds to the first token on a replica, with what its KV memory and its zone cost."""
    rate = view.prefill_tokens_per_s or _usual_rate(replicas)
    tokens = view.waiting_tokens + max(1, request.prompt_tokens - _cached(view, request))
    seconds = tokens / rate
    if view.kv_share is not None and view.kv_share > KV_FREE:
        seconds += KV_COST_S * (min(1.0, view.kv_share) - KV_FREE) / (1.0 - KV_FREE)
    seconds /= view.weight
    if settings.own_zone is not None and view.zone != settings.own_zone:
        seconds += settings.zone_cost_s
    return seconds


DEFAULT_RATE: Final = 4000.0
"""Prompt tokens per second of an engine of which nothing is known."""


def _usual_rate(replicas: Sequence[ReplicaView]) -> float:
    known = sorted(view.prefill_tokens_per_s for view in replicas if view.prefill_tokens_per_s > 0)
    return known[len(known) // 2] if known else DEFAULT_RATE


def _cached(view: ReplicaView, request: RouteRequest) -> int:
    """Prompt tokens that the replica should still hold."""
    session = request.session_tokens if request.session == view.name else 0
    return min(request.prompt_tokens - 1, max(request.matched_tokens.get(view.name, 0), session))


def _fits(view: ReplicaView, request: RouteRequest) -> bool:
    return not view.max_context_tokens or request.prompt_tokens + request.output_tokens <= view.max_context_tokens


def _why_none(
    replicas: Sequence[ReplicaView],
    fitting: Sequence[ReplicaView],
    usable: Sequence[ReplicaView],
    admitting: Sequence[ReplicaView],
) -> NoReplica:
    if not replicas:
        return "no_replicas"
    if not fitting:
        return "too_long"
    if not usable:
        return "unhealthy"
    return "full" if admitting else "breaker"


def _decision(view: ReplicaView, reason: Chosen, request: RouteRequest, costs: Mapping[str, float]) -> RouteDecision:
    return RouteDecision(view.name, reason, costs[view.name], max(0, _cached(view, request)))
