"""Whether blocks of a tier are packed: by what was measured here, not by habit.

Packing makes a tier hold more and, on disk, read less; unpacking takes time. What counts is the time that a stored byte
saves:

    (time to compute the block - time to read and unpack it) / bytes that it is stored in

The codec with the most of it is taken, among those that pack faster than the model makes KV (else blocks would be
dropped for want of time) and load faster than the model computes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from headrace.kv.tiers.codec import Codec, pack, unpack
from headrace.kv.tiers.codec_rule import CodecRule
from headrace.kv.tiers.planes import Bytes, Run

SAMPLE_BYTES: Final = 4 << 20
_DISK_SAMPLE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """What a codec did with a sample. ``ratio`` is stored bytes over raw ones; speeds are of raw bytes."""

    codec: Codec
    ratio: float
    pack_bytes_per_s: float
    unpack_bytes_per_s: float

    def load_s_per_byte(self, tier_bytes_per_s: float) -> float:
        """Reading and unpacking one raw byte."""
        return self.ratio / tier_bytes_per_s + 1 / self.unpack_bytes_per_s


def choose_codec(
    rule: CodecRule, speeds: Sequence[CodecSpeed], *, tier_bytes_per_s: float, compute_s_per_byte: float
) -> Codec:
    """The codec for a tier that is read at ``tier_bytes_per_s`` (infinite for RAM), on a machine that computes a byte
    of KV in ``compute_s_per_byte``. Without ``speeds``, nothing having been measured yet, ``auto`` packs."""
    if rule == "none":
        return Codec.RAW
    if rule == "zstd" or not speeds:
        return Codec.ZSTD_PLANES
    best, best_gain = Codec.RAW, -float("inf")
    for speed in speeds:
        gain_s = compute_s_per_byte - speed.load_s_per_byte(tier_bytes_per_s)
        keeps_up = speed.codec is Codec.RAW or speed.pack_bytes_per_s * compute_s_per_byte > 1
        if keeps_up and gain_s / speed.ratio > best_gain:
            best, best_gain = speed.codec, gain_s / speed.ratio
    return best


def sample(random: np.random.Generator) -> tuple[Bytes, tuple[Run, ...]]:
    """Bytes that pack like F16 KV: normally distributed numbers."""
    data = random.standard_normal(SAMPLE_BYTES // 2).astype(np.float16).view(np.uint8)
    return data, (Run(len(data), 2),)


def measure_codecs(
    data: Bytes, runs: tuple[Run, ...], clock: Callable[[], float] = time.thread_time
) -> tuple[CodecSpeed, ...]:
    """Pack and unpack ``data`` with every codec. ``clock`` is the thread's own time: it runs only when nothing else
    does, and what it waited is no property of a codec."""
    speeds = [CodecSpeed(Codec.RAW, 1.0, float("inf"), float("inf"))]
    started_s = clock()
    payload = pack(data, Codec.ZSTD_PLANES, runs)
    packed_s = clock()
    unpack(payload, runs)
    unpacked_s = clock()
    if payload.codec is Codec.ZSTD_PLANES:
        speeds.append(
            CodecSpeed(
                payload.codec,
                payload.stored_bytes / len(data),
                len(data) / max(1e-9, packed_s - started_s),
                len(data) / max(1e-9, unpacked_s - packed_s),
            )
        )
    return tuple(speeds)


def measure_disk(folder: Path, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Bytes a second at which a file that is not in the system's cache is read from ``folder``; None when it cannot be
    tried, as on a full disk."""
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=folder, prefix="speed-") as file:
        file.write(os.urandom(_DISK_SAMPLE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started_s = clock()
        file.seek(0)
        if len(file.read()) == _DISK_SAMPLE_BYTES:
            return _DISK_SAMPLE_BYTES / max(1e-9, clock() - started_s)
    return None


@dataclass(slots=True)
class Codecs:
    """What was measured here, and what it says. ``compute_s_per_byte`` is what the model was last seen to take."""

    rule: CodecRule
    speeds: tuple[CodecSpeed, ...] = ()
    disk_bytes_per_s: float | None = None
    compute_s_per_byte: float = 0.0

    def for_ram(self) -> Codec:
        """How blocks in RAM are packed, if they are."""
        return self._choose(float("inf"))

    def for_disk(self) -> Codec:
        """How files are."""
        return self._choose(self.disk_bytes_per_s or float("inf"))

    def _choose(self, tier_bytes_per_s: float) -> Codec:
        return choose_codec(
            self.rule, self.speeds, tier_bytes_per_s=tier_bytes_per_s, compute_s_per_byte=self.compute_s_per_byte
        )
