"""KV memory as engines with paged attention count it: in whole blocks of what is there, not of what will be."""

from __future__ import annotations

import math
from collections.abc import Iterable

from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that hold ``tokens``."""
    return -(-tokens // block_tokens)


class FreeBlocks:
    """Blocks that running sequences leave of the engine's KV memory, counted down and up while a step is made.
    Without a budget there are enough for ever."""

    def __init__(self, state: SchedulerState, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.free: float = math.inf
        if state.memory is not None:
            self.free = state.memory.budget_tokens // block_tokens - self._held(state.running)

    def _held(self, sequences: Iterable[SequenceState]) -> int:
        return sum([blocks_for(sequence.computed_tokens, self.block_tokens) for sequence in sequences])

    def needed(self, sequence: SequenceState, tokens: int, *, from_tokens: int | None = None) -> int:
        """More blocks for computing ``tokens`` after ``from_tokens`` (None: after what is computed)."""
        start = sequence.computed_tokens if from_tokens is None else from_tokens
        return blocks_for(start + tokens, self.block_tokens) - blocks_for(start, self.block_tokens)

    def give_back(self, sequence: SequenceState) -> None:
        """One leaves with all that it has."""
        self.free += blocks_for(sequence.computed_tokens, self.block_tokens)
