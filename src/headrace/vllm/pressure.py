"""How scarce vLLM's KV memory is by projection, and who makes way (``kv.watermarks``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headrace.kv.sources import SourceTimes
from headrace.kv.watermarks import KvLevel, Marks, cold_sequences, drain_s, next_level
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.memory import MemoryLimits, projected_tokens
from headrace.scheduling.order import ServiceRates
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import StepTimes

REFRESH_S = 0.05
"""Projections change with every token, and matter by the block."""


class Pressure:
    """Follows the level. ``kv_tokens`` is all of vLLM's KV memory.

    Sequences that begin alike share blocks there, so what they hold together is less than the sum: what sharing saves
    now is added to the budget. A sequence that makes way is computed again, except for what the prefix cache keeps.
    """

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.budget_tokens = kv_tokens
        self.level: KvLevel = "normal"
        self.held_tokens = 0
        self.promised_tokens = 0
        self.drain_s = 0.0
        """Predicted time until long requests should be sent again; 0 when they may be."""
        self._seen_s = float("-inf")
        self._seen = (-1, -1)

    def limits(self, knobs: SchedulingKnobs) -> MemoryLimits:
        """What bounds who may enter."""
        return MemoryLimits(self.budget_tokens, int(knobs.kv_refuse * self.budget_tokens), knobs.kv_long_tokens)

    def look(
        self,
        running: Sequence[SequenceState],
        waiting: Collection[SequenceState],
        usage: float,
        now_s: float,
        knobs: SchedulingKnobs,
        rates: ServiceRates,
        times: StepTimes,
    ) -> list[SequenceState]:
        """Bring level and figures up to date, at most every ``REFRESH_S`` while nobody comes or goes; who must make
        way now. ``usage`` is the share of KV blocks in use."""
        seen = (len(running), len(waiting))
        if now_s - self._seen_s < REFRESH_S and (seen == self._seen or self.level == "normal"):
            return []
        self._seen_s, self._seen = now_s, seen
        shared = sum([s.computed_tokens for s in running]) - int(usage * self.kv_tokens)
        self.budget_tokens = self.kv_tokens + max(0, shared)
        self.held_tokens = sum([projected_tokens(s) for s in running])
        self.promised_tokens = self.held_tokens + sum([projected_tokens(s) for s in waiting])
        marks, budget = Marks.of_knobs(knobs), self.budget_tokens
        self.level = next_level(self.level, self.held_tokens / budget, self.promised_tokens / budget, marks)
        self.drain_s = 0.0
        if self.level in ("refuse", "move"):
            self.drain_s = self._drain_s(running, list(waiting), marks, knobs, rates, times)
        if self.level != "move":
            return []
        return cold_sequences(
            running,
            self.held_tokens - int((marks.move - marks.gap) * budget),
            long_tokens=knobs.kv_long_tokens,
            most_tokens=int(marks.refuse * budget),
        )

    def _drain_s(
        self,
        running: Sequence[SequenceState],
        waiting: Sequence[SequenceState],
        marks: Marks,
        knobs: SchedulingKnobs,
        rates: ServiceRates,
        times: StepTimes,
    ) -> float:
        decode_step_s = max(rates.decode_step_s, rates.decode_token_s * len(running))
        source_times = SourceTimes(times, 0.0, knobs.max_prefill_tokens)
        return drain_s(
            running,
            waiting,
            self.promised_tokens - int((marks.refuse - marks.gap) * self.budget_tokens),
            prefill_s=source_times.compute_s,
            decode_step_s=decode_step_s,
        )
