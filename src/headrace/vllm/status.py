"""What the plug-in tells of itself: one value, sent from the engine core to the API server."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from headrace.kv.watermarks import KvLevel


class Counts(Struct):
    """Since the engine started. ``steps`` were decided by policies, ``stock_steps`` by vLLM alone. ``deviations`` are
    steps that vLLM made otherwise than planned, ``failures`` times when a policy failed and vLLM went on by itself.
    ``victims`` gave way to something more urgent, ``made_way`` for want of KV memory; ``ignored_xargs`` are fields of
    requests that made no sense."""

    steps: int = 0
    stock_steps: int = 0
    deviations: int = 0
    failures: int = 0
    victims: int = 0
    made_way: int = 0
    ignored_xargs: int = 0


class Status(Struct, frozen=True):
    """``enabled`` is the knob, ``failed`` whether a policy has failed since it was set. ``decide_s`` is what deciding a
    step takes on average, ``step_error`` the typical relative error of predicted step times. The KV figures are as in
    ``messages.engine.EngineLoad``: a gateway refuses long requests from the level ``refuse`` on, for ``kv_drain_s``."""

    enabled: bool
    failed: bool
    knobs: dict[str, Any]
    bands: list[tuple[int, int]]
    counts: Counts
    running_by_lane: dict[str, int]
    waiting_by_lane: dict[str, int]
    lane_shares: dict[str, float]
    strategy: str
    batch_cap: int
    step_error: float
    decide_s: float
    kv_level: KvLevel
    kv_budget_tokens: int
    kv_held_tokens: int
    kv_promised_tokens: int
    kv_drain_s: float
