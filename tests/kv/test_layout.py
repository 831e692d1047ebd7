"""What sequences take, by layout: laws that hold for every one."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.kv.entry_types import ENTRY_TYPES, EntryType, Row, row_bytes
from headrace.kv.layout import F16, Cache, CacheType, KvLayout, State, attention_rows
from headrace.kv.libllama_memory import ContextShape, allocations, cells_of, padded, stream_bytes

ROWS = st.builds(lambda heads, head: attention_rows(heads, 32 * head, 32 * head), st.integers(1, 8), st.integers(1, 4))
CACHES = st.builds(
    Cache,
    st.just("cache"),
    st.integers(1, 64),
    ROWS,
    every=st.sampled_from([1, 4, 128]),
)
WINDOWS = st.builds(Cache, st.just("window"), st.integers(1, 64), ROWS, window_tokens=st.integers(1, 5000))
STATES = st.builds(State, st.just("state"), st.integers(1, 64), st.integers(1, 1 << 20))
LAYOUTS = st.builds(
    lambda caches, windows, states: KvLayout((*caches, *windows), tuple(states)),
    st.lists(CACHES, max_size=3),
    st.lists(WINDOWS, max_size=2),
    st.lists(STATES, max_size=2),
)
TYPES = st.sampled_from([name for name, kind in ENTRY_TYPES.items() if kind.ggml_type is not None]).map(CacheType.named)
LENGTHS = st.integers(0, 1 << 20)


@given(LAYOUTS, TYPES, LENGTHS, LENGTHS)
def test_bytes_never_fall_with_tokens(layout: KvLayout, types: CacheType, one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    assert layout.sequence_bytes(shorter, types) <= layout.sequence_bytes(longer, types)
    assert layout.sequence_bytes(0, types) == layout.state_bytes
    for full in (True, False):
        shape = ContextShape(types, full_windows=full)
        assert stream_bytes(layout, shorter, shape) <= stream_bytes(layout, longer, shape)


@given(LAYOUTS, TYPES, st.integers(0, 1000), st.integers(1, 1000))
def test_bytes_are_linear_beyond_the_windows(layout: KvLayout, types: CacheType, start: int, more: int) -> None:
    """In whole groups of 128 tokens, every one of them costs 128 times ``bytes_per_token``, to the byte."""
    begin = (-(-layout.longest_window_tokens // 128) + start) * 128
    grown = layout.sequence_bytes(begin + 128 * more, types) - layout.sequence_bytes(begin, types)
    assert Fraction(grown, 128 * more) == layout.bytes_per_token(types)


@given(LAYOUTS, TYPES, LENGTHS)
def test_libllama_allocates_at_least_what_a_sequence_takes(layout: KvLayout, types: CacheType, tokens: int) -> None:
    """Whole allocations hold every row; the surplus of layers that keep all tokens is below one allocation."""
    one = CacheType(types.kv, types.kv)
    assert stream_bytes(layout, tokens, ContextShape(types)) >= layout.sequence_bytes(tokens, one)
    for cache in layout.caches:
        if cache.window_tokens is None and cache.every == 1:
            assert 0 <= cells_of(cache, tokens) - tokens < 256


@given(LAYOUTS, st.integers(1, 1 << 16), st.integers(1, 64))
def test_streams_are_alike(layout: KvLayout, tokens: int, streams: int) -> None:
    """A context of n streams takes n times the bytes of one."""
    assert sum(part.bytes for part in allocations(layout, tokens, streams)) == streams * stream_bytes(layout, tokens)


def test_row_bytes_of_every_type() -> None:
    """ggml's block sizes: 32 entries and their scales."""
    expected = {
        "f16": 64, "bf16": 64, "f32": 128, "q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18,
        "fp8": 32,
    }  # fmt: skip
    row = Row(32, 32)
    assert {name: row_bytes(row, ENTRY_TYPES[name]) for name in expected} == expected


def test_the_types_are_ggmls(ggml: list[tuple[EntryType, int, int]]) -> None:
    """Numbers, block lengths and block bytes are those of the installed library."""
    assert ggml
    for kind, entries, size in ggml:
        assert (kind.block_entries, kind.block_bytes) == (entries, size), kind.name


@pytest.fixture
def ggml() -> list[tuple[EntryType, int, int]]:
    """Every type that libllama has, with its block length and bytes as the gguf package states them."""
    import gguf

    found = []
    for kind in ENTRY_TYPES.values():
        if kind.ggml_type is not None:
            number = gguf.GGMLQuantizationType(kind.ggml_type)
            assert number.name.lower() == kind.name
            found.append((kind, *gguf.GGML_QUANT_SIZES[number]))
    return found


def test_fp4_is_for_indexer_rows() -> None:
    with pytest.raises(ConfigError, match="indexer rows alone"):
        row_bytes(Row(64, 64), ENTRY_TYPES["fp4"])
    assert row_bytes(Row(128, 128, "index"), ENTRY_TYPES["fp4"]) == 68


def test_a_window_fills_and_stays() -> None:
    """A window of 100 keeps 1, 100, 100 rows for 1, 100, 1,000 tokens; a group of 4 counts when it is whole."""
    window = Cache("window", 1, (Row(1, 1),), window_tokens=100)
    assert [window.rows_of(tokens) for tokens in (0, 1, 100, 1000)] == [0, 1, 100, 100]
    group = Cache("group", 1, (Row(1, 1),), every=4)
    assert [group.rows_of(tokens) for tokens in (3, 4, 7, 8)] == [0, 1, 1, 2]
    assert KvLayout((window, group)).bytes_per_token(F16) == Fraction(2, 4)


def test_padding() -> None:
    assert [padded(cells) for cells in (1, 256, 257)] == [256, 256, 512]
