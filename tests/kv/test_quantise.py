"""Rows to ggml's blocks and back: to the bit what ggml's reference quantiser writes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.llama import library
from headrace.kv.precision import KV_DTYPES, KvDtype, at_least, block_bytes, coarser, scaled_bytes
from headrace.kv.quantise import Floats, decoded, encoded, rotated

Reference = Callable[[Floats, KvDtype], npt.NDArray[np.uint8]]


@pytest.fixture(scope="module")
def reference() -> Reference:
    """ggml's own reference quantiser, from the installed library."""
    native = library.load().api._lib

    def quantise(numbers: Floats, dtype: KvDtype) -> npt.NDArray[np.uint8]:
        function = getattr(native, f"quantize_row_{dtype}_ref")
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
        source = np.ascontiguousarray(numbers)
        target = np.empty((len(source), source.shape[1] // 32 * block_bytes(dtype)), np.uint8)
        function(source.ctypes.data, target.ctypes.data, source.size)
        return target

    return quantise


def _rows(seed: int, scale: float, rows: int = 64) -> Floats:
    """Numbers like a model's keys: mostly small, some far out, some exactly half-way, some blocks all zero."""
    random = np.random.default_rng(seed)
    rows_ = random.standard_normal((rows, 96)).astype(np.float32) * np.float32(scale)
    rows_[:, ::17] *= 30
    rows_[::5, :32] = np.round(rows_[::5, :32]) / 2
    rows_[1, :64] = 0
    return rows_


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0"])
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-12, 8))
def test_blocks_are_what_ggml_writes_to_the_bit(reference: Reference, dtype: KvDtype, seed: int, exponent: int) -> None:
    """Whatever the numbers (scales up to where half precision overflows), every byte is the reference's."""
    numbers = _rows(seed, 2.0**exponent)
    assert np.array_equal(encoded(numbers, dtype), reference(numbers, dtype))


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_what_was_written_reads_back_as_the_same_blocks(dtype: KvDtype) -> None:
    """Decoding and encoding again changes nothing: a state that goes out and in at one precision loses nothing."""
    data = encoded(_rows(1, 1.0), dtype)
    assert np.array_equal(encoded(decoded(data, dtype), dtype), data)


@pytest.mark.parametrize(("dtype", "steps"), [("q8_0", 127), ("q4_0", 8)])
def test_a_number_is_off_by_half_a_step_at_most(dtype: KvDtype, steps: int) -> None:
    """A step is the block's largest magnitude over the number of steps. q4_0's most positive number is 7 steps, not 8,
    so there a whole step is possible; the scale itself is rounded to half precision (one part in 2,048)."""
    numbers = _rows(2, 1.0)
    step = np.abs(numbers.reshape(-1, 32)).max(axis=1, keepdims=True) / steps
    error = np.abs(decoded(encoded(numbers, dtype), dtype) - numbers).reshape(-1, 32)
    most = 0.5 if dtype == "q8_0" else 1.0
    assert (error <= step * (most + steps / 2048) + 1e-7).all()


@pytest.mark.parametrize("size", [2, 32, 64, 128])
def test_rotating_twice_gives_the_same_numbers(size: int) -> None:
    """The matrix is its own inverse; 1e-6 of the largest number is float32's rounding over a few additions."""
    numbers = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    assert np.allclose(rotated(rotated(numbers, size), size), numbers, atol=1e-6 * np.abs(numbers).max() * 8)
    assert not np.allclose(rotated(numbers, size), numbers, atol=0.1)


def test_rotation_keeps_the_product_of_two_rows() -> None:
    """Queries and keys that are both rotated have the same products, which is why attention does not notice."""
    one, other = np.random.default_rng(4).standard_normal((2, 1, 64)).astype(np.float32)
    assert np.vdot(rotated(one, 64), rotated(other, 64)) == pytest.approx(np.vdot(one, other), abs=1e-4)


def test_rows_of_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks"):
        encoded(np.zeros((1, 40), np.float32), "q8_0")
    with pytest.raises(ValueError, match="whole blocks"):
        decoded(np.zeros((1, 35), np.uint8), "q8_0")
    with pytest.raises(ValueError, match="cannot be rotated"):
        rotated(np.zeros((1, 96), np.float32), 64)


def test_bytes_and_order_of_precisions() -> None:
    """23,040 bytes a token of the small model at F16: 17/32 of it at 8 bits, 9/32 at 4."""
    assert [scaled_bytes(23_040, dtype) for dtype in KV_DTYPES] == [23_040, 12_240, 6_480]
    assert at_least("q4_0", None) and at_least("q8_0", "q8_0") and at_least("f16", "q8_0")
    assert not at_least("q4_0", "q8_0")
    assert coarser("f16", "q4_0") == coarser("q4_0", "q8_0") == "q4_0"
