"""One stream's KV rewritten for a context of another precision, layout of V, or number of streams.

After the frame that ``stream_state`` describes, libllama writes a stream's cells: for each a position and the number of
sequences in it (4 bytes each) with their ids; then whether V is transposed and the number of layers; then for each
layer K's type (4 bytes), bytes a row (8) and the rows; then for each layer V: the same when it is not transposed, else
type, bytes a number, numbers a cell (4 each) and the numbers of one channel after those of another. All little-endian.

What does not have exactly this shape to the last byte (memory of another kind) is not converted: ``converted`` returns
None, and the caller computes the tokens again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from headrace.kv.entry_types import ENTRY_TYPES
from headrace.kv.precision import BLOCK_NUMBERS, KV_DTYPES, KvDtype, block_bytes
from headrace.kv.quantise import Bytes, Floats, decoded, encoded, rotated

GGML_TYPES: Final[dict[KvDtype, int]] = {dtype: ENTRY_TYPES[dtype].ggml_type or 0 for dtype in KV_DTYPES}
"""ggml's numbers of its types."""
_DTYPES: Final = {number: dtype for dtype, number in GGML_TYPES.items()}

_PREFIX_BYTES = 8


@dataclass(frozen=True, slots=True)
class MemoryFormat:
    """How a context keeps KV. ``k_rotation`` and ``v_rotation`` are how many numbers of a row libllama rotates
    together before it stores them (0: none)."""

    dtype: KvDtype
    v_transposed: bool = False
    k_rotation: int = 0
    v_rotation: int = 0


@dataclass(frozen=True, slots=True)
class StreamRows:
    """The cells of one stream: ``cells`` as written, and for each layer K and V as bytes (cells, bytes a row), of the
    types that ggml numbers ``k_types`` and ``v_types``. V's rows are by cell, however they were written."""

    frame: bytes
    cells: bytes
    count: int
    k: list[Bytes]
    v: list[Bytes]
    k_types: list[int]
    v_types: list[int]
    v_transposed: bool


class _Reader:
    """Takes bytes off the front. Raises ``struct.error`` at the end."""

    def __init__(self, data: bytes | bytearray | memoryview, at: int) -> None:
        self._view = memoryview(data)
        self.at = at

    def numbers(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(form, self._view, self.at)
        self.at += struct.calcsize(form)
        return values

    def bytes(self, count: int) -> memoryview:
        if count < 0 or self.at + count > len(self._view):
            raise struct.error("cut short")
        part = self._view[self.at : self.at + count]
        self.at += count
        return part

    def rows(self, rows: int, width: int) -> Bytes:
        return np.frombuffer(self.bytes(rows * width), np.uint8).reshape(rows, width)


def read_rows(
    data: bytes | bytearray | memoryview, *, stream: int, streams: int, tokens: int, frame_bytes: int = _PREFIX_BYTES
) -> StreamRows | None:
    """The rows of the ``tokens`` cells that ``stream`` of ``streams`` holds; None for any other shape."""
    try:
        return _read_rows(_Reader(data, 0), len(data), stream, streams, tokens, frame_bytes)
    except struct.error:
        return None


def _read_rows(
    reader: _Reader, size: int, stream: int, streams: int, tokens: int, frame_bytes: int
) -> StreamRows | None:
    frame = bytes(reader.bytes(frame_bytes))
    counts = reader.numbers(f"<{stream + 2}I")
    if counts[0] != streams or any(counts[1:-1]) or counts[-1] != tokens or not tokens:
        return None
    start = reader.at
    for _ in range(tokens):
        _position, sequences = reader.numbers("<iI")
        reader.bytes(4 * sequences)
    end = reader.at
    reader.at = start
    cells = bytes(reader.bytes(end - start))
    transposed, layers = reader.numbers("<II")
    if transposed > 1:
        return None
    k, k_types = [], []
    for _ in range(layers):
        kind, width = reader.numbers("<iQ")
        k_types.append(kind)
        k.append(reader.rows(tokens, width))
    v, v_types = [], []
    for _ in range(layers):
        if transposed:
            kind, number_bytes, channels = reader.numbers("<iII")
            channel_major = reader.rows(channels, tokens * number_bytes).reshape(channels, tokens, number_bytes)
            v.append(np.ascontiguousarray(channel_major.transpose(1, 0, 2)).reshape(tokens, -1))
        else:
            kind, width = reader.numbers("<iQ")
            v.append(reader.rows(tokens, width))
        v_types.append(kind)
    after = reader.numbers(f"<{streams - 1 - stream}I")
    if any(after) or reader.at != size:
        return None
    return StreamRows(frame, cells, tokens, k, v, k_types, v_types, bool(transposed))


def written(rows: StreamRows, streams: int) -> bytes:
    """The state as a context with ``streams`` streams would have written it."""
    parts: list[bytes] = [rows.frame, struct.pack("<II", streams, rows.count), rows.cells]
    parts.append(struct.pack("<II", rows.v_transposed, len(rows.k)))
    for kind, layer in zip(rows.k_types, rows.k, strict=True):
        parts += [struct.pack("<iQ", kind, layer.shape[1]), layer.tobytes()]
    for kind, layer in zip(rows.v_types, rows.v, strict=True):
        if rows.v_transposed:
            number_bytes = block_bytes(_DTYPES[kind]) // BLOCK_NUMBERS
            channels = layer.shape[1] // number_bytes
            channel_major = layer.reshape(rows.count, channels, number_bytes).transpose(1, 0, 2)
            parts += [struct.pack("<iII", kind, number_bytes, channels), channel_major.tobytes()]
        else:
            parts += [struct.pack("<iQ", kind, layer.shape[1]), layer.tobytes()]
    parts.append(bytes(4 * (streams - 1)))
    return b"".join(parts)


def converted(
    data: bytes | bytearray | memoryview,
    source: MemoryFormat,
    target: MemoryFormat,
    *,
    stream: int,
    source_streams: int,
    target_streams: int,
    tokens: int,
) -> bytearray | None:
    """``data`` of a context that keeps KV as ``source`` as one with ``target_streams`` streams that keeps it as
    ``target`` would have written it: the numbers are read, rotated where only one of the two is, and quantised. None
    when the state has another shape, or ``target`` cannot hold it."""
    rows = read_rows(data, stream=stream, streams=source_streams, tokens=tokens)
    if rows is None or rows.v_transposed != source.v_transposed:
        return None
    if {*rows.k_types, *rows.v_types} != {GGML_TYPES[source.dtype]}:
        return None
    if target.v_transposed and target.dtype != "f16":
        return None  # a block holds numbers of one cell: libllama does not transpose them
    try:
        k = [_layer(layer, source.dtype, target.dtype, source.k_rotation, target.k_rotation) for layer in rows.k]
        v = [_layer(layer, source.dtype, target.dtype, source.v_rotation, target.v_rotation) for layer in rows.v]
    except ValueError:
        return None  # rows that are not made of whole blocks
    kinds = [GGML_TYPES[target.dtype]] * len(k)
    new = StreamRows(rows.frame, rows.cells, rows.count, k, v, kinds, kinds, target.v_transposed)
    return bytearray(written(new, target_streams))


def _layer(layer: Bytes, source: KvDtype, target: KvDtype, rotated_by: int, rotate_by: int) -> Bytes:
    if source == target and rotated_by == rotate_by:
        return layer
    numbers: Floats = decoded(layer, source)
    if rotated_by != rotate_by:
        numbers = rotated(rotated(numbers, rotated_by), rotate_by)
    return encoded(numbers, target)
