"""The part of the configuration's shape that says which engines there are: groups and their replicas."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

GroupKind = Literal["openai", "vllm", "sglang", "llama-server", "headrace", "embedded"]
PriorityOrder = Literal["none", "lower_first", "higher_first"]


class ReplicaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One server of a group. A ``draining`` one gets no new requests."""

    url: str
    zone: str | None = None
    weight: float = 1.0
    draining: bool = False


class DnsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A name whose addresses are replicas, all in ``zone``. It is asked again every ``refresh_s``; while it does not
    answer, the addresses of before stay."""

    url: str
    zone: str | None = None
    weight: float = 1.0
    refresh_s: float = 10.0


class TimeoutConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """For a connection, from sending to the first token, between two tokens, and for the whole answer, waiting for a
    place and further tries included."""

    connect_s: float = 2.0
    first_token_s: float = 60.0
    between_tokens_s: float = 30.0
    total_s: float = 1800.0


class ProbeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a replica's health is found out: asking it every ``interval_s``, what came of requests (``failures`` in a row
    send it away for ``rest_s``, twice as long each time, up to ``max_rest_s``), and whether its streams go on
    (``progress_s``). Its metrics are read as often as it is asked and count for ``metrics_stale_s``."""

    path: str | None = None
    interval_s: float = 2.0
    timeout_s: float = 2.0
    unhealthy_after: int = 2
    healthy_after: int = 1
    failures: int = 3
    rest_s: float = 3.0
    max_rest_s: float = 12.0
    progress_s: float = 10.0
    metrics: bool = True
    metrics_stale_s: float = 10.0


class RetryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Further tries of a request: at most ``tries`` in all, after ``backoff_s`` (drawn between half of it and all,
    doubled each time) before the first byte, at once after it. ``budget`` is how many further tries there may be for
    each request, ``reserve`` how many may be saved up: it keeps tries from adding to an overload."""

    tries: int = 3
    backoff_s: float = 0.05
    budget: float = 0.2
    reserve: int = 64


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Engines configured alike. ``kind`` says what they are; ``embedded`` is headrace's own engine and has no other
    replicas. ``model`` is the name that the engines know the model by, and one that clients may use.

    ``replicas`` are listed here, found by ``dns``, or in ``file`` (YAML with the key ``replicas``, read again when it
    changes); the admin API adds others. ``api_key`` is written as env:NAME. ``max_in_flight`` is the most that a
    replica gets at once, ``min_in_flight`` the least that its limit falls to. ``queue_wait_s`` is how long a request
    waits for a place, ``unavailable_wait_s`` how long while no replica is well."""

    kind: GroupKind = "openai"
    model: str = ""
    description: str = ""
    replicas: tuple[ReplicaConfig, ...] = ()
    dns: tuple[DnsConfig, ...] = ()
    file: str | None = None
    api_key: str | None = None
    priority_order: PriorityOrder = "none"
    max_in_flight: int = 64
    min_in_flight: int = 1
    max_context_tokens: int | None = None
    queue_wait_s: float = 60.0
    unavailable_wait_s: float = 10.0
    timeouts: TimeoutConfig = TimeoutConfig()
    health: ProbeConfig = ProbeConfig()
    retry: RetryConfig = RetryConfig()


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for all groups. ``zone`` is where this gateway is; replicas elsewhere cost ``zone_cost_s`` more.
    ``alert_webhook`` gets Alertmanager's JSON when a breaker opens and closes."""

    zone: str | None = None
    zone_cost_s: float = 0.05
    alert_webhook: str | None = None
    prefix_blocks: int = 200_000
    session_memory_s: float = 1800.0
