"""What libllama allocates for a context: more than its sequences need, in ways that can be computed.

Read from the sources of the libllama that is pinned (llama-cpp-python 0.3.36) and held against what it logs by
tests/plan/test_against_libllama.py. A stream (one sequence's share of a context) gets

- its context, rounded up to 256 cells, in every layer that keeps all tokens;
- window + micro-batch cells, rounded up to 256, at most the context, in every layer with a sliding window: while a
  micro-batch is computed, its own tokens stand beside the window;
- ceil(context / every) cells, rounded up to 256, in every compressed layer;
- its states, always in F32.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.kv.layout import F16, Cache, CacheType, KvLayout

ALLOCATION_TOKENS = 256
"""libllama rounds cells up to a multiple of this."""
MICRO_BATCH_TOKENS = 512
"""Most tokens of one forward pass: what headrace's contexts ask for."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One of a context's memories: ``cells`` (0 for a state) in ``layers`` layers of every stream; ``bytes`` of all
    streams."""

    name: str
    layers: int
    cells: int
    bytes: int


def cells_of(cache: Cache, context_tokens: int, micro_batch_tokens: int = MICRO_BATCH_TOKENS) -> int:
    """Cells per layer and stream for a stream of ``context_tokens``."""
    context = padded(context_tokens)
    if cache.window_tokens is not None:
        return padded(min(context, cache.window_tokens + micro_batch_tokens))
    if cache.every == 1:
        return context
    return padded(max(1, -(-context // cache.every)))


def allocations(
    layout: KvLayout,
    context_tokens: int,
    streams: int,
    types: CacheType = F16,
    micro_batch_tokens: int = MICRO_BATCH_TOKENS,
) -> tuple[Allocation, ...]:
    """Everything libllama allocates for a context of ``streams`` streams of ``context_tokens`` each. The indexer's
    keys have the type of the others: libllama has one for both. Raises ConfigError for a type that does not fit."""
    kv = CacheType(types.kv, types.kv)
    found = []
    for cache in layout.caches:
        cells = cells_of(cache, context_tokens, micro_batch_tokens)
        found.append(
            Allocation(cache.name, cache.layers, cells, cells * cache.layers * streams * cache.row_bytes(kv))
        )
    found += [Allocation(state.name, state.layers, 0, state.libllama_bytes * streams) for state in layout.states]
    return tuple(found)


def stream_bytes(
    layout: KvLayout, context_tokens: int, types: CacheType = F16, micro_batch_tokens: int = MICRO_BATCH_TOKENS
) -> int:
    """Bytes of one stream of ``context_tokens``."""
    return sum([part.bytes for part in allocations(layout, context_tokens, 1, types, micro_batch_tokens)])


def padded(cells: int) -> int:
    """``cells`` rounded up as libllama does."""
    return -(-cells // ALLOCATION_TOKENS) * ALLOCATION_TOKENS
