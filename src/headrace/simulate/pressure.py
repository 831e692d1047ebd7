"""KV memory that sequences share, in the virtual engine: the watermarks of the real one (``kv.watermarks``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from headrace.kv.watermarks import KvLevel, Marks, cold_sequences, next_level
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.memory import MemoryLimits, in_blocks, projected_tokens
from headrace.scheduling.sequence import SequenceState

REFRESH_S: Final = 0.05
"""As of ``engines.llama.pressure``: projections change with every token, and matter by the block."""


class Pressure:
    """``budget_tokens`` is what sequences may hold together; None, or as much as all streams: nothing is shared."""

    def __init__(self, bands: Sequence[Band], budget_tokens: int | None) -> None:
        streams = sum([band.max_context_tokens * band.max_sequences for band in bands])
        self.shared = budget_tokens is not None and budget_tokens < streams
        self.budget_tokens = budget_tokens if budget_tokens is not None and self.shared else streams
        self.level: KvLevel = "normal"
        self._seen_count = -1
        self._seen_s = -math.inf

    def limits(self, knobs: SchedulingKnobs) -> MemoryLimits | None:
        """What bounds who may enter."""
        if not self.shared:
            return None
        return MemoryLimits(self.budget_tokens, int(knobs.kv_refuse * self.budget_tokens), knobs.kv_long_tokens)

    def cold(self, running: Collection[SequenceState], knobs: SchedulingKnobs, now_s: float) -> list[SequenceState]:
        """Who is to give up its stream now; brings the level up to date, as often as the embedded engine does."""
        if len(running) == self._seen_count and now_s - self._seen_s < REFRESH_S:
            return []
        self._seen_count, self._seen_s = len(running), now_s
        held_tokens = sum([projected_tokens(sequence) for sequence in running])
        share = held_tokens / self.budget_tokens
        self.level = next_level(self.level, share, share, Marks.of_knobs(knobs))
        over_tokens = sum([in_blocks(s.computed_tokens + 1) for s in running]) - self.budget_tokens
        if over_tokens > 0:
            return _least_urgent(running, over_tokens)
        if self.level != "move":
            return []
        return cold_sequences(
            running,
            held_tokens - int((knobs.kv_move - knobs.kv_gap) * self.budget_tokens),
            long_tokens=knobs.kv_long_tokens,
            most_tokens=int(knobs.kv_refuse * self.budget_tokens),
        )


def _least_urgent(running: Collection[SequenceState], tokens: int) -> list[SequenceState]:
    """Outputs have outgrown what was expected of them, and memory is really full: somebody has to leave, whoever it
    is. The least urgent go, latest first, until ``tokens`` are free; one stays in any case."""
    chosen: list[SequenceState] = []
    for sequence in sorted(running, key=lambda s: (-s.priority, -s.arrived_s, s.request_id))[:-1]:
        if tokens <= 0:
            break
        chosen.append(sequence)
        tokens -= in_blocks(sequence.computed_tokens + 1)
    return chosen
