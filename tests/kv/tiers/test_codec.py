"""Planes and codecs lose nothing, and refuse what they did not make; the choice follows the numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.tiers.codec import Codec, Payload, pack, unpack
from headrace.kv.tiers.codec_choice import CodecSpeed, choose_codec, measure_codecs, sample
from headrace.kv.tiers.planes import Bytes, Run, join, split

RAW = CodecSpeed(Codec.RAW, 1.0, float("inf"), float("inf"))
ZSTD = CodecSpeed(Codec.ZSTD_PLANES, 0.85, 500e6, 600e6)
GPU_S, CPU_S = 2e-9, 1e-7
"""Computing a byte of KV: a fast accelerator, a small model on two cores."""


@st.composite
def data_in_runs(draw: st.DrawFn) -> tuple[Bytes, tuple[Run, ...]]:
    runs = tuple(
        [
            Run(draw(st.integers(0, 80)), draw(st.sampled_from([1, 2, 4, 18, 34])))
            for _ in range(draw(st.integers(1, 4)))
        ]
    )
    size = sum([run.length for run in runs])
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8), runs


@given(data_in_runs())
def test_planes_are_joined_to_what_they_were(case: tuple[Bytes, tuple[Run, ...]]) -> None:
    """Whatever the widths, with incomplete entries at the ends of runs."""
    data, runs = case
    assert join(split(data, runs), runs).tobytes() == data.tobytes()


def test_planes_put_equal_places_together() -> None:
    """First all low bytes, then all high ones."""
    data = np.arange(3, dtype="<u2").view(np.uint8)
    assert split(data, (Run(6, 2),)).tolist() == [0, 1, 2, 0, 0, 0]


def test_runs_that_do_not_cover_the_data_are_an_error() -> None:
    """Neither too long nor too short."""
    for runs in ((Run(5, 2),), (Run(7, 2),), (Run(6, 0),)):
        with pytest.raises(ValueError, match="cover"):
            split(np.zeros(6, np.uint8), runs)


@given(data_in_runs(), st.sampled_from(list(Codec)))
def test_what_was_packed_is_unpacked(case: tuple[Bytes, tuple[Run, ...]], codec: Codec) -> None:
    """Whether packing pays or not."""
    data, runs = case
    payload = pack(data, codec, runs)
    assert payload.stored_bytes <= len(data)
    raw = unpack(payload, runs)
    assert raw is not None and raw.tobytes() == data.tobytes()


@given(st.binary(max_size=200), st.sampled_from(list(Codec)), st.integers(0, 1 << 40))
def test_bytes_that_are_no_packed_block_are_refused(data: bytes, codec: Codec, raw_bytes: int) -> None:
    """No exception, and no more memory than a block takes, whatever a frame claims."""
    raw = unpack(Payload(codec, np.frombuffer(data, np.uint8), raw_bytes), (Run(raw_bytes, 2),))
    assert raw is None or len(raw) == raw_bytes


def test_planes_make_f16_kv_smaller() -> None:
    """By about a seventh; as it is, it hardly packs."""
    data, runs = sample(np.random.default_rng(1))
    assert pack(data, Codec.ZSTD_PLANES, runs).stored_bytes < 0.88 * len(data)
    assert pack(data, Codec.ZSTD_PLANES, (Run(len(data), 1),)).stored_bytes > 0.9 * len(data)


def test_auto_packs_where_computing_is_slow() -> None:
    """A stored byte saves more when it is a packed one, in RAM and on any disk."""
    for disk in (float("inf"), 2e9, 1e8):
        assert choose_codec("auto", [RAW, ZSTD], tier_bytes_per_s=disk, compute_s_per_byte=CPU_S) is Codec.ZSTD_PLANES


def test_auto_does_not_pack_where_computing_is_as_fast_as_unpacking() -> None:
    """Then unpacking eats what loading saves, and packing could not keep up."""
    assert choose_codec("auto", [RAW, ZSTD], tier_bytes_per_s=2e9, compute_s_per_byte=GPU_S) is Codec.RAW


def test_auto_does_not_pack_what_it_could_not_pack_in_time() -> None:
    """KV is made faster than it is packed."""
    slow = CodecSpeed(Codec.ZSTD_PLANES, 0.5, 0.9 / CPU_S, 1e12)
    fast = CodecSpeed(Codec.ZSTD_PLANES, 0.5, 1.1 / CPU_S, 1e12)
    assert choose_codec("auto", [RAW, slow], tier_bytes_per_s=1e9, compute_s_per_byte=CPU_S) is Codec.RAW
    assert choose_codec("auto", [RAW, fast], tier_bytes_per_s=1e9, compute_s_per_byte=CPU_S) is Codec.ZSTD_PLANES


def test_a_rule_is_followed_and_auto_packs_before_anything_is_measured() -> None:
    """What an operator says goes before what was measured."""
    assert choose_codec("zstd", [RAW, ZSTD], tier_bytes_per_s=2e9, compute_s_per_byte=GPU_S) is Codec.ZSTD_PLANES
    assert choose_codec("none", [RAW, ZSTD], tier_bytes_per_s=1e8, compute_s_per_byte=CPU_S) is Codec.RAW
    assert choose_codec("auto", [], tier_bytes_per_s=1e8, compute_s_per_byte=0.0) is Codec.ZSTD_PLANES


def test_speeds_are_measured_on_the_clock_that_is_handed_in() -> None:
    """One tick to pack, one to unpack."""
    ticks = iter([0.0, 2.0, 3.0])
    data, runs = sample(np.random.default_rng(0))
    _, zstd = measure_codecs(data, runs, lambda: next(ticks))
    assert (zstd.pack_bytes_per_s, zstd.unpack_bytes_per_s) == (len(data) / 2, len(data))
