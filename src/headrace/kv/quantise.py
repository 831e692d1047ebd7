"""Rows of numbers to ggml's blocks and back, and the rotation that libllama applies before it quantises.

Pure numpy, and to the bit what ggml's reference quantiser writes. A block is 32 numbers: a half-precision scale, then
``q8_0``: 32 signed bytes; ``q4_0``: 16 bytes whose low halves are the first 16 numbers and high halves the others,
8 standing for 0. ``q8_0`` scales by the largest magnitude / 127; ``q4_0`` by the number of largest magnitude / -8, so
that this one is met exactly.

libllama multiplies every head (or every 64 numbers of it) by an orthonormal Walsh-Hadamard matrix before it stores
keys and values in such blocks: outliers spread over the whole head, and less is lost. The matrix is its own inverse.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from headrace.kv.precision import BLOCK_NUMBERS, KvDtype, block_bytes

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_HALF = BLOCK_NUMBERS // 2
_SCALE_BYTES = 2


def encoded(numbers: Floats, dtype: KvDtype) -> Bytes:
    """``numbers`` (rows, numbers) as bytes (rows, bytes). Rows must be whole blocks (ValueError) for all but f16."""
    if dtype == "f16":
        return numbers.astype(np.float16).view(np.uint8)
    rows, width = numbers.shape
    if width % BLOCK_NUMBERS:
        raise ValueError(f"a row of {width} numbers is not made of whole blocks of {BLOCK_NUMBERS}")
    blocks = np.ascontiguousarray(numbers).reshape(-1, BLOCK_NUMBERS)
    data = np.empty((len(blocks), block_bytes(dtype)), np.uint8)
    if dtype == "q8_0":
        _encode_q8_0(blocks, data)
    else:
        _encode_q4_0(blocks, data)
    return data.reshape(rows, -1)


def decoded(data: Bytes, dtype: KvDtype) -> Floats:
    """The numbers (rows, numbers) in bytes (rows, bytes). Raises ValueError unless rows are whole blocks."""
    rows, width = data.shape
    if width % (_SCALE_BYTES if dtype == "f16" else block_bytes(dtype)):
        raise ValueError(f"a row of {width} bytes is not made of whole blocks of {dtype}")
    data = np.ascontiguousarray(data)
    if dtype == "f16":
        return data.view(np.float16).astype(np.float32)
    blocks = data.reshape(-1, block_bytes(dtype))
    scales = np.ascontiguousarray(blocks[:, :_SCALE_BYTES]).view(np.float16).astype(np.float32)
    packed = blocks[:, _SCALE_BYTES:]
    numbers = np.empty((len(blocks), BLOCK_NUMBERS), np.float32)
    if dtype == "q8_0":
        numbers[:] = packed.view(np.int8)
    else:
        numbers[:, :_HALF] = packed & 0x0F
        numbers[:, _HALF:] = packed >> 4
        numbers -= np.float32(8)
    numbers *= scales
    return numbers.reshape(rows, -1)


def rotated(numbers: Floats, size: int) -> Floats:
    """Every ``size`` numbers of each row times the orthonormal Walsh-Hadamard matrix; as they are for a ``size`` of 0.
    ``size`` is a power of two that divides the row (ValueError)."""
    if size == 0:
        return numbers
    if size & (size - 1) or numbers.shape[-1] % size:
        raise ValueError(f"rows of {numbers.shape[-1]} numbers cannot be rotated {size} at a time")
    values = numbers.reshape(-1, size)
    half = 1
    while half < size:
        pairs = values.reshape(-1, size // (2 * half), 2, half)
        turned = np.empty_like(pairs)
        np.add(pairs[:, :, 0], pairs[:, :, 1], out=turned[:, :, 0])
        np.subtract(pairs[:, :, 0], pairs[:, :, 1], out=turned[:, :, 1])
        values = turned.reshape(-1, size)
        half *= 2
    values = values * np.float32(1 / math.sqrt(size))
    return values.reshape(numbers.shape)


def _reciprocal(values: Floats) -> Floats:
    """1 / value; 0 for 0."""
    return np.divide(np.float32(1), values, out=np.zeros_like(values), where=values != 0)


def _encode_q8_0(blocks: Floats, data: Bytes) -> None:
    scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    data[:, :_SCALE_BYTES] = scales.astype(np.float16).view(np.uint8)
    steps = blocks * _reciprocal(scales)
    # Halves away from zero, as C's roundf: numpy's own rounding takes them to the even neighbour.
    steps += np.copysign(np.float32(0.5), steps)
    data[:, _SCALE_BYTES:] = steps.astype(np.int8).view(np.uint8)


def _encode_q4_0(blocks: Floats, data: Bytes) -> None:
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    largest[largest == 0] = 0.0  # ggml looks for what is above 0, and so never finds -0
    scales = largest / np.float32(-8)
    data[:, :_SCALE_BYTES] = scales.astype(np.float16).view(np.uint8)
    steps = blocks * _reciprocal(scales)
    steps += np.float32(8.5)
    quarters = np.minimum(steps.astype(np.int8), 15).view(np.uint8)
    data[:, _SCALE_BYTES:] = quarters[:, :_HALF] | (quarters[:, _HALF:] << 4)
