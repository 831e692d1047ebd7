"""Bands: which range of context length a sequence belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """Sequences of up to ``max_context_tokens``, at most ``max_sequences`` of them at once."""

    max_context_tokens: int
    max_sequences: int


def band_for(tokens: int, bands: Sequence[Band]) -> int | None:
    """Index of the shortest band whose context holds ``tokens``; None when none does."""
    for index, band in enumerate(bands):
        if tokens <= band.max_context_tokens:
            return index
    return None


def first_band(prompt_tokens: int, limit_tokens: int, bands: Sequence[Band], margin_tokens: int) -> int | None:
    """The band a sequence starts in.

    ``limit_tokens`` is often far above what will be generated (a chat without ``max_tokens`` may run to the
    end of the context), so a sequence starts where its prompt and ``margin_tokens`` of output fit, never
    beyond what its limit needs; it moves up when it outgrows the band.
    """
    preferred = band_for(max(prompt_tokens + 1, min(limit_tokens, prompt_tokens + margin_tokens)), bands)
    return preferred if preferred is not None else band_for(prompt_tokens + 1, bands)
