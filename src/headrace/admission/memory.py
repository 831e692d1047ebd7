"""Refusing long contexts while KV memory is scarce. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.admission.decide import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, AdmissionDecision
from headrace.kv.watermarks import KvLevel
from headrace.messages.engine import EngineLoad
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.memory import in_blocks

REASON = "kv_memory"
"""Of a shed request, as a metric label."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """What the engine says of its KV memory: the level, the predicted time until long requests are taken again, and
    from which projected length on a request is long."""

    level: KvLevel
    drain_s: float
    long_tokens: int


def memory_state(load: EngineLoad | None, knobs: SchedulingKnobs) -> MemoryState | None:
    """From the engine's latest report; None before the first."""
    return None if load is None else MemoryState(load.kv_level, load.kv_drain_s, knobs.kv_long_tokens)


def refusal(memory: MemoryState | None, prompt_tokens: Sequence[int], output_tokens: int) -> AdmissionDecision | None:
    """Why a request may not come in: memory is scarce, and one of its sequences is projected to be long. None when it
    may. ``output_tokens`` is the output length to expect of each sequence."""
    if memory is None or memory.level not in ("refuse", "move"):
        return None
    if in_blocks(max(prompt_tokens, default=0) + output_tokens) < memory.long_tokens:
        return None
    return AdmissionDecision("shed", REASON, min(max(memory.drain_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S))
