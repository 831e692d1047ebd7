"""KV that goes from one precision to another: what arrives is what libllama itself would have written."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.llama.context import Context
from headrace.engines.llama.convert_state import MemoryFormat, converted, read_rows, written
from headrace.engines.llama.memory_formats import MemoryFormats
from headrace.kv.precision import KV_DTYPES, KvDtype
from headrace.kv.quantise import encoded, rotated
from headrace.scheduling.bands import Band
from tests.engines.harness import Model

TOKENS = 40
F32 = 0
"""ggml's number."""


def state_of(model: Model, dtype: KvDtype, streams: int, stream: int) -> bytes:
    """What libllama writes of ``TOKENS`` tokens in one stream of a context."""
    context = Context(model.library, model.weights, Band(256, streams, dtype), step_tokens=64, threads=1)
    try:
        _compute(model, context, stream)
        return bytes(context.save_stream(stream))
    finally:
        context.close()


def _compute(model: Model, context: Context, stream: int) -> None:
    tokens = model.tokens("The mill stood at the bend of the river, where the water ran fast. " * 6)[:TOKENS]
    context.batch.clear()
    context.batch.add_chunk(tokens, 0, stream, last_output=True, all_outputs=False)
    context.decode()


def raw_state(model: Model, kind: int, flash: bool) -> bytes:
    """The same from libllama alone: K and V of ggml's type ``kind``, with or without flash attention."""
    api = model.library.api
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.n_seq_max = params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = kind
    params.flash_attn_type = int(flash)
    handle = api.llama_init_from_model(model.weights.handle, params)
    assert handle
    tokens = model.tokens("The mill stood at the bend of the river, where the water ran fast. " * 6)[:TOKENS]
    array = (ctypes.c_int32 * TOKENS)(*tokens)  # the batch keeps only its address
    batch = api.llama_batch_get_one(array, TOKENS)
    assert api.llama_decode(handle, batch) == 0
    data = (ctypes.c_uint8 * api.llama_state_seq_get_size(handle, 0))()
    assert api.llama_state_seq_get_data(handle, data, len(data), 0) == len(data)
    api.llama_free(handle)
    return bytes(data)


@pytest.fixture(scope="module")
def formats(smollm2: Model) -> MemoryFormats:
    """How the installed libllama keeps the real model's KV."""
    return MemoryFormats(smollm2.library, smollm2.weights)


@pytest.fixture(scope="module")
def exact(smollm2: Model) -> Iterator[list[np.ndarray]]:
    """The first layer's keys and values as libllama computes them, before any rounding."""
    rows = read_rows(raw_state(smollm2, F32, flash=True), stream=0, streams=1, tokens=TOKENS)
    assert rows is not None
    yield [np.ascontiguousarray(layer).view(np.float32) for layer in (rows.k[0], rows.v[0])]


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_rows_are_what_libllama_writes_to_the_bit(
    smollm2: Model, formats: MemoryFormats, exact: list[np.ndarray], dtype: KvDtype
) -> None:
    """The first layer's keys and values come from the tokens alone, so they are the same numbers at every precision.
    Rotated and quantised here, they are byte for byte what libllama's own context of that precision holds."""
    found = formats.of(dtype)
    rows = read_rows(state_of(smollm2, dtype, 1, 0), stream=0, streams=1, tokens=TOKENS)
    assert found is not None and rows is not None
    for numbers, size, stored in zip(exact, (found.k_rotation, found.v_rotation), (rows.k[0], rows.v[0]), strict=True):
        assert np.array_equal(encoded(rotated(numbers, size), dtype), stored)


def test_the_rotation_in_use_is_found_out(formats: MemoryFormats) -> None:
    """The real model has heads of 64 numbers, which this libllama rotates before it quantises, and not at F16."""
    assert formats.of("f16") == MemoryFormat("f16")
    assert formats.of("q8_0") == MemoryFormat("q8_0", False, 64, 64)
    assert formats.of("q4_0") == MemoryFormat("q4_0", False, 64, 64)


@pytest.mark.parametrize("source", KV_DTYPES)
@pytest.mark.parametrize("target", KV_DTYPES)
def test_libllama_takes_what_was_converted_and_writes_the_same_again(
    smollm2: Model, formats: MemoryFormats, source: KvDtype, target: KvDtype
) -> None:
    """From stream 1 of 3 into stream 2 of 4: the target holds every byte of the converted state."""
    of_source, of_target = formats.of(source), formats.of(target)
    assert of_source is not None and of_target is not None
    state = state_of(smollm2, source, 3, 1)
    data = converted(state, of_source, of_target, stream=1, source_streams=3, target_streams=4, tokens=TOKENS)
    assert data is not None
    context = Context(smollm2.library, smollm2.weights, Band(256, 4, target), step_tokens=64, threads=1)
    try:
        assert context.load_stream(2, data)
        assert context.stream_tokens(2) == TOKENS
        back = read_rows(context.save_stream(2), stream=2, streams=4, tokens=TOKENS)
    finally:
        context.close()
    sent = read_rows(data, stream=0, streams=4, tokens=TOKENS)
    assert back is not None and sent is not None
    for ours, theirs in zip([*sent.k, *sent.v], [*back.k, *back.v], strict=True):
        assert np.array_equal(ours, theirs)


def test_transposed_v_is_read_and_written(smollm2: Model, formats: MemoryFormats) -> None:
    """Without flash attention libllama keeps V by channel: a state is written back byte for byte, its numbers are those
    of the other layout in the first layer, and 8 bits take them in."""
    state = raw_state(smollm2, 1, flash=False)
    rows = read_rows(state, stream=0, streams=1, tokens=TOKENS)
    straight = read_rows(raw_state(smollm2, 1, flash=True), stream=0, streams=1, tokens=TOKENS)
    assert rows is not None and straight is not None and rows.v_transposed and not straight.v_transposed
    assert written(rows, 1) == state
    assert np.array_equal(rows.v[0], straight.v[0])
    target = formats.of("q8_0")
    assert target is not None
    plain = MemoryFormat("f16", v_transposed=True)
    data = converted(state, plain, target, stream=0, source_streams=1, target_streams=1, tokens=TOKENS)
    assert data is not None
    back = converted(data, target, plain, stream=0, source_streams=1, target_streams=1, tokens=TOKENS)
    assert back is not None and len(back) == len(state)
    assert converted(state, MemoryFormat("f16"), target, stream=0, source_streams=1, target_streams=1, tokens=1) is None


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(0, 4000), flip=st.integers(0, 4000), value=st.integers(0, 255))
def test_a_state_of_another_shape_is_not_converted_and_nothing_breaks(
    tiny_state: bytes, cut: int, flip: int, value: int
) -> None:
    """Cut short it is refused. With any byte of its head changed it is refused, or it is a state of that shape."""
    short = tiny_state[: len(tiny_state) - 1 - cut]
    assert read_rows(short, stream=0, streams=1, tokens=TOKENS) is None
    changed = bytearray(tiny_state)
    changed[flip % len(changed)] = value
    rows = read_rows(changed, stream=0, streams=1, tokens=TOKENS)
    assert rows is None or written(rows, 1) == bytes(changed)


@pytest.fixture(scope="module")
def tiny_state(tiny: Model) -> bytes:
    """A small state."""
    return state_of(tiny, "f16", 1, 0)
