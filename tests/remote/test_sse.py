"""Events out of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.remote.sse import EventReader
from headrace.errors import RemoteFailure

payloads = st.lists(st.text(alphabet='abc{}" :,é', max_size=12), max_size=8)


def wire(events: list[str], end: str) -> bytes:
    return "".join(f"data: {event}{end}{end}" for event in events).encode()


@given(payloads, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 200), max_size=20))
def test_events_are_the_same_wherever_the_bytes_are_split(events: list[str], end: str, cuts: list[int]) -> None:
    """Any line end, any split: what was sent is what comes out."""
    data = wire(events, end)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader = EventReader()
    found = [event for low, high in zip(bounds, bounds[1:], strict=False) for event in reader.feed(data[low:high])]
    assert found + reader.finish() == [event.encode() for event in events]


@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_are_taken(data: bytes, step: int) -> None:
    """Junk is no crash."""
    reader = EventReader()
    for start in range(0, len(data), step):
        reader.feed(data[start : start + step])
    reader.finish()


def test_comments_and_other_fields_are_skipped_and_lines_joined() -> None:
    reader = EventReader()
    assert reader.feed(b": ping\n\nevent: x\nid: 1\ndata: a\ndata:b\n\n") == [b"a\nb"]


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 50, b"data: xxxxxxxxxxxxxxxx\n" * 3, b"y" * 50])
def test_an_event_beyond_the_limit_is_junk(piece: bytes) -> None:
    """Whether its bytes come in one line or many."""
    with pytest.raises(RemoteFailure, match="more than 40 bytes"):
        EventReader(max_event_bytes=40).feed(piece)
