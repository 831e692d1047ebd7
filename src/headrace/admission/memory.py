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


class ArrivedSince:
    """Projected tokens of what was let in since the engine's last report: a burst is here before the engine has said
    what the first of it did to the level."""

    def __init__(self) -> None:
        self._report: EngineLoad | None = None
        self._tokens = 0

    def note(self, report: EngineLoad | None, prompt_tokens: Sequence[int], output_tokens: int) -> None:
        """A request came in while ``report`` was the last one."""
        self._tokens = self.tokens(report) + sum([in_blocks(tokens + output_tokens) for tokens in prompt_tokens])
        self._report = report

    def tokens(self, report: EngineLoad | None) -> int:
        """What came in since ``report``, the last one."""
        return self._tokens if report is self._report else 0


def memory_state(load: EngineLoad | None, knobs: SchedulingKnobs, arrived_tokens: int = 0) -> MemoryState | None:
    """From the engine's latest report and what was let in since; None before the first."""
    if load is None:
        return None
    level = load.kv_level
    if arrived_tokens and load.kv_budget_tokens and level in ("normal", "warn"):
        promised = (load.kv_promised_tokens + arrived_tokens) / load.kv_budget_tokens
        level = "refuse" if promised >= knobs.kv_refuse else level
    return MemoryState(level, load.kv_drain_s, knobs.kv_long_tokens)


def refusal(memory: MemoryState | None, prompt_tokens: Sequence[int], output_tokens: int) -> AdmissionDecision | None:
    """Why a request may not come in: memory is scarce, and one of its sequences is projected to be long. None when it
    may. ``output_tokens`` is the output length to expect of each sequence."""
    if memory is None or memory.level not in ("refuse", "move"):
        return None
    if in_blocks(max(prompt_tokens, default=0) + output_tokens) < memory.long_tokens:
        return None
    return AdmissionDecision("shed", REASON, min(max(memory.drain_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S))
