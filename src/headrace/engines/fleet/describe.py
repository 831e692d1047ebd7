"""A group and its replicas for people and programs that look after them."""

from __future__ import annotations

from typing import Any

from headrace.engines.fleet.group import Group
from headrace.engines.fleet.replica import Replica


def describe_group(group: Group, now_s: float) -> dict[str, Any]:
    """Plain values. What is not known is null."""
    return {
        "kind": group.config.kind,
        "model": group.config.model,
        "waiting": group.waiting,
        "replicas": {name: describe_replica(replica, now_s) for name, replica in group.replicas.items()},
    }


def describe_replica(replica: Replica, now_s: float) -> dict[str, Any]:
    """One replica's."""
    figures, spec = replica.figures, replica.spec
    return {
        "url": spec.url,
        "zone": spec.zone,
        "weight": spec.weight,
        "source": spec.source,
        "draining": spec.draining,
        "ready": replica.engine.ready is not None,
        "unhealthy": replica.health.cause(now_s),
        "in_flight": replica.in_flight,
        "limit": replica.limit,
        "limit_reason": replica.limit_reason,
        "places": replica.places(),
        "prefill_tokens_per_s": replica.prefill_tokens_per_s,
        "engine_running": None if figures is None else figures.running,
        "engine_waiting": None if figures is None else figures.waiting,
        "kv_share": None if figures is None else figures.kv_share,
        "breakers": {lane: breaker.state for lane, breaker in replica.breakers.items()},
    }
