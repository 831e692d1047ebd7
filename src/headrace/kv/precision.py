"""How precisely keys and values are kept: what each precision takes, and which is finer.

The names and sizes are ggml's. ``q8_0`` and ``q4_0`` keep 32 numbers as one half-precision scale and 8 or 4 bits each.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from headrace.kv.entry_types import ENTRY_TYPES

KvDtype = Literal["f16", "q8_0", "q4_0"]

KV_DTYPES: Final[tuple[KvDtype, ...]] = get_args(KvDtype)
"""Finest first."""
BLOCK_NUMBERS: Final = 32
"""Numbers that share a scale. Rows are made of whole blocks."""


def block_bytes(dtype: KvDtype) -> int:
    """Bytes of ``BLOCK_NUMBERS`` numbers."""
    kind = ENTRY_TYPES[dtype]
    return BLOCK_NUMBERS // kind.block_entries * kind.block_bytes


def scaled_bytes(f16_bytes: int, dtype: KvDtype) -> int:
    """What takes ``f16_bytes`` at F16 takes so many at ``dtype``. Exact for whole blocks, else rounded up."""
    return -(-f16_bytes * block_bytes(dtype) // block_bytes("f16"))


def at_least(dtype: KvDtype, minimum: KvDtype | None) -> bool:
    """Whether ``dtype`` is as fine as ``minimum`` (None: anything will do)."""
    return minimum is None or KV_DTYPES.index(dtype) <= KV_DTYPES.index(minimum)


def coarser(one: KvDtype, other: KvDtype) -> KvDtype:
    """The less precise of the two: what is left of numbers that went through both."""
    return max(one, other, key=KV_DTYPES.index)
