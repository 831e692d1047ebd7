"""The frame around a stream's KV: rewritten for another number of streams, refused when it is not known."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.llama.stream_state import retarget

STREAMS = st.integers(1, 40)


def written(streams: int, stream: int, tokens: int, cells: bytes, *, prefix: bytes = b"ggsq\x03\0\0\0") -> bytearray:
    """A state as a context with ``streams`` streams writes it for one sequence (see the module's docstring)."""
    frame = bytearray(prefix) + struct.pack("<I", streams)
    for index in range(streams):
        frame += struct.pack("<I", tokens) + cells if index == stream else struct.pack("<I", 0)
    return frame


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, int, bytes]:
    source, target = draw(STREAMS), draw(STREAMS)
    return (
        source,
        draw(st.integers(0, source - 1)),
        target,
        draw(st.integers(1, 1 << 20)),
        draw(
            # The cells end as libllama's do, in arithmetic that is hardly ever zero, but may be.
            st.binary(min_size=1, max_size=64)
        ),
    )


@given(cases())
def test_it_is_what_the_target_would_have_written(case: tuple[int, int, int, int, bytes]) -> None:
    """Only the frame changes; the cells are untouched."""
    source, stream, target, tokens, cells = case
    data = written(source, stream, tokens, cells)
    moved = retarget(data, stream=stream, source_streams=source, target_streams=target, tokens=tokens)
    assert moved == written(target, 0, tokens, cells)


@given(cases())
def test_there_and_back_is_the_same(case: tuple[int, int, int, int, bytes]) -> None:
    """From ``source`` to ``target`` streams and back."""
    source, _, target, tokens, cells = case
    data = written(source, 0, tokens, cells)
    there = retarget(data, stream=0, source_streams=source, target_streams=target, tokens=tokens)
    assert there is not None
    assert retarget(there, stream=0, source_streams=target, target_streams=source, tokens=tokens) == data


@given(cases(), st.data())
def test_a_frame_that_is_not_exactly_the_expected_one_is_refused(
    case: tuple[int, int, int, int, bytes], data: st.DataObject
) -> None:
    """Other counts, another number of streams, a second stream with cells, bytes missing: None."""
    source, stream, target, tokens, cells = case
    good = written(source, stream, tokens, cells)

    def refused(state: bytearray, *, streams: int = source, count: int = tokens) -> bool:
        moved = retarget(state, stream=stream, source_streams=streams, target_streams=target, tokens=count)
        return moved is None

    assert refused(good, count=tokens + 1)
    assert refused(good, streams=source + 1)
    assert refused(good[: data.draw(st.integers(0, 12 + 4 * stream))])
    for other in range(source):
        if other < stream:
            at = 12 + 4 * other
            assert refused(good[:at] + b"\x01" + good[at + 1 :])
        elif other > stream:
            at = len(good) - 4 * (source - other)
            assert refused(good[:at] + b"\x01" + good[at + 1 :])


@given(st.binary(max_size=80), st.integers(0, 5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_any_bytes_are_refused_or_moved_but_never_raise(
    data: bytes, stream: int, extra: int, target: int, tokens: int
) -> None:
    """What it does not understand is not an error: the caller computes the tokens again."""
    moved = retarget(data, stream=stream, source_streams=stream + extra, target_streams=target, tokens=tokens)
    assert moved is None or moved[:8] == data[:8]


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_it_leaves_its_input_alone(kind: type[bytes] | type[bytearray]) -> None:
    """Pure: the bytes handed in are the caller's."""
    data = kind(written(3, 1, 5, b"cells"))
    copy = bytes(data)
    assert retarget(data, stream=1, source_streams=3, target_streams=2, tokens=5) is not None
    assert data == copy
