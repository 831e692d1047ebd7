"""What a model keeps for a sequence: the layout of its KV memory, and the bytes that follow from it.

A layout is a list of caches and states. A **cache** is a set of like layers that store rows: one per token (all
attention but V4's), one per ``every`` tokens (V4's compressed layers), of the last ``window_tokens`` alone (sliding
window). A **state** is a fixed number of F32 entries per layer, whatever the length (recurrent layers, V4's
compressors). So bytes per sequence = sum over caches of layers * rows(tokens) * row bytes + states.

All arithmetic is in whole numbers. Bytes per token are a fraction where a layer keeps less than a row per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from headrace.kv.entry_types import ENTRY_TYPES, EntryType, Row, row_bytes

STATE_ENTRY_BYTES = 4
"""States are F32."""


@dataclass(frozen=True, slots=True)
class CacheType:
    """The types that rows are stored in: ``kv`` for keys and values, ``index`` for the indexer's keys."""

    kv: EntryType
    index: EntryType

    @classmethod
    def named(cls, kv: str, index: str | None = None) -> CacheType:
        """By the names in ``ENTRY_TYPES``; the indexer's as the rest where it is not given."""
        return cls(ENTRY_TYPES[kv], ENTRY_TYPES[kv if index is None else index])


F16 = CacheType.named("f16")


@dataclass(frozen=True, slots=True)
class Cache:
    """``layers`` like layers; each keeps ``rows`` (a key row and a value row, or one that serves as both) for every
    token, for every ``every`` tokens, or for the last ``window_tokens`` alone (None: for all)."""

    name: str
    layers: int
    rows: tuple[Row, ...]
    every: int = 1
    window_tokens: int | None = None

    def row_bytes(self, types: CacheType) -> int:
        """Bytes of one layer's rows for one token (or one group of ``every``). Raises ConfigError."""
        return sum([row_bytes(row, types.index if row.form == "index" else types.kv) for row in self.rows])

    def rows_of(self, tokens: int) -> int:
        """Rows that one layer holds for a sequence of ``tokens``: whole groups only."""
        return min(tokens, self.window_tokens or tokens) // self.every

    def bytes_of(self, tokens: int, types: CacheType) -> int:
        """Bytes of all layers for a sequence of ``tokens``."""
        return self.layers * self.rows_of(tokens) * self.row_bytes(types)


@dataclass(frozen=True, slots=True)
class State:
    """``entries`` F32 numbers in each of ``layers`` layers, per sequence. ``libllama_entries``: what libllama reserves
    for them where that is more."""

    name: str
    layers: int
    entries: int
    libllama_entries: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all layers, per sequence."""
        return self.layers * self.entries * STATE_ENTRY_BYTES

    @property
    def libllama_bytes(self) -> int:
        """The same as libllama reserves it."""
        return self.layers * (self.libllama_entries or self.entries) * STATE_ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The caches and states of one model."""

    caches: tuple[Cache, ...]
    states: tuple[State, ...] = ()

    def bytes_per_token(self, types: CacheType = F16) -> Fraction:
        """What one more token costs a sequence that is longer than every window."""
        growing = [cache for cache in self.caches if cache.window_tokens is None]
        return sum([Fraction(cache.layers * cache.row_bytes(types), cache.every) for cache in growing], Fraction(0))

    def sequence_bytes(self, tokens: int, types: CacheType = F16) -> int:
        """What a sequence of ``tokens`` takes in all."""
        return sum([cache.bytes_of(tokens, types) for cache in self.caches]) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """What a sequence takes before its first token."""
        return sum([state.bytes for state in self.states])

    @property
    def longest_window_tokens(self) -> int:
        """From this length on every further token costs ``bytes_per_token``; 0 without windows."""
        return max([cache.window_tokens or 0 for cache in self.caches], default=0)


def attention_rows(heads: int, key_entries: int, value_entries: int) -> tuple[Row, Row]:
    """A key row and a value row of ``heads`` KV heads (MHA, GQA and MQA differ in their number alone)."""
    return Row(heads * key_entries, key_entries), Row(heads * value_entries, value_entries)
