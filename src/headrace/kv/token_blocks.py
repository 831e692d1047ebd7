"""Tokens packed into bytes, so that a whole block compares, and is looked up, as one value."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

KV_BLOCK_TOKENS: Final = 128
"""Tokens of one KV block: the unit of accounting, reuse and tiering."""

_TOKEN_BYTES: Final = array("i").itemsize
BLOCK_BYTES: Final = KV_BLOCK_TOKENS * _TOKEN_BYTES
"""Bytes of a whole packed block (of its token ids, not of its KV)."""


def packed(tokens: Iterable[int]) -> bytes:
    """Token ids one after the other. Raises OverflowError for one that does not fit 32 bits."""
    return array("i", tokens).tobytes()


def token_count(data: bytes | bytearray) -> int:
    """How many tokens ``data`` packs."""
    return len(data) // _TOKEN_BYTES


def first_tokens(data: bytes | bytearray, tokens: int) -> bytes:
    """The first ``tokens`` tokens of ``data``, or all when it has fewer."""
    return bytes(data[: tokens * _TOKEN_BYTES])


def block_at(data: bytes | bytearray, depth: int) -> bytes:
    """The block after ``depth`` whole ones; shorter, or empty, at the end."""
    return bytes(data[depth * BLOCK_BYTES : (depth + 1) * BLOCK_BYTES])


def common_tokens(one: bytes | bytearray, other: bytes | bytearray) -> int:
    """Tokens that both begin with. Exact."""
    length = min(len(one), len(other))
    # The lowest bit in which two little-endian numbers differ lies in the first byte that differs.
    difference = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    if difference:
        length = ((difference & -difference).bit_length() - 1) // 8
    return length // _TOKEN_BYTES
