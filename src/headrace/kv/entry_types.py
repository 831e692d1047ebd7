"""How many bytes a row of KV entries takes in each type.

The block types are ggml's: 32 entries share one or two F16 scales. ``fp8`` and ``fp4`` are what GPU servers store and
libllama does not have. A plain fp8 row is a byte an entry (one scale for the whole tensor). Three rows have a form of
their own in fp8, read from the formats that DeepSeek's kernels use:

- ``sparse_mla`` (V3.2): the latent in fp8 with an F32 scale per 128 entries, the rotary part in bf16: 656 B for 512+64;
- ``shared_kv`` (V4): all but the rotary part in fp8 with a scale byte per 64 entries, padded to 8 bytes, the rotary
  part in bf16: 584 B for 512 with 64 rotary;
- ``index``: an F32 scale per 128 entries: 132 B for 128; in fp4 half a byte an entry and a scale byte per 32: 68 B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError

RowForm = Literal["plain", "sparse_mla", "shared_kv", "index"]


@dataclass(frozen=True, slots=True)
class EntryType:
    """``block_bytes`` hold ``block_entries`` entries. ``ggml_type`` is ggml's number for it; None: not in libllama."""

    name: str
    block_entries: int
    block_bytes: int
    ggml_type: int | None = None


ENTRY_TYPES: dict[str, EntryType] = {
    kind.name: kind
    for kind in (
        EntryType("f16", 1, 2, 1),
        EntryType("bf16", 1, 2, 30),
        EntryType("f32", 1, 4, 0),
        EntryType("q8_0", 32, 34, 8),
        EntryType("q5_1", 32, 24, 7),
        EntryType("q5_0", 32, 22, 6),
        EntryType("q4_1", 32, 20, 3),
        EntryType("q4_0", 32, 18, 2),
        EntryType("iq4_nl", 32, 18, 20),
        EntryType("fp8", 1, 1),
        EntryType("fp4", 32, 17),
    )
}
"""By name. ``fp4`` is for rows of the indexer alone."""

KV_TYPE_NAMES = tuple(name for name in ENTRY_TYPES if name != "fp4")
INDEX_TYPE_NAMES = tuple(ENTRY_TYPES)

_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Row:
    """What one layer stores for one token, or for one compressed group of tokens: ``entries`` numbers in a line, of
    which the last ``rope_entries`` carry positions. ``head_entries`` is the length of one head's part of it."""

    entries: int
    head_entries: int
    form: RowForm = "plain"
    rope_entries: int = 0


def row_bytes(row: Row, kind: EntryType) -> int:
    """Bytes of one row. Raises ConfigError where the type cannot hold it (heads that are no whole blocks)."""
    if kind.name == "fp8" and row.form != "plain":
        return _fp8_bytes(row)
    if kind.name == "fp4" and row.form != "index":
        raise ConfigError("fp4 is a type of indexer rows alone")
    if row.head_entries % kind.block_entries:
        raise ConfigError(
            f"{kind.name} stores blocks of {kind.block_entries} entries, and a head has {row.head_entries}: "
            "libllama refuses it too; choose f16, bf16 or f32"
        )
    return row.entries // kind.block_entries * kind.block_bytes


def _fp8_bytes(row: Row) -> int:
    body = row.entries - row.rope_entries
    if row.form == "shared_kv":
        return body + _up(-(-body // 64), 8) + row.rope_entries * _BF16_BYTES
    return body + -(-body // 128) * 4 + row.rope_entries * _BF16_BYTES


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
