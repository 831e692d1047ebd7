"""A scenario: which replicas there are, how they compute, what stands in front of them, and what goes wrong.

``Scenario`` is the file's shape; ``scenario_file`` reads it. Lanes, tenants and the default lane are those of a
headrace configuration (``config``), so that a change of it can be tried here before it is served.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headrace.config.schema import BandConfig, SchedulingConfig
from headrace.simulate.baselines.policies import PolicyName
from headrace.simulate.passes import PassLayout

Role = Literal["both", "prefill", "decode"]
RouterName = Literal["gateway", "power-of-two", "least-requests", "least-wait", "prefix", "random", "round-robin"]
FaultKind = Literal["dies", "slow", "stale"]


class StatedTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """Step times written down by hand, seconds. A forward pass takes ``overhead_s`` and the longer of reading weights
    and KV (``weights_s`` and ``context_s`` for each KV token that decodes read) and computing (``row_s`` for each
    token), and ``pair_s`` for each pair of a prompt token and an earlier one."""

    weights_s: float
    row_s: float
    context_s: float = 0.0
    pair_s: float = 0.0
    overhead_s: float = 0.0


class Tier(Struct, frozen=True, forbid_unknown_fields=True):
    """Memory behind the accelerator's that keeps KV: room for ``tokens``, read at ``gb_per_s`` (10^9 bytes)."""

    tokens: int
    gb_per_s: float


class EngineSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One replica's engine. ``policy`` decides its steps: a strategy of headrace's or a baseline. ``times`` names step
    times that are known, ``stated`` gives them instead. ``bands`` are streams by context length; without them there
    is one of ``max_sequences`` of ``max_context_tokens``. ``layout`` says what shares a forward pass. ``kv_tokens`` is
    all KV memory (None: enough for every stream). With ``prefix_cache`` KV of ended requests stays in what running
    ones leave of it, then in ``tiers``, fastest first. ``noise`` is the standard deviation of the logarithm of a
    step's time."""

    policy: PolicyName = "hybrid"
    times: str = "smollm2-2-threads"
    stated: StatedTimes | None = None
    bands: tuple[BandConfig, ...] = ()
    max_sequences: int = 256
    max_context_tokens: int = 8192
    layout: PassLayout = "fused"
    scheduling: SchedulingConfig = SchedulingConfig()
    kv_tokens: int | None = None
    kv_bytes_per_token: int = 131072
    prefix_cache: bool = True
    tiers: tuple[Tier, ...] = ()
    noise: float = 0.0


class Scaling(Struct, frozen=True, forbid_unknown_fields=True):
    """How a group follows its load: every ``interval_s`` the replicas that would be busy for the share
    ``target_busy``, from ``least`` to ``most``. A new one serves after ``warmup_s``; one is given back when fewer have
    been enough for ``calm_s``."""

    least: int
    most: int
    target_busy: float = 0.6
    interval_s: float = 15.0
    warmup_s: float = 120.0
    calm_s: float = 300.0


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas configured alike. ``role``: whether they compute whole requests, only prompts, or only what follows
    them. ``price_per_hour`` is that of one replica, whatever it consists of."""

    replicas: int = 1
    role: Role = "both"
    engine: EngineSpec = EngineSpec()
    scaling: Scaling | None = None
    price_per_hour: float | None = None


class Link(Struct, frozen=True, forbid_unknown_fields=True):
    """What KV travels on between replicas: ``gb_per_s`` (10^9 bytes) out of each, after ``latency_s``."""

    gb_per_s: float = 25.0
    latency_s: float = 0.0005


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """Something that goes wrong with ``replica`` (``main/0``) from ``at_s`` on, for ``for_s``.

    ``dies``: all that is in it is lost, and it serves again after ``for_s``; the gateway sees it ``noticed_s`` later
    and sends requests there until then. ``slow``: its passes take ``factor`` times as long. ``stale``: what the gateway
    sees of it stays as it was.
    """

    kind: FaultKind
    replica: str
    at_s: float
    for_s: float
    factor: float = 2.0
    noticed_s: float = 0.0


class GatewaySpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What stands in front. ``routing`` chooses the replica, by what the gateway saw of them at most
    ``metrics_interval_s`` ago (0: now). With ``admission`` requests are shed, held or degraded by their lanes' rules.
    A request whose replica died before its first token is tried elsewhere, ``retries`` times. ``network_s`` passes
    between client and gateway, each way."""

    routing: RouterName = "gateway"
    admission: bool = True
    metrics_interval_s: float = 0.0
    retries: int = 1
    network_s: float = 0.0


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole scenario. ``config``: a configuration file, relative to the scenario's, with lanes and tenants; without
    one there are the default lanes, with the targets that the workload gives its classes."""

    groups: dict[str, Group]
    description: str = ""
    config: str | None = None
    gateway: GatewaySpec = GatewaySpec()
    link: Link = Link()
    faults: tuple[Fault, ...] = ()
