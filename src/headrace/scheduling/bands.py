"""Bands: which range of context length a sequence belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kv.band_layout import BandLayout
from headrace.kv.precision import KvDtype, at_least


@dataclass(frozen=True, slots=True)
class Band:
    """Sequences of up to ``max_context_tokens``, at most ``max_sequences`` of them at once; KV is kept at
    ``kv_dtype`` and laid out as ``layout`` says."""

    max_context_tokens: int
    max_sequences: int
    kv_dtype: KvDtype = "f16"
    layout: BandLayout = "contiguous"

    @property
    def pooled(self) -> bool:
        """Whether all sequences take cells from one pool, rather than each from a stream of its own."""
        return self.layout == "paged"


def band_for(tokens: int, bands: Sequence[Band], least: KvDtype | None = None) -> int | None:
    """Index of the shortest band whose context holds ``tokens`` at a precision of at least ``least``; None when none
    does."""
    for index, band in enumerate(bands):
        if tokens <= band.max_context_tokens and at_least(band.kv_dtype, least):
            return index
    return None


def longest_context(bands: Sequence[Band], least: KvDtype | None = None) -> int:
    """Tokens of the longest sequence that the bands of at least this precision hold; 0 when there is no such band."""
    return max([band.max_context_tokens for band in bands if at_least(band.kv_dtype, least)], default=0)


def first_band(
    prompt_tokens: int, limit_tokens: int, bands: Sequence[Band], margin_tokens: int, least: KvDtype | None = None
) -> int | None:
    """The band a sequence starts in.

    ``limit_tokens`` is often far above what will be generated (a chat without ``max_tokens`` may run to the
    end of the context), so a sequence starts where its prompt and ``margin_tokens`` of output fit, never
    beyond what its limit needs; it moves up when it outgrows the band. Only bands of at least the precision ``least``
    count.
    """
    preferred = band_for(max(prompt_tokens + 1, min(limit_tokens, prompt_tokens + margin_tokens)), bands, least)
    return preferred if preferred is not None else band_for(prompt_tokens + 1, bands, least)
