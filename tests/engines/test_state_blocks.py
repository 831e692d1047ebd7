"""A stream's state cut into blocks and joined again: libllama cannot tell the difference, to the bit."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.llama.context import Context
from headrace.engines.llama.library import Library
from headrace.engines.llama.state_blocks import SplitState, join_blocks, split_state
from headrace.engines.llama.weights import Weights
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from headrace.models.tiny_kinds import kinds, make_tiny_kind
from headrace.scheduling.bands import Band
from tests.engines.harness import Model

TOKENS = 300
WHOLE = {"gqa", "mha", "mqa", "latent"}
"""Kinds of memory whose states are cut; the others lose tokens, or keep something besides them."""


def computed(library: Library, weights: Weights, band: Band, stream: int) -> Context:
    """A context whose ``stream`` holds ``TOKENS`` tokens."""
    context = Context(library, weights, band, step_tokens=512, threads=1)
    for start in range(0, TOKENS, 50):
        context.batch.clear()
        context.batch.add_chunk(tokens(start, start + 50), start, stream, last_output=True, all_outputs=False)
        context.decode()
    return context


def tokens(start: int, end: int) -> list[int]:
    """Some tokens of the smallest vocabulary."""
    return [(7 * position + position // 13) % 300 for position in range(start, end)]


def cut(context: Context, stream: int) -> SplitState | None:
    """The state of a stream, cut."""
    return split_state(context.save_stream(stream), stream=stream, streams=context.band.max_sequences, tokens=TOKENS)


def next_logits(context: Context, stream: int, position: int) -> npt.NDArray[np.float32]:
    """Logits after four more tokens."""
    context.batch.clear()
    index = context.batch.add_chunk(
        tokens(position, position + 4), position, stream, last_output=True, all_outputs=False
    )
    context.decode()
    return context.logits(index).copy()


def assert_joins_to_the_bit(library: Library, weights: Weights) -> None:
    """Two blocks and a part of one, joined for a context with another number of streams, go on like the stream."""
    source = computed(library, weights, Band(512, 3), 1)
    target = Context(library, weights, Band(768, 2), step_tokens=512, threads=1)
    try:
        state = cut(source, 1)
        assert state is not None
        blocks = [state.block(depth) for depth in range(2)]
        for count in (2 * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS + 5):
            joined = np.empty(state.layout.state_bytes(count, 2), np.uint8)
            join_blocks(state.layout, blocks, tokens=count, streams=2, target=joined)
            target.clear_stream(0)
            assert target.load_stream(0, joined.data)
            assert target.stream_tokens(0) == count
            assert source.take_back(1, count)
            expected = next_logits(source, 1, count)
            assert (next_logits(target, 0, count) == expected).all()
    finally:
        source.close()
        target.close()


@pytest.mark.model
def test_the_real_models_state_joins_to_the_bit(library: Library, smollm2: Model) -> None:
    """SmolLM2."""
    assert_joins_to_the_bit(library, smollm2.weights)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_state_joins_to_the_bit_with_flash_attention_and_without(
    library: Library, tiny: Model, monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    """Without it, libllama keeps V transposed."""
    defaults = library.api.llama_context_default_params

    def params() -> Any:
        chosen = defaults()
        chosen.flash_attn_type = 0 if transposed else 1
        return chosen

    monkeypatch.setattr(library.api, "llama_context_default_params", params)
    assert_joins_to_the_bit(library, tiny.weights)
    context = computed(library, tiny.weights, Band(512, 1), 0)
    state = cut(context, 0)
    context.close()
    assert state is not None and state.layout.transposed is transposed


@pytest.fixture(params=kinds())
def kind(request: pytest.FixtureRequest, library: Library, tmp_path: Path) -> Iterator[tuple[str, Weights]]:
    """Every kind of attention, as a synthetic model."""
    weights = Weights(library, make_tiny_kind(request.param, tmp_path / "kind.gguf"))
    yield request.param, weights
    weights.close()


def test_every_kind_of_memory_joins_to_the_bit_or_is_refused(library: Library, kind: tuple[str, Weights]) -> None:
    """There is no third: a window that lost tokens, a recurrent state and an indexer are noticed."""
    name, weights = kind
    context = computed(library, weights, Band(512, 2), 1)
    state = cut(context, 1)
    usable = state is not None and context.can_remove_last
    context.close()
    assert usable == (name in WHOLE)
    if usable:
        assert_joins_to_the_bit(library, weights)


def written(cells: int, layers: int, *, transposed: int = 0, row: int = 4) -> bytearray:
    """A state as libllama writes it (see the module's docstring): one stream of one, F16."""
    data = bytearray(b"ggsq\0\0\0\0") + struct.pack("<II", 1, cells)
    for position in range(cells):
        data += struct.pack("<iIi", position, 1, 0)
    data += struct.pack("<II", transposed, layers)
    for _ in range(layers):
        data += struct.pack("<iQ", 1, row) + bytes(range(row)) * cells
    for _ in range(layers):
        if transposed:
            data += struct.pack("<iII", 1, 2, row // 2) + bytes(2 * cells * (row // 2))
        else:
            data += struct.pack("<iQ", 1, row) + bytes(row * cells)
    return data


@given(transposed=st.integers(0, 1), layers=st.integers(1, 3), cells=st.integers(128, 300))
def test_a_state_of_any_size_is_cut_and_joined_to_itself(transposed: int, layers: int, cells: int) -> None:
    """As far as its whole blocks go."""
    data = written(cells, layers, transposed=transposed)
    state = split_state(data, stream=0, streams=1, tokens=cells)
    assert state is not None
    whole = cells // KV_BLOCK_TOKENS
    count = whole * KV_BLOCK_TOKENS
    joined = np.empty(state.layout.state_bytes(count, 1), np.uint8)
    join_blocks(state.layout, [state.block(i) for i in range(whole)], tokens=count, streams=1, target=joined)
    assert joined.tobytes() == bytes(written(count, layers, transposed=transposed))
    assert state.layout.runs[0].width == 2
    with pytest.raises(ValueError, match="no whole block"):
        state.block(whole)


@given(
    cells=st.integers(1, 4),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    end=st.integers(0, 400),
)
def test_any_other_bytes_are_refused_or_have_all_their_parts(
    cells: int, changes: list[tuple[int, int]], end: int
) -> None:
    """No exception, and nothing outside of the data is ever part of a block."""
    data = written(cells, 2)
    for place, value in changes:
        data[place % len(data)] = value
    state = split_state(data[: max(1, len(data) - end)], stream=0, streams=1, tokens=cells)
    if state is not None:
        assert state.layout.state_bytes(cells, 1) == len(data[: max(1, len(data) - end)])


def test_positions_out_of_order_are_refused() -> None:
    """Two cells have changed places."""
    data = written(4, 1)
    data[16:28], data[28:40] = data[28:40], data[16:28]
    assert split_state(data, stream=0, streams=1, tokens=4) is None


def test_what_does_not_fit_is_not_joined() -> None:
    """Too few blocks, blocks of another layout, a buffer of another size."""
    state = split_state(written(128, 1), stream=0, streams=1, tokens=128)
    assert state is not None
    right = np.empty(state.layout.state_bytes(128, 1), np.uint8)
    for blocks, count, target in (
        ([], 128, right),
        ([state.block(0)], 129, right),
        ([state.block(0)], 128, right[1:]),
        ([state.block(0)[1:]], 128, right),
    ):
        with pytest.raises(ValueError):
            join_blocks(state.layout, blocks, tokens=count, streams=1, target=target)
