"""The lane, the one object an operator edits, and its SLO."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headrace.control.breaker import BreakerConfig
from headrace.kv.precision import KvDtype

Overload = Literal["shed", "degrade", "queue"]


class SLO(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Targets that 99 % of a lane's requests must meet, in seconds; None means no target.

    TTFT: sent to first token. TPOT: (E2E - TTFT) / (n - 1). E2E: sent to last token.
    """

    p99_ttft_s: float | None = None
    p99_tpot_s: float | None = None
    p99_e2e_s: float | None = None


class LaneMatch(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How requests are recognised as a lane's without naming it: URL path prefixes, model aliases and a
    prompt-length threshold (``prompt_tokens_over``: longer prompts belong here)."""

    path_prefixes: tuple[str, ...] = ()
    model_aliases: tuple[str, ...] = ()
    prompt_tokens_over: int | None = None


class Fallback(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A cheaper answer for when the full one would come too late: at most ``max_tokens`` output tokens. Where there are
    groups, ``group`` takes over when the lane's own cannot serve it (its breakers are open, no replica is well), with
    ``model`` in place of that group's. Without groups only the served model exists: ``model`` is one of its names."""

    max_tokens: int | None = None
    model: str | None = None
    group: str | None = None


class Lane(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A class of traffic with one SLO.

    ``priority``: lower is more urgent. ``max_running`` caps sequences in the engine at once, ``max_queue``
    requests waiting for a place (429 beyond it); None means no cap of its own. ``max_tokens`` caps and
    ``default_max_tokens`` fills in a request's output length. ``typical_prompt_tokens`` and
    ``typical_output_tokens`` describe the request for which ``serve`` says at start whether this machine
    can meet the SLO. Sequences run only in bands that keep KV at least at ``min_kv_dtype``.

    ``weight`` is the lane's share of engine time under contention, against the other lanes' weights. ``overload``
    says what becomes of a request whose answer is predicted to come later than ``patience`` times its target: it is
    shed, degraded to ``fallback`` (shed when that is too late as well), or queued all the same.

    Where there are groups, ``group`` serves the lane (None: ``default_group``), ``breaker`` says when a replica is too
    slow for it, and a request without a first token after ``hedge_after_s`` is sent to a second replica too.
    """

    description: str = ""
    slo: SLO = SLO()
    priority: int = 100
    match: LaneMatch = LaneMatch()
    max_running: int | None = None
    max_queue: int | None = None
    min_kv_dtype: KvDtype | None = None
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    typical_prompt_tokens: int = 256
    typical_output_tokens: int = 128
    weight: float = 1.0
    overload: Overload = "shed"
    patience: float = 10.0
    fallback: Fallback = Fallback()
    group: str | None = None
    hedge_after_s: float | None = None
    breaker: BreakerConfig = BreakerConfig()
