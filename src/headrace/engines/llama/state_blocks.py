"""A stream's state, cut into blocks of KV and put together again.

libllama writes the state of a sequence (llama.cpp, ``llama_kv_cache::state_write``, sequence state version 3) as a
frame (``stream_state``) around: the number of cells; per cell its position, the number of sequences in it (1) and the
sequence; whether V is transposed and the number of layers; then K of every layer and V of every layer that has one. K,
and V as it is with flash attention, are a type, a row size and the rows of all cells. A transposed V is a type, an
entry size, a number of rows, and each row with an entry of all cells. All little-endian.

Everything that depends on the number of cells is thus rows, or columns, of known sizes: those of any first cells,
with the frame around them, are the state that a shorter sequence would have left. Memory of another kind (recurrent,
hybrid, with a sliding window, with positions of several dimensions) does not have exactly this shape, and is refused.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from headrace.kv.tiers.planes import Bytes, Run
from headrace.kv.token_blocks import KV_BLOCK_TOKENS

_PREFIX_BYTES: Final = 8
_CELL: Final = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_ROWS_HEAD: Final = struct.Struct("<iQ")
_COLUMNS_HEAD: Final = struct.Struct("<iII")
_MOST_LAYERS: Final = 4096
_MOST_ENTRY_BYTES: Final = 64
_ENTRY_BYTES: Final = {0: 4, 1: 2, 2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 20: 18, 30: 2}
"""ggml's type number -> bytes of its smallest unit: F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, BF16. For others
the bytes stay as they are."""


@dataclass(frozen=True, slots=True)
class Section:
    """K or V of one layer: its head as libllama writes it, and ``rows`` of ``entry_bytes`` for each cell. Rows of one
    cell stand together when there is one (``rows`` 1), columns otherwise (a transposed V)."""

    head: bytes
    rows: int
    entry_bytes: int
    unit_bytes: int

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell."""
        return self.rows * self.entry_bytes


@dataclass(frozen=True, slots=True)
class StateLayout:
    """How the states of a context are laid out. ``prefix`` is their beginning without the sequence."""

    prefix: bytes
    transposed: bool
    layers: int
    sections: tuple[Section, ...]

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token."""
        return sum([section.cell_bytes for section in self.sections])

    @property
    def block_bytes(self) -> int:
        """KV bytes of a whole block."""
        return KV_BLOCK_TOKENS * self.token_bytes

    @property
    def runs(self) -> tuple[Run, ...]:
        """The entry widths in a block."""
        runs: list[Run] = []
        for section in self.sections:
            length = KV_BLOCK_TOKENS * section.cell_bytes
            if runs and runs[-1].width == section.unit_bytes:
                length += runs.pop().length
            runs.append(Run(length, section.unit_bytes))
        return tuple(runs) if len(runs) <= 4 else (Run(self.block_bytes, 1),)

    def digest(self) -> bytes:
        """Of everything that two states must agree in for one to be read as the other."""
        described = repr((self.prefix, self.transposed, self.layers, self.sections))
        return hashlib.blake2b(described.encode(), digest_size=32).digest()

    def state_bytes(self, tokens: int, streams: int) -> int:
        """Length of the state of ``tokens`` cells for a context with ``streams`` streams."""
        heads = sum([len(section.head) for section in self.sections])
        frame = _PREFIX_BYTES + 4 + 4 * streams
        return frame + tokens * (_CELL.itemsize + self.token_bytes) + (8 + heads if tokens else 0)


@dataclass(frozen=True, slots=True, eq=False)
class SplitState:
    """A state whose parts are known. ``offsets`` are where each section's entries begin in ``data``."""

    layout: StateLayout
    data: Bytes
    tokens: int
    offsets: tuple[int, ...]

    def block(self, depth: int) -> Bytes:
        """A copy of the KV of the block after ``depth`` whole ones. Raises ValueError when it is not all there."""
        first, end = depth * KV_BLOCK_TOKENS, (depth + 1) * KV_BLOCK_TOKENS
        if not first >= 0 or end > self.tokens:
            raise ValueError(f"{self.tokens} tokens have no whole block {depth}")
        out = np.empty(self.layout.block_bytes, np.uint8)
        at = 0
        alike = _alike(self.data, self.layout, self.offsets[0], self.tokens)
        if alike is not None:
            out.reshape(alike.shape[0], KV_BLOCK_TOKENS, alike.shape[2])[:] = alike[:, first:end]
            return out
        for section, offset in zip(self.layout.sections, self.offsets, strict=True):
            size = KV_BLOCK_TOKENS * section.cell_bytes
            _cells(out, at, section, KV_BLOCK_TOKENS)[:] = _cells(self.data, offset, section, self.tokens)[:, first:end]
            at += size
        return out


def _cells(data: Bytes, offset: int, section: Section, tokens: int) -> Bytes:
    """A section's entries as (rows, cells, bytes)."""
    size = tokens * section.cell_bytes
    return data[offset : offset + size].reshape(section.rows, tokens, section.entry_bytes)


