"""One KV block as a file: a header that says exactly what it is, and its bytes.

The reader is total: whatever the file holds, the answer is a block or the reason why it is none. Nothing in the header
is believed before the header's own checksum, no length before it has been compared with the file's, and no tokens
before the address has been computed from them.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from headrace.kv.tiers.address import ADDRESS_BYTES, Digest, blake2b, child_address
from headrace.kv.tiers.codec import Codec, Payload, unpack
from headrace.kv.tiers.planes import Bytes, Run
from headrace.kv.token_blocks import BLOCK_BYTES

FORMAT_VERSION: Final = 1
_MAGIC: Final = b"HRKVBLK\0"
_FRAME: Final = struct.Struct("<8sHH")
"""Magic, format version, header length: these three never move."""
_UID_BYTES: Final = 16
_CHECK_BYTES: Final = 16
_MOST_RUNS: Final = 4
_BODY: Final = struct.Struct(
    f"<{ADDRESS_BYTES}s{ADDRESS_BYTES}s{ADDRESS_BYTES}s{_UID_BYTES}s{_UID_BYTES}sIBB{'QB' * _MOST_RUNS}QQd"
    f"{_CHECK_BYTES}s{BLOCK_BYTES}s"
)
HEADER_BYTES: Final = _FRAME.size + _BODY.size + _CHECK_BYTES

BadReason = Literal[
    "truncated",
    "not_a_block",
    "version",
    "header_checksum",
    "foreign",
    "address",
    "length",
    "codec",
    "payload_checksum",
    "unreadable",
    "orphan",
    "collision",
]
"""Why a block is dropped. ``foreign``: of another model, layout or build; ``orphan``: the block before it is gone, or
is not the one that it was written after."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block is. ``uid`` is of this file alone and ``parent_uid`` of the one it was written after (zeros: the
    root), so that a chain of files is the chain that was written, even if two contents had one address. ``depth``:
    whole blocks before it. ``runs``: the widths of its entries, for the codec. ``compute_s``: what computing it again
    takes, as predicted when it was written."""

    fingerprint: bytes
    parent: bytes
    address: bytes
    uid: bytes
    parent_uid: bytes
    depth: int
    tokens: bytes
    runs: tuple[Run, ...]
    codec: Codec
    raw_bytes: int
    stored_bytes: int
    compute_s: float
    checksum: bytes

    @property
    def file_bytes(self) -> int:
        """Length of the whole file."""
        return HEADER_BYTES + self.stored_bytes


ROOT_UID: Final = bytes(_UID_BYTES)


@dataclass(frozen=True, slots=True)
class Bad:
    """Not a block that can be used."""

    reason: BadReason


def checksum(data: bytes | memoryview) -> bytes:
    """Over a payload as stored, or a header."""
    return hashlib.blake2b(data, digest_size=_CHECK_BYTES).digest()


def encode_header(header: BlockHeader) -> bytes:
    """The bytes before the payload. Raises ValueError for more runs than the format has room for."""
    if len(header.runs) > _MOST_RUNS:
        raise ValueError(f"{len(header.runs)} runs; the format has room for {_MOST_RUNS}")
    runs: list[int] = []
    for run in (*header.runs, *[Run(0, 1)] * (_MOST_RUNS - len(header.runs))):
        runs += (run.length, run.width)
    body = _FRAME.pack(_MAGIC, FORMAT_VERSION, HEADER_BYTES) + _BODY.pack(
        header.fingerprint,
        header.parent,
        header.address,
        header.uid,
        header.parent_uid,
        header.depth,
        header.codec,
        len(header.runs),
        *runs,
        header.raw_bytes,
        header.stored_bytes,
        header.compute_s,
        header.checksum,
        header.tokens,
    )
    return body + checksum(body)


def decode_header(data: bytes, fingerprint: bytes, digest: Digest = blake2b) -> BlockHeader | Bad:
    """The header at the beginning of ``data``, of a block that belongs to ``fingerprint``."""
    if len(data) < _FRAME.size:
        return Bad("truncated")
    magic, version, length = _FRAME.unpack_from(data)
    if magic != _MAGIC:
        return Bad("not_a_block")
    if version != FORMAT_VERSION or length != HEADER_BYTES:
        return Bad("version")
    if len(data) < HEADER_BYTES:
        return Bad("truncated")
    body = data[: HEADER_BYTES - _CHECK_BYTES]
    if checksum(body) != data[len(body) : HEADER_BYTES]:
        return Bad("header_checksum")
    whose, parent, address, uid, parent_uid, depth, codec, run_count, *rest = _BODY.unpack_from(body, _FRAME.size)
    run_fields, (raw_bytes, stored_bytes, compute_s, check, tokens) = rest[: 2 * _MOST_RUNS], rest[2 * _MOST_RUNS :]
    if whose != fingerprint:
        return Bad("foreign")
    if child_address(parent, tokens, digest) != address:
        return Bad("address")
    if codec not in [known.value for known in Codec]:
        return Bad("codec")
    runs = tuple([Run(run_fields[2 * i], run_fields[2 * i + 1]) for i in range(min(run_count, _MOST_RUNS))])
    if (
        run_count > _MOST_RUNS
        or any([run.width < 1 for run in runs])
        or sum([run.length for run in runs]) != raw_bytes
        or stored_bytes > raw_bytes
    ):
        return Bad("length")
    return BlockHeader(
        fingerprint,
        parent,
        address,
        uid,
        parent_uid,
        depth,
        tokens,
        runs,
        Codec(codec),
        raw_bytes,
        stored_bytes,
        compute_s if math.isfinite(compute_s) and compute_s > 0 else 0.0,
        check,
    )


def decode_block(
    data: bytes, fingerprint: bytes, *, runs: tuple[Run, ...], digest: Digest = blake2b
) -> tuple[BlockHeader, Bytes] | Bad:
    """Header and unpacked bytes of a whole file, whose entries must be exactly ``runs``: planes of other widths would
    be put together to other bytes."""
    header = decode_header(data, fingerprint, digest)
    if isinstance(header, Bad):
        return header
    if header.runs != runs or len(data) > header.file_bytes:
        return Bad("length")
    if len(data) < header.file_bytes:
        return Bad("truncated")
    stored = np.frombuffer(data, np.uint8, offset=HEADER_BYTES)
    if checksum(stored.data) != header.checksum:
        return Bad("payload_checksum")
    raw = unpack(Payload(header.codec, stored, header.raw_bytes), header.runs)
    return Bad("codec") if raw is None else (header, raw)
