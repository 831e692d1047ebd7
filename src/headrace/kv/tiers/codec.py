"""How a block's bytes are stored: as they are, or zstd over byte planes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np
import zstandard

from headrace.kv.tiers.planes import Bytes, Run, join, split

ZSTD_LEVEL: Final = 3


class Codec(enum.IntEnum):
    """The numbers are part of the block file's format."""

    RAW = 0
    ZSTD_PLANES = 1


@dataclass(frozen=True, slots=True, eq=False)
class Payload:
    """A block's KV as it is stored. ``raw_bytes`` is what it takes unpacked."""

    codec: Codec
    data: Bytes
    raw_bytes: int

    @property
    def stored_bytes(self) -> int:
        """What it takes as it is."""
        return len(self.data)


def pack(data: Bytes, codec: Codec, runs: tuple[Run, ...]) -> Payload:
    """``data`` in the form of ``codec``; as it is where packing does not make it smaller."""
    if codec is Codec.ZSTD_PLANES:
        packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(split(data, runs).data)
        if len(packed) < len(data):
            return Payload(codec, np.frombuffer(packed, np.uint8), len(data))
    return Payload(Codec.RAW, data, len(data))


def unpack(payload: Payload, runs: tuple[Run, ...]) -> Bytes | None:
    """The bytes that ``pack`` was given; None when ``payload`` is not what it says. Never makes more than
    ``raw_bytes`` of it."""
    if payload.codec is Codec.RAW:
        return payload.data if len(payload.data) == payload.raw_bytes else None
    try:
        # Asked first: the decompressor reserves what the frame says, however small the frame is.
        if zstandard.frame_content_size(payload.data.data) != payload.raw_bytes:
            return None
        planes = zstandard.ZstdDecompressor().decompress(payload.data.data, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError):
        return None
    if len(planes) != payload.raw_bytes:
        return None
    return join(np.frombuffer(planes, np.uint8), runs)
