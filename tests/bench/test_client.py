"""One request against a server with known answers: every figure of the record is what the server did.

The clock error. Server and client read the same monotonic clock. The server notes the time just before it writes,
the client the time at which it was handed what arrived: so a client's time is never earlier than the server's. How
much later it may be is the scheduler's doing: on an idle machine 0.1 ms is seen (median), and on two cores with
other work a process waits for up to some ten milliseconds for its turn. So: MEDIAN_ERROR_NS for the median of
many, ANY_ERROR_NS for any single one.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

from headrace.bench.drive import client as client_module
from tests.bench.asking import ask, assert_after, assert_times_are_the_servers, client_of, send, wire
from tests.bench.truth_answers import Chunk, Truth
from tests.bench.truth_server import TruthServer

MEDIAN_ERROR_NS = 5_000_000


# Times


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_every_time_is_the_servers_within_the_clock_error(server: TruthServer, path: str) -> None:
    chunks = [Chunk(gap_ms=gap) for gap in (30, 1, 5, 12, 3, 40, 2, 9, 4, 7) * 4]
    asked = await ask(server, Truth(chunks=chunks, headers_delay_ms=15), path=path)
    record, told = asked.record, asked.told
    assert record.outcome == "ok"
    assert_times_are_the_servers(asked)
    assert_after(told.end_ns, record.end_ns)
    late_ns = [seen - true for true, seen in zip(told.chunk_ns, record.chunk_ns, strict=True)]
    assert statistics.median(late_ns) <= MEDIAN_ERROR_NS
    # The pauses as they were, which is what ITL and TPOT are made of.
    gap_errors_ns = [
        abs((record.chunk_ns[i] - record.chunk_ns[i - 1]) - (told.chunk_ns[i] - told.chunk_ns[i - 1]))
        for i in range(1, len(chunks))
    ]
    assert statistics.median(gap_errors_ns) <= MEDIAN_ERROR_NS


async def test_slow_headers_are_seen_as_such(server: TruthServer) -> None:
    asked = await ask(server, Truth(tokens=2, headers_delay_ms=120))
    assert_times_are_the_servers(asked)
    assert asked.record.headers_ns is not None
    assert asked.record.sent_ns is not None
    assert asked.record.headers_ns - asked.record.sent_ns >= 120_000_000


async def test_a_new_connection_is_counted_from_its_handshake_and_a_kept_one_from_its_write(
    server: TruthServer,
) -> None:
    async with client_of(server.url) as client:
        first = (await send(client, wire(Truth(key="new", tokens=1)))).record
        second = (await send(client, wire(Truth(key="kept", tokens=1)))).record
    new, kept = server.told("new"), server.told("kept")
    assert new.connection == kept.connection
    assert first.sent_ns is not None
    assert second.sent_ns is not None
    assert first.connected_ns is not None
    assert first.ready_ns <= first.sent_ns < first.connected_ns <= new.first_byte_ns
    assert second.connected_ns is None
    assert second.ready_ns <= second.sent_ns <= kept.first_byte_ns


async def test_chunks_in_several_reads_count_when_they_are_complete(server: TruthServer) -> None:
    # Cut inside the JSON, and inside the two bytes of "é": counted at its first part, a chunk would be 40 ms early.
    start = len(b'data: {"id":"truth-1","object":"chat.completion.chunk","choices":[{"index":0,"finish_reason":')
    text = "é" * 40
    cuts = list(range(start, start + 60, 7))
    chunks = [Chunk(text=text, split=cuts, pause_ms=5), Chunk(text="!", split=[1], pause_ms=40)]
    asked = await ask(server, Truth(chunks=chunks))
    assert asked.record.outcome == "ok"
    assert asked.text == text + "!"
    assert_times_are_the_servers(asked)


async def test_chunks_in_one_read_share_its_time(server: TruthServer) -> None:
    one = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    asked = await ask(server, Truth(chunks=[Chunk(kind="raw", text=one * 3, gap_ms=5), Chunk(gap_ms=20)]))
    times = asked.record.chunk_ns
    assert len(times) == 4
    assert times[0] == times[1] == times[2] < times[3]


async def test_events_with_other_line_ends_are_understood(server: TruthServer) -> None:
    one = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\r\n\r\n'
    asked = await ask(server, Truth(chunks=[Chunk(kind="raw", text=one, gap_ms=5)] * 2))
    assert asked.record.outcome == "ok"
    assert len(asked.record.chunk_ns) == 2


async def test_role_only_and_empty_deltas_and_comments_are_not_the_first_token(server: TruthServer) -> None:
    quiet: list[Any] = ["comment", "role", "empty", "comment"]
    chunks = [*(Chunk(kind=kind, gap_ms=10, tokens=0) for kind in quiet), Chunk(gap_ms=30), Chunk(kind="comment")]
    asked = await ask(server, Truth(chunks=chunks))
    assert len(asked.told.chunk_ns) == 1
    assert_times_are_the_servers(asked)


async def test_reasoning_and_tool_calls_are_tokens_like_others(server: TruthServer) -> None:
    chunks = [Chunk(kind="reasoning", gap_ms=5), Chunk(kind="tool", gap_ms=5), Chunk(gap_ms=5)]
    asked = await ask(server, Truth(chunks=chunks))
    assert len(asked.record.chunk_ns) == 3
    assert_times_are_the_servers(asked)


# Token counts


async def test_several_tokens_in_a_chunk_are_counted_by_the_server_not_by_chunks(server: TruthServer) -> None:
    chunks = [Chunk(tokens=tokens, gap_ms=2) for tokens in (3, 1, 4, 1, 5)]
    asked = await ask(server, Truth(chunks=chunks, usage="each"))
    assert asked.record.chunk_tokens == [3, 1, 4, 1, 5]
    assert asked.record.output_tokens == asked.told.tokens == 14
    assert_times_are_the_servers(asked)


@pytest.mark.parametrize("usage", ["end", "first", "with_last", "after_done"])
async def test_usage_counts_wherever_it_comes(server: TruthServer, usage: Any) -> None:
    chunks = [Chunk(tokens=3), Chunk(tokens=4)]
    record = (await ask(server, Truth(chunks=chunks, usage=usage, stay_open_ms=60))).record
    assert (record.outcome, record.usage_seen) == ("ok", True)
    assert (record.output_tokens, record.prompt_tokens, record.cached_tokens) == (7, 7, 3)
    assert record.chunk_tokens == []


async def test_without_usage_the_chunks_are_counted_and_the_record_says_so(server: TruthServer) -> None:
    record = (await ask(server, Truth(tokens=12, tokens_per_chunk=4, usage="never"))).record
    assert (record.outcome, record.usage_seen, record.output_tokens) == ("ok", False, 3)
    assert record.prompt_tokens is None


async def test_what_was_planned_and_what_the_answer_names_are_in_the_record(server: TruthServer) -> None:
    truth = Truth(tokens=2, headers={"x-headrace-lane": "batch", "x-request-id": "r-9"})
    record = (await ask(server, truth)).record
    assert (record.index, record.class_name, record.lane, record.session) == (3, "chat", "live", "s-1")
    assert (record.turn, record.user, record.input_tokens, record.wanted_output_tokens) == (2, 4, 11, 5)
    assert (record.status, record.finish_reason, record.error) == (200, "stop", None)
    assert (record.served_lane, record.request_id) == ("batch", "r-9")
    assert (await ask(server, Truth(tokens=2))).record.request_id == "truth-1"


# The end of a stream


async def test_a_stream_that_stays_open_after_done_ended_at_done(
    server: TruthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "AFTER_DONE_S", 0.2)
    began_ns = time.monotonic_ns()
    asked = await ask(server, Truth(tokens=2, stay_open_ms=5000))
    assert time.monotonic_ns() - began_ns < 4_000_000_000
    record = asked.record
    assert record.outcome == "ok"
    assert record.end_ns is not None
    assert_after(asked.told.chunk_ns[-1], record.end_ns)  # [DONE] follows the last chunk at once


@pytest.mark.parametrize(
    ("finish", "done", "outcome"),
    [(True, True, "ok"), (True, False, "ok"), (False, True, "ok"), (False, False, "cut")],
)
@pytest.mark.parametrize("chunked", [True, False])
async def test_whole_is_what_has_a_finish_reason_or_done(
    server: TruthServer, finish: bool, done: bool, outcome: str, chunked: bool
) -> None:
    record = (await ask(server, Truth(tokens=2, finish=finish, done=done, chunked=chunked))).record
    assert record.outcome == outcome
    assert record.output_tokens == 2


@pytest.mark.parametrize("end", ["close", "rst"])
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_stream_cut_in_the_middle_keeps_what_came(server: TruthServer, end: Any, chunked: bool) -> None:
    chunks = [Chunk(gap_ms=10) for _ in range(3)]
    # What a reset overtakes is lost, so the last chunk has time to arrive.
    chunks.append(Chunk(kind="comment", gap_ms=50))
    asked = await ask(server, Truth(chunks=chunks, end=end, chunked=chunked))
    record = asked.record
    assert (record.outcome, record.status, record.output_tokens) == ("cut", 200, 3)
    assert record.error
    assert_times_are_the_servers(asked)
    assert_after(asked.told.end_ns, record.end_ns)


async def test_a_stream_cut_inside_an_event_does_not_count_it(server: TruthServer) -> None:
    half = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}'
    asked = await ask(server, Truth(chunks=[Chunk(), Chunk(kind="raw", text=half)], end="close", chunked=False))
    assert (asked.record.outcome, len(asked.record.chunk_ns)) == ("cut", 1)
    assert asked.record.error == "the stream ended inside an event"


async def test_a_stalled_server_is_a_timeout_with_what_came_before(server: TruthServer) -> None:
    asked = await ask(server, Truth(tokens=2, end="stall"), timeout_s=0.3)
    record = asked.record
    assert (record.outcome, record.output_tokens) == ("timeout", 2)
    assert record.error == "the request took more than 0.3 s"
    assert_times_are_the_servers(asked)
    assert record.end_ns is not None
    assert_after(record.ready_ns + 300_000_000, record.end_ns)


async def test_a_server_that_never_answers_is_a_timeout(server: TruthServer) -> None:
    record = (await ask(server, Truth(headers_delay_ms=60_000), timeout_s=0.2)).record
    assert (record.outcome, record.status, record.headers_ns) == ("timeout", None, None)


@pytest.mark.parametrize(
    ("kind", "text"), [("error", "out of memory"), ("error_event", "out of memory"), ("broken", None)]
)
async def test_an_error_in_the_stream_is_an_error_with_its_message(
    server: TruthServer, kind: Any, text: str | None
) -> None:
    asked = await ask(server, Truth(chunks=[Chunk(), Chunk(kind=kind, text="out of memory", gap_ms=5)]))
    record = asked.record
    assert (record.outcome, record.status, len(record.chunk_ns)) == ("error", 200, 1)
    assert record.error == text if text else "not OpenAI's" in (record.error or "")