def _alike(data: Bytes, layout: StateLayout, offset: int, tokens: int) -> Bytes | None:
    """All sections, the first at ``offset``, as one array (section, cell, bytes), when they are of one shape; else
    None. One copy of it is quicker than one a section, and lets other threads run."""
    first, sections = layout.sections[0], layout.sections
    shape = (len(first.head), 1, first.entry_bytes)
    if any([(len(each.head), each.rows, each.entry_bytes) != shape for each in sections]):
        return None
    stride = len(first.head) + tokens * first.entry_bytes
    return np.lib.stride_tricks.as_strided(
        data[offset:], (len(sections), tokens, first.entry_bytes), (stride, first.entry_bytes, 1)
    )


def split_state(data: memoryview | bytearray, *, stream: int, streams: int, tokens: int) -> SplitState | None:
    """The parts of a state that stream ``stream`` of a context with ``streams`` streams wrote while it held ``tokens``
    tokens; None when it does not have exactly the shape that is known, or not the positions 0 to ``tokens`` - 1 in
    order."""
    view = np.frombuffer(data, np.uint8)
    end = len(view) - 4 * (streams - 1 - stream)
    at = _PREFIX_BYTES
    head = struct.Struct(f"<{stream + 2}I")
    if tokens < 1 or at + head.size > end:
        return None
    counts = head.unpack_from(data, at)
    if counts[0] != streams or any(counts[1:-1]) or counts[-1] != tokens or view[end:].any():
        return None
    at += head.size
    if at + tokens * _CELL.itemsize + 8 > end:
        return None
    cells = np.frombuffer(data, _CELL, tokens, at)
    if (cells["sequences"] != 1).any() or (cells["position"] != np.arange(tokens)).any():
        return None
    at += tokens * _CELL.itemsize
    transposed, layers = struct.unpack_from("<II", data, at)
    at += 8
    if transposed not in (0, 1) or not 1 <= layers <= _MOST_LAYERS:
        return None
    sections: list[Section] = []
    offsets: list[int] = []
    while at < end:
        in_columns = bool(transposed) and len(sections) >= layers
        form = _COLUMNS_HEAD if in_columns else _ROWS_HEAD
        if len(sections) == 2 * layers or at + form.size > end:
            return None
        kind, entry, *rest = form.unpack_from(data, at)
        rows = rest[0] if in_columns else 1
        if entry < 1 or rows < 1 or tokens * rows * entry > end - at - form.size:
            return None
        sections.append(Section(bytes(data[at : at + form.size]), rows, entry, _unit(kind, entry)))
        at += form.size
        offsets.append(at)
        at += tokens * rows * entry
    if at != end or len(sections) < layers:
        return None
    layout = StateLayout(bytes(data[:4]), bool(transposed), layers, tuple(sections))
    return SplitState(layout, view, tokens, tuple(offsets))


def _unit(kind: int, entry_bytes: int) -> int:
    unit = _ENTRY_BYTES.get(kind, 1)
    return unit if entry_bytes % unit == 0 and unit <= _MOST_ENTRY_BYTES else 1


def join_blocks(layout: StateLayout, blocks: Sequence[Bytes], *, tokens: int, streams: int, target: Bytes) -> None:
    """Write into ``target`` the state of the first ``tokens`` tokens of ``blocks``, for any stream of a context with
    ``streams`` streams. ``target`` has ``layout.state_bytes`` bytes. Raises ValueError when lengths do not fit."""
    if not 0 < tokens <= len(blocks) * KV_BLOCK_TOKENS or len(target) != layout.state_bytes(tokens, streams):
        raise ValueError(f"{len(blocks)} blocks and {len(target)} bytes do not make a state of {tokens} tokens")
    if any([len(block) != layout.block_bytes for block in blocks]):
        raise ValueError("a block is not of this layout")
    at = 0

    def put(data: bytes) -> None:
        nonlocal at
        target[at : at + len(data)] = np.frombuffer(data, np.uint8)
        at += len(data)

    put(layout.prefix + bytes(4) + struct.pack("<II", streams, tokens))
    cells = np.zeros(tokens, _CELL)
    cells["position"] = np.arange(tokens)
    cells["sequences"] = 1
    put(cells.tobytes())
    put(struct.pack("<II", layout.transposed, layout.layers))
    used = -(-tokens // KV_BLOCK_TOKENS)
    from_block = 0
    alike = _alike(target, layout, at + len(layout.sections[0].head), tokens)
    for index, block in enumerate(blocks[:used] if alike is not None else ()):
        first = index * KV_BLOCK_TOKENS
        count = min(KV_BLOCK_TOKENS, tokens - first)
        assert alike is not None
        alike[:, first : first + count] = block.reshape(alike.shape[0], KV_BLOCK_TOKENS, alike.shape[2])[:, :count]
    for section in layout.sections:
        put(section.head)
        if alike is not None:
            at += tokens * section.cell_bytes
            continue
        out = _cells(target, at, section, tokens)
        for index, block in enumerate(blocks[:used]):
            first = index * KV_BLOCK_TOKENS
            count = min(KV_BLOCK_TOKENS, tokens - first)
            out[:, first : first + count] = _cells(block, from_block, section, KV_BLOCK_TOKENS)[:, :count]
        at += tokens * section.cell_bytes
        from_block += KV_BLOCK_TOKENS * section.cell_bytes
    put(bytes(4 * (streams - 1)))
