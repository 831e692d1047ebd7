"""How much KV memory sequences will need, and who may still enter a budget of it. Pure.

A sequence is counted with the length that it is expected to end with, not with what it holds: whoever is let in by
what is used now finds the memory full when all have grown (watermarks on current usage thrash). Tokens are counted in
whole blocks.

Two bounds. Everybody must fit the budget. A long sequence, and one that was parked or made way with its KV lost, must
leave free what lies between the budget and ``long_most_tokens``: that part is for short ones, which come and go while a
document stays, and it keeps one that made way from coming back only to make way again, for ever. The first
long one may fill the budget, and when nobody runs anybody may enter: else it never could.

Nobody waits for ever behind smaller ones that always find room: what the oldest needs that has waited for
``RESERVE_AFTER_S`` is kept free of others, who enter only beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from headrace.scheduling.sequence import SequenceState

RESERVE_AFTER_S: Final = 60.0
"""Long enough that a burst of short requests passes, short beside what a document takes to compute."""


def in_blocks(tokens: int) -> int:
    """``tokens`` up to a whole number of KV blocks."""
    return -(-tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def projected_tokens(sequence: SequenceState) -> int:
    """The length that a sequence is expected to end with, in whole blocks: prompt and expected output; once it is
    longer than that, one block more than it has; never beyond its limit."""
    expected = sequence.prompt_tokens + sequence.output_tokens_to_expect
    if sequence.known_tokens >= expected:
        expected = sequence.known_tokens + KV_BLOCK_TOKENS
    return in_blocks(max(sequence.known_tokens, min(sequence.limit_tokens, expected)))


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """A budget of KV tokens that is smaller than the streams. Sequences projected to at least ``long_tokens`` are
    long; they and parked ones enter only up to ``long_most_tokens``."""

    budget_tokens: int
    long_most_tokens: int
    long_tokens: int


class MemoryRoom:
    """What is left of the budget before a step, counted down as sequences enter."""

    def __init__(self, limits: MemoryLimits, running: Iterable[SequenceState]) -> None:
        self._limits = limits
        self._held = 0
        self._long = 0
        self._reserved_id: str | None = None
        self._reserved = 0
        for sequence in running:
            self.take(sequence)

    @property
    def held_tokens(self) -> int:
        """Projected tokens of whoever runs or has entered."""
        return self._held

    def reserve(self, sequence: SequenceState) -> None:
        """Keep free what a waiting sequence needs, unless it fits now."""
        if not self.fits(sequence):
            self._reserved_id, self._reserved = sequence.request_id, projected_tokens(sequence)

    def fits(self, sequence: SequenceState) -> bool:
        """Whether a waiting sequence may enter."""
        if not self._held:
            return True
        limits, need = self._limits, projected_tokens(sequence)
        is_long = need >= limits.long_tokens
        if sequence.request_id != self._reserved_id and self._held + need + self._reserved > limits.budget_tokens:
            return False
        bounded = sequence.made_way or sequence.computed_tokens > 0 or (is_long and self._long > 0)
        return self._held + need <= (limits.long_most_tokens if bounded else limits.budget_tokens)

    def take(self, sequence: SequenceState) -> None:
        """One enters."""
        self._change(sequence, 1)
        if sequence.request_id == self._reserved_id:
            self._reserved_id, self._reserved = None, 0

    def give_back(self, sequence: SequenceState) -> None:
        """One leaves."""
        self._change(sequence, -1)

    def _change(self, sequence: SequenceState, sign: int) -> None:
        need = projected_tokens(sequence)
        self._held += sign * need
        self._long += sign * (need >= self._limits.long_tokens)
