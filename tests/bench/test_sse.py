"""The event parser: the same events however the network cuts the bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.drive.sse import EventTooLarge, SseEvent, SseParser

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
EVENTS = st.lists(st.tuples(st.sampled_from(["", "error", "ping"]), st.lists(TEXT, min_size=1, max_size=3)), max_size=6)


def parse(*reads: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [event for data in reads for event in parser.feed(data)]


def message(data: str) -> SseEvent:
    return SseEvent("message", data.encode())


@given(EVENTS, LINE_ENDS, st.booleans(), st.data())
def test_any_cut_of_the_bytes_gives_the_events_that_were_sent(
    events: list[tuple[str, list[str]]], end: bytes, comments: bool, draw: st.DataObject
) -> None:
    stream = b""
    for kind, lines in events:
        if comments:
            stream += b": keep-alive" + end + end
        if kind:
            stream += b"event: " + kind.encode() + end
        stream += b"".join(b"data: " + line.encode() + end for line in lines) + end
    edges = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reads = [stream[start:stop] for start, stop in pairwise([0, *edges, len(stream)])]
    assert parse(*reads) == [SseEvent(kind or "message", "\n".join(lines).encode()) for kind, lines in events]


def test_an_event_counts_at_the_read_that_brings_its_empty_line() -> None:
    parser = SseParser()
    assert parser.feed(b'data: {"a"') == []
    assert parser.feed(b": 1}\n") == []
    assert parser.pending
    assert parser.feed(b"\ndata: 2\n\ndata: 3") == [message('{"a": 1}'), message("2")]
    assert parser.pending
    assert parser.feed(b"\n\n") == [message("3")]
    assert not parser.pending


def test_a_lone_carriage_return_ends_an_event_at_once_and_its_line_feed_is_not_another_line() -> None:
    parser = SseParser()
    assert parser.feed(b"data: 1\r\n\r") == [message("1")]
    assert parser.feed(b"\ndata: 2\r\n\r\n") == [message("2")]


def test_a_character_cut_in_two_stays_whole() -> None:
    stream = "data: 語\n\n".encode()
    cut = stream.index("語".encode()) + 1
    assert parse(stream[:cut], stream[cut:]) == [message("語")]


def test_only_one_blank_after_the_colon_is_left_out() -> None:
    assert parse(b"data:x\n\n", b"data:  y\n\n", b"data\n\n") == [message("x"), message(" y"), message("")]


def test_what_carries_no_data_is_no_event() -> None:
    assert parse(b": comment\n\n", b"id: 7\nretry: 100\nevent: ping\n\n", b"\n\n\n", b"data: 1\n\n") == [message("1")]


def test_a_byte_order_mark_before_the_stream_is_left_out() -> None:
    assert parse(b"\xef\xbb", b"\xbfdata: 1\n\n") == [message("1")]


def test_the_error_field_of_older_llama_server_is_an_error_event() -> None:
    assert parse(b'error: {"message": "full"}\n\n') == [SseEvent("error", b'{"message": "full"}')]


def test_an_unfinished_event_at_the_end_is_pending_and_no_event() -> None:
    parser = SseParser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.pending


def test_a_stream_without_ends_is_given_up() -> None:
    parser = SseParser(max_event_bytes=1000)
    with pytest.raises(EventTooLarge):
        for _ in range(3):
            parser.feed(b"x" * 400)


def test_many_pieces_of_one_line_count_once() -> None:
    parser = SseParser(max_event_bytes=1000)
    line = b"data: " + b"x" * 900
    assert [event for at in range(0, len(line), 7) for event in parser.feed(line[at : at + 7])] == []
    assert parser.feed(b"\n\n") == [message("x" * 900)]


def test_a_long_stream_of_short_events_is_not_too_large() -> None:
    parser = SseParser(max_event_bytes=1000)
    assert sum(len(parser.feed(b"data: " + b"x" * 90 + b"\n\n")) for _ in range(100)) == 100
