"""The layout of compressed attention, DeepSeek-V4's."""

from __future__ import annotations

from headrace.errors import ModelError
from headrace.kv.entry_types import Row
from headrace.kv.layout import Cache, KvLayout, State
from headrace.plan.described import UnknownLayout, gathered

OVERLAPPING_RATIO = 4
"""Groups of 4 look back at the group before: their compressor keeps two halves of everything, and they are the ones
that the indexer searches."""
KNOWN_RATIOS = (0, 4, 128)


def compressed_layout(
    *,
    ratios: tuple[int, ...],
    drafting_layers: int,
    window_tokens: int,
    head_entries: int,
    rope_entries: int,
    index_entries: int,
    source: str,
) -> KvLayout:
    """DeepSeek-V4's: every layer keeps a window of shared rows (one serves as key and value); a layer of ratio r keeps
    one row more per r tokens, and with r = 4 an indexer row too; compressors keep their running inputs and scores of
    the last r tokens in F32. Raises UnknownLayout for other ratios than 0, 4 and 128."""
    for ratio in ratios:
        if ratio not in KNOWN_RATIOS:
            raise UnknownLayout(f"{source}: compression ratio {ratio} is not known (0, 4 and 128 are)")
    if rope_entries > head_entries:
        raise ModelError(f"{source}: {rope_entries} rotary entries in a head of {head_entries}")
    shared = Row(head_entries, head_entries, "shared_kv", rope_entries)
    index = Row(index_entries, index_entries, "index")
    caches = [Cache(f"window of {window_tokens} tokens", len(ratios) + drafting_layers, (shared,), 1, window_tokens)]
    states = []
    for ratio in sorted(set(ratios) - {0}):
        layers = ratios.count(ratio)
        halves = 2 if ratio == OVERLAPPING_RATIO else 1
        caches.append(Cache(f"one of {ratio} tokens", layers, (shared,), ratio))
        states.append(_compressor(f"compressor of {ratio}", layers, ratio, halves * head_entries, halves))
        if ratio == OVERLAPPING_RATIO:
            caches.append(Cache(f"indexer keys, one of {ratio} tokens", layers, (index,), ratio))
            states.append(_compressor("compressor of the indexer", layers, ratio, halves * index_entries, halves))
    return gathered(caches, states)


def _compressor(name: str, layers: int, rows: int, width: int, halves: int) -> State:
    """An input and a score per entry, for each of the last ``rows`` tokens; libllama keeps ``halves`` times as many."""
    return State(name, layers, 2 * rows * width, libllama_entries=2 * rows * halves * width)
