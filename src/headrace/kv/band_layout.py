"""Layouts of a band's KV memory, by the names in use, and what a model must be like for each.

What each is in libllama: docs/kv-layouts.md.
"""

from __future__ import annotations

from typing import Final, Literal

from headrace.kv.layout import KvLayout
from headrace.kv.libllama_memory import MICRO_BATCH_TOKENS

BandLayout = Literal["contiguous", "paged", "chunked", "streaming"]

CHUNKED_MICRO_BATCH_TOKENS: Final = 128
"""Prompt tokens that a chunked band computes together: a smaller share of a pass's intermediate results stands in
memory. Below it prefill slows down by more than is saved (benchmarks/kv_layouts.py)."""


def micro_batch_tokens(layout: BandLayout) -> int:
    """The most tokens that a band's context computes together."""
    return CHUNKED_MICRO_BATCH_TOKENS if layout == "chunked" else MICRO_BATCH_TOKENS


def layout_problem(layout: BandLayout, model: KvLayout) -> str | None:
    """Why a model's memory cannot be laid out so; None when it can."""
    if layout != "paged":
        return None
    if model.states:
        return (
            "it keeps a state per sequence (recurrent or compressed layers), which has no cells that a pool could give"
        )
    if any(cache.window_tokens is not None for cache in model.caches):
        return "it has layers with a sliding window, whose cells a pool would give to other sequences"
    if any(cache.every != 1 for cache in model.caches):
        return "it has compressed layers, whose cells stand for several tokens and cannot be pooled"
    return None
