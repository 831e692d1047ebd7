"""Everything ``headrace plan kv`` says about one model, as values."""

from __future__ import annotations

from fractions import Fraction

from msgspec import Struct

from headrace.kv.layout import Cache, CacheType
from headrace.kv.libllama_memory import ContextShape, allocations, padded
from headrace.plan.circulating import multi_head_bytes_per_token
from headrace.plan.described import DescribedModel


class KvPart(Struct, frozen=True):
    """One cache or state. ``row_bytes`` is one layer's for one token or group (None for a state); ``bytes_per_token``
    of all layers once a sequence is longer than the window, ``sequence_bytes`` at the context."""

    name: str
    layers: int
    row_bytes: int | None
    bytes_per_token: float
    sequence_bytes: int


class LibllamaPart(Struct, frozen=True):
    """One memory of a context: ``cells`` per layer and stream (0 for a state), ``bytes`` of all streams."""

    name: str
    layers: int
    cells: int
    bytes: int


class KvPlan(Struct, frozen=True):
    """``bytes_per_token`` beyond every window (``window_tokens``); ``sequence_bytes`` of one sequence of
    ``context_tokens``, of which ``state_bytes`` whatever its length. ``libllama`` is None for types that it lacks, and
    for models that were not read from a GGUF it is what it would allocate if it kept them as described here."""

    model: str
    architecture: str
    source: str
    layers: int
    dtype: str
    index_dtype: str | None
    context_tokens: int
    trained_context_tokens: int | None
    sequences: int
    bytes_per_token: float
    window_tokens: int
    state_bytes: int
    sequence_bytes: int
    total_bytes: int
    multi_head_bytes_per_token: float
    parts: list[KvPart]
    libllama: list[LibllamaPart] | None
    libllama_bytes: int | None
    libllama_context_tokens: int | None
    notes: list[str]


def plan_kv(model: DescribedModel, types: CacheType, context_tokens: int, sequences: int) -> KvPlan:
    """Raises ConfigError for a type that the model's rows cannot be stored in."""
    layout = model.layout
    indexed = any([row.form == "index" for cache in layout.caches for row in cache.rows])
    held = None
    if types.kv.ggml_type is not None:
        made = allocations(layout, context_tokens, sequences, ContextShape(CacheType(types.kv, types.kv)))
        held = [LibllamaPart(part.name, part.layers, part.cells, part.bytes) for part in made]
    one = layout.sequence_bytes(context_tokens, types)
    return KvPlan(
        model=model.name,
        architecture=model.architecture,
        source=model.source,
        layers=model.layers,
        dtype=types.kv.name,
        index_dtype=types.index.name if indexed else None,
        context_tokens=context_tokens,
        trained_context_tokens=model.context_tokens,
        sequences=sequences,
        bytes_per_token=float(layout.bytes_per_token(types)),
        window_tokens=layout.longest_window_tokens,
        state_bytes=layout.state_bytes,
        sequence_bytes=one,
        total_bytes=one * sequences,
        multi_head_bytes_per_token=float(multi_head_bytes_per_token(model.layers, model.hidden_entries, types.kv)),
        parts=[
            *[_cache_part(cache, types, context_tokens) for cache in layout.caches],
            *[KvPart(state.name, state.layers, None, 0.0, state.bytes) for state in layout.states],
        ],
        libllama=held,
        libllama_bytes=None if held is None else sum([part.bytes for part in held]),
        libllama_context_tokens=None if held is None else padded(context_tokens),
        notes=_notes(model, types, context_tokens),
    )


def _cache_part(cache: Cache, types: CacheType, context_tokens: int) -> KvPart:
    row = cache.row_bytes(types)
    growing = cache.window_tokens is None
    return KvPart(
        name=cache.name,
        layers=cache.layers,
        row_bytes=row,
        bytes_per_token=float(Fraction(cache.layers * row, cache.every)) if growing else 0.0,
        sequence_bytes=cache.bytes_of(context_tokens, types),
    )


def _notes(model: DescribedModel, types: CacheType, context_tokens: int) -> list[str]:
    notes = list(model.notes)
    if model.context_tokens is not None and context_tokens > model.context_tokens:
        notes.append(f"the model was trained for {model.context_tokens} tokens")
    if types.kv.ggml_type is None:
        notes.append(f"libllama has no {types.kv.name}: what it would allocate is not shown")
    if any([cache.window_tokens for cache in model.layout.caches]):
        notes.append(
            "headrace's contexts keep the whole context in layers with a window, so that prefixes can be reused"
        )
    return notes
