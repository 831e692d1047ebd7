"""A model as a description of it says: what sizing needs, wherever it was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ModelError
from headrace.kv.layout import Cache, KvLayout, State


class UnknownLayout(ModelError):
    """The description is sound, but how this architecture keeps its KV memory is not known."""


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """``hidden_entries`` is the width of the residual stream; ``parameters`` is None where the description does not
    say it; ``source`` is a file, or the origin and the date of a named architecture."""

    name: str
    architecture: str
    source: str
    layers: int
    hidden_entries: int
    context_tokens: int | None
    parameters: int | None
    layout: KvLayout
    notes: tuple[str, ...] = ()


def gathered(caches: Sequence[Cache], states: Sequence[State] = ()) -> KvLayout:
    """A layout in which like layers stand together, in the order of the first of each."""
    together: dict[Cache, int] = {}
    for cache in caches:
        if cache.layers:
            one = Cache(cache.name, 1, cache.rows, cache.every, cache.window_tokens)
            together[one] = together.get(one, 0) + cache.layers
    kept = [Cache(one.name, count, one.rows, one.every, one.window_tokens) for one, count in together.items()]
    return KvLayout(tuple(kept), tuple([state for state in states if state.layers and state.entries]))
