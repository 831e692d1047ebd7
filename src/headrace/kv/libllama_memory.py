"""What libllama allocates for a context: more than its sequences need, in ways that can be computed.

Read from the sources of the libllama that is pinned (llama-cpp-python 0.3.36) and held against what it logs by
tests/plan/test_against_libllama.py. A stream (one sequence's share of a context) gets

- its context, rounded up to 256 cells, in every layer that keeps all tokens;
- the same in every layer with a sliding window, by default and in headrace's contexts: only so can the end of a stream
  be taken back. With ``full_windows`` off (libllama's ``swa_full``): window + micro-batch cells, rounded up to 256, at
  most the context, because a micro-batch's own tokens stand beside the window while it is computed;
- ceil(context / every) cells, rounded up to 256, in every compressed layer;
- its states, always in F32.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

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


@dataclass(frozen=True, slots=True)
class ContextShape:
    """What of a context's parameters its memory depends on, besides its length. The defaults are headrace's."""

    types: CacheType = F16
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    full_windows: bool = True


DEFAULT_SHAPE = ContextShape()


def cells_of(cache: Cache, context_tokens: int, shape: ContextShape = DEFAULT_SHAPE) -> int:
    """Cells per layer and stream for a stream of ``context_tokens``."""
    context = padded(context_tokens)
    if cache.window_tokens is not None and not shape.full_windows:
        return padded(min(context, cache.window_tokens + shape.micro_batch_tokens))
    if cache.every == 1:
        return context
    return padded(max(1, -(-context // cache.every)))


def allocations(
    layout: KvLayout, context_tokens: int, streams: int, shape: ContextShape = DEFAULT_SHAPE
) -> tuple[Allocation, ...]:
    """Everything libllama allocates for a context of ``streams`` streams of ``context_tokens`` each. The indexer's
    keys have the type of the others: libllama has one for both. Raises ConfigError for a type that does not fit."""
    kv = CacheType(shape.types.kv, shape.types.kv)
    found = []
    for cache in layout.caches:
        cells = cells_of(cache, context_tokens, shape)
        found.append(Allocation(cache.name, cache.layers, cells, cells * cache.layers * streams * cache.row_bytes(kv)))
    found += [Allocation(state.name, state.layers, 0, state.libllama_bytes * streams) for state in layout.states]
    return tuple(found)


def stream_bytes(layout: KvLayout, context_tokens: int, shape: ContextShape = DEFAULT_SHAPE) -> int:
    """Bytes of one stream of ``context_tokens``."""
    return sum([part.bytes for part in allocations(layout, context_tokens, 1, shape)])


def bytes_per_token(layout: KvLayout, shape: ContextShape = DEFAULT_SHAPE) -> int:
    """What a token of a stream costs, states aside; rounded up to whole bytes."""
    kv = CacheType(shape.types.kv, shape.types.kv)
    kept = [cache for cache in layout.caches if cache.window_tokens is None or shape.full_windows]
    return ceil(sum([Fraction(cache.layers * cache.row_bytes(kv), cache.every) for cache in kept], Fraction(0)))


def padded(cells: int) -> int:
    """``cells`` rounded up as libllama does."""
    return -(-cells // ALLOCATION_TOKENS) * ALLOCATION_TOKENS
