"""How scarce KV memory is, and what the engine does about it between two steps."""

from __future__ import annotations

from headrace.engines.llama.residents import Residents
from headrace.kv.sources import SourceTimes
from headrace.kv.watermarks import KvLevel, Marks, cold_sequences, drain_s, next_level
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.memory import MemoryLimits, projected_tokens
from headrace.scheduling.order import ServiceRates
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import StepTimes

REFRESH_S = 0.05
"""Projections change with every token, and matter by the block."""


class KvPressure:
    """Follows the level (``kv.watermarks``) and parks cold sequences at the highest.

    ``budget_tokens`` is what sequences may hold together; None when every stream has memory of its own. Then there is
    nothing that parking could free for anybody else, and the level says only how much of all streams is promised.
    """

    def __init__(self, residents: Residents, budget_tokens: int | None) -> None:
        self._residents = residents
        streams = sum([band.max_context_tokens * band.max_sequences for band in residents.bands])
        self.shared = budget_tokens is not None and budget_tokens < streams
        self.budget_tokens = budget_tokens if budget_tokens is not None and self.shared else streams
        self.level: KvLevel = "normal"
        self.held_tokens = 0
        self.promised_tokens = 0
        self.drain_s = 0.0
        """Predicted time until long requests are taken again; 0 when they are."""
        self.entries: dict[str, int] = {}
        """How often each level was come to, from above or below."""
        self.parked = 0
        """Sequences parked for want of memory, since the engine started."""
        self._seen_counts = (-1, -1)
        self._seen_s = 0.0

    def limits(self, knobs: SchedulingKnobs) -> MemoryLimits | None:
        """What bounds who may enter."""
        if not self.shared:
            return None
        return MemoryLimits(self.budget_tokens, int(knobs.kv_refuse * self.budget_tokens), knobs.kv_long_tokens)

    def relieve(self, now_s: float, knobs: SchedulingKnobs, rates: ServiceRates, times: StepTimes) -> None:
        """Before a step: look where the level is, and park whom it says."""
        counts = self._counts()
        if counts == self._seen_counts and now_s - self._seen_s < REFRESH_S:
            return
        self._seen_s = now_s
        self.look(knobs, rates, times)
        if self.level == "move":
            cold = cold_sequences(
                self._running(),
                self.held_tokens - int((knobs.kv_move - knobs.kv_gap) * self.budget_tokens),
                long_tokens=knobs.kv_long_tokens,
                most_tokens=int(knobs.kv_refuse * self.budget_tokens),
            )
            for state in cold:
                state.made_way = True
                self._residents.evict(self._residents.running[state.request_id], rates)
                self.parked += 1
        self._seen_counts = self._counts()

    def look(self, knobs: SchedulingKnobs, rates: ServiceRates, times: StepTimes) -> None:
        """Bring level and figures up to date."""
        running, marks = self._running(), Marks.of_knobs(knobs)
        waiting = [sequence.state for sequence in self._residents.waiting.values()]
        self.held_tokens = sum([projected_tokens(state) for state in running])
        self.promised_tokens = self.held_tokens + sum([projected_tokens(state) for state in waiting])
        held = self.held_tokens / self.budget_tokens if self.shared else 0.0
        level = next_level(self.level, held, self.promised_tokens / self.budget_tokens, marks)
        if level != self.level:
            self.level = level
            self.entries[level] = self.entries.get(level, 0) + 1
        self.drain_s = 0.0
        if level in ("refuse", "move"):
            decode_step_s = max(rates.decode_step_s, rates.decode_token_s * len(running))
            source_times = SourceTimes(times, 0.0, knobs.max_prefill_tokens)

            def prefill_s(start: int, end: int) -> float:
                """With a decode step of the others before every chunk."""
                chunks = -(-(end - start) // knobs.max_prefill_tokens)
                return source_times.compute_s(start, end) + chunks * decode_step_s

            self.drain_s = drain_s(
                running,
                waiting,
                self.promised_tokens - int((marks.refuse - marks.gap) * self.budget_tokens),
                prefill_s=prefill_s,
                decode_step_s=decode_step_s,
            )

    def _counts(self) -> tuple[int, int]:
        return len(self._residents.running), len(self._residents.waiting)

    def _running(self) -> list[SequenceState]:
        return [sequence.state for sequence in self._residents.running.values()]
