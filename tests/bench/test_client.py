"""One request against a server with known answers: every figure of the record is what the server did.

The clock error. Server and client read the same monotonic clock. The server notes the time just before it writes,
the client the time at which it was handed what arrived: so a client's time is never earlier than the server's. How
much later it may be is the scheduler's doing: on an idle machine 0.1 ms is seen (median), and on two cores with
other work a process waits for up to some ten milliseconds for its turn. So: MEDIAN_ERROR_NS for the median of
many, ANY_ERROR_NS for any single one.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import resource
import shutil
import socket
import ssl
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bench.drive import client as client_module
from headrace.bench.drive.client import Client, ClientSettings, Sent
from headrace.bench.drive.send_times import Attempt, Resent
from headrace.bench.drive.target import api_key, parse_target
from headrace.bench.planned import PlannedRequest
from headrace.bench.records import GENERATOR_FAULT, RequestRecord
from headrace.bench.requests.bodies import Wire
from headrace.errors import ConfigError
from tests.bench.truth_server import Chunk, Told, Truth, TruthServer

MEDIAN_ERROR_NS = 5_000_000
ANY_ERROR_NS = 100_000_000

PLANNED = PlannedRequest(
    index=3,
    class_name="chat",
    input_tokens=11,
    output_tokens=5,
    lane="live",
    session="s-1",
    turn=2,
    user=4,
)
WALL_S = 1_700_000_000.0


@pytest.fixture(scope="module")
def server() -> Iterator[TruthServer]:
    one = TruthServer()
    yield one
    one.close()


@contextlib.asynccontextmanager
async def client_of(url: str, *, key: str | None = None, **settings: Any) -> AsyncIterator[Client]:
    async with Client(
        parse_target(url),
        ClientSettings(**settings),
        api_key=key,
        clock=time.monotonic_ns,
        wall_clock=lambda: WALL_S,
    ) as client:
        yield client


def wire(truth: Truth | None = None, path: str = "/v1/chat/completions", **fields: Any) -> Wire:
    body = {"model": "truth", "stream": True, **fields}
    if truth is not None:
        body["truth"] = truth
    return Wire(path, {"content-type": "application/json"}, msgspec.json.encode(body))


async def send(client: Client, request: Wire, *, keep_text: bool = False) -> Sent:
    now_ns = time.monotonic_ns()
    return await client.send(PLANNED, request, due_ns=now_ns, ready_ns=now_ns, keep_text=keep_text)


_keys = iter(range(1_000_000))


async def ask(server: TruthServer, truth: Truth, *, path: str = "/v1/chat/completions", **settings: Any) -> Asked:
    """One request on a connection of its own."""
    truth.key = f"k{next(_keys)}"
    stream = settings.pop("stream", True)
    async with client_of(server.url, **settings) as client:
        sent = await send(client, wire(truth, path, stream=stream), keep_text=True)
    return Asked(sent, server.told(truth.key))


class Asked:
    """What the client says and what the server knows."""

    def __init__(self, sent: Sent, told: Told) -> None:
        self.record: RequestRecord = sent.record
        self.text = sent.text
        self.told = told


def assert_after(told_ns: int, seen_ns: int | None) -> None:
    assert seen_ns is not None
    assert told_ns <= seen_ns <= told_ns + ANY_ERROR_NS


def assert_times_are_the_servers(asked: Asked) -> None:
    record, told = asked.record, asked.told
    assert record.sent_ns is not None
    assert record.ready_ns <= record.sent_ns <= told.first_byte_ns
    assert told.first_byte_ns - record.sent_ns <= ANY_ERROR_NS
    assert_after(told.headers_ns, record.headers_ns)
    assert len(record.chunk_ns) == len(told.chunk_ns)
    for told_ns, seen_ns in zip(told.chunk_ns, record.chunk_ns, strict=True):
        assert_after(told_ns, seen_ns)
    assert record.first_ns == (record.chunk_ns[0] if record.chunk_ns else None)


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


# Answers that are no streams


async def test_a_whole_answer_is_one_chunk_when_its_last_byte_has_come(server: TruthServer) -> None:
    asked = await ask(server, Truth(tokens=6, body_gap_ms=60), stream=False)
    record = asked.record
    assert (record.outcome, record.output_tokens, record.chunk_tokens) == ("ok", 6, [6])
    assert_times_are_the_servers(asked)
    assert_after(asked.told.headers_ns, record.headers_ns)
    assert asked.text == "word " * 6


@pytest.mark.parametrize("body", ["<html>welcome</html>", "", "{}", '{"choices": []}'])
async def test_a_body_that_is_no_answer_is_an_error(server: TruthServer, body: str) -> None:
    record = (await ask(server, Truth(body=body))).record
    assert (record.outcome, record.status, record.first_ns) == ("error", 200, None)


@pytest.mark.parametrize(
    ("status", "headers", "outcome", "retry_after_s"),
    [
        (400, {}, "rejected", None),
        (404, {}, "rejected", None),
        (422, {"Retry-After": "3"}, "rejected", 3.0),
        (429, {}, "shed", None),
        (429, {"Retry-After": "1.5"}, "shed", 1.5),
        (429, {"Retry-After": email.utils.formatdate(WALL_S + 90, usegmt=True)}, "shed", 90.0),
        (429, {"Retry-After": "soon"}, "shed", None),
        (503, {}, "http_error", None),
        (503, {"Retry-After": "2"}, "shed", 2.0),
        (500, {"Retry-After": "2"}, "http_error", 2.0),
        (502, {}, "http_error", None),
        (307, {"Location": "/v1/chat/completions"}, "http_error", None),
    ],
)
async def test_a_refusal_is_classified_and_keeps_its_message(
    server: TruthServer, status: int, headers: dict[str, str], outcome: str, retry_after_s: float | None
) -> None:
    before = server.counts()["requests"]
    body = '{"error": {"message": "not today", "type": "x"}}'
    asked = await ask(server, Truth(status=status, headers=headers, body=body, headers_delay_ms=5))
    record = asked.record
    assert (record.outcome, record.status, record.retry_after_s) == (outcome, status, retry_after_s)
    assert (record.error, record.first_ns, record.output_tokens) == ("not today", None, 0)
    assert_after(asked.told.headers_ns, record.headers_ns)
    assert record.end_ns is not None
    assert server.counts()["requests"] == before + 1  # nothing is followed, nothing is tried again


# No connection


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_closed_port_is_refused() -> None:
    async with client_of(f"http://127.0.0.1:{closed_port()}") as client:
        record = (await send(client, wire())).record
    assert (record.outcome, record.status, record.headers_ns, record.connected_ns) == ("refused", None, None, None)
    assert record.sent_ns is not None
    assert record.end_ns is not None
    assert "Connect call failed" in (record.error or "")


async def test_a_connection_that_does_not_come_about_is_a_timeout() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        # The backlog is full after this; further handshakes are not answered.
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listening.getsockname())
        async with client_of(f"http://127.0.0.1:{listening.getsockname()[1]}", connect_timeout_s=0.2) as client:
            record = (await send(client, wire())).record
    assert (record.outcome, record.connected_ns) == ("timeout", None)
    assert record.error == "connecting took more than 0.2 s"


async def test_no_file_descriptor_left_is_the_generators_fault(server: TruthServer) -> None:
    async with client_of(server.url) as client:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as probe:
            lowest_free = probe.fileno()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            record = (await send(client, wire())).record
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert record.outcome == "refused"
    assert (record.error or "").startswith(GENERATOR_FAULT)


@contextlib.asynccontextmanager
async def raw_server(answer: bytes, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Answers everything with these bytes and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()


async def test_an_answer_that_is_not_http_is_an_error() -> None:
    async with raw_server(b"SSH-2.0-hello\r\n\r\n") as port, client_of(f"http://127.0.0.1:{port}") as client:
        record = (await send(client, wire())).record
    assert record.outcome == "error"
    assert (record.error or "").startswith("the answer is none")


# Nothing twice


async def test_a_kept_connection_that_dies_is_cut_and_its_request_not_repeated(server: TruthServer) -> None:
    async with client_of(server.url) as client:
        assert (await send(client, wire(Truth(key="alive", tokens=1)))).record.outcome == "ok"
        before = server.counts()["requests"]
        record = (await send(client, wire(Truth(key="dies", end="silent")))).record
        after = server.counts()["requests"]
    assert server.told("alive").connection == server.told("dies").connection
    assert (record.outcome, record.connected_ns, record.status) == ("cut", None, None)
    assert after == before + 1


def test_a_second_attempt_is_stopped() -> None:
    attempt = Attempt(client_module.new_record(PLANNED, 0, 0), iter([5, 9]).__next__, 0)
    attempt.take_connection(new=False)
    with pytest.raises(Resent):
        attempt.take_connection(new=True)


async def test_the_run_s_end_cancels_and_keeps_what_came(server: TruthServer) -> None:
    async with client_of(server.url) as client:
        task = asyncio.ensure_future(send(client, wire(Truth(key="cancelled", tokens=3, end="stall"))))
        while client.chunks_seen < 3:
            await asyncio.sleep(0.005)
        task.cancel()
        record = (await task).record
    assert (record.outcome, record.output_tokens, record.status) == ("cancelled", 3, 200)
    assert record.end_ns is not None


# What goes out


async def test_bodies_arrive_whole_whatever_their_size(server: TruthServer) -> None:
    for size in (0, 1000, 3_000_000):
        async with client_of(server.url) as client:
            request = wire(Truth(key=f"size-{size}", tokens=1), prompt="x" * size)
            assert (await send(client, request)).record.outcome == "ok"
        assert server.told(f"size-{size}").body == request.body.decode()


async def test_a_request_without_a_body_goes_out_as_such(server: TruthServer) -> None:
    async with client_of(server.url) as client:
        record = (await send(client, Wire("/v1/chat/completions", {}, b""))).record
    assert (record.outcome, record.status) == ("rejected", 400)
    assert record.sent_ns is not None


async def test_the_key_is_sent_and_is_in_no_record(server: TruthServer) -> None:
    key = "sk-very-secret-1234"
    body = msgspec.json.encode({"error": {"message": f"Incorrect API key provided: {key}."}}).decode()
    async with client_of(server.url, key=key) as client:
        record = (await send(client, wire(Truth(key="with-key", status=401, body=body)))).record
    assert server.told("with-key").headers["authorization"] == f"Bearer {key}"
    assert record.error == "Incorrect API key provided: ***."
    assert key.encode() not in msgspec.json.encode(record)


async def test_no_key_means_no_authorization(server: TruthServer) -> None:
    asked = await ask(server, Truth(tokens=1))
    assert "authorization" not in asked.told.headers


async def test_a_question_before_the_run(server: TruthServer) -> None:
    async with client_of(server.url) as client:
        status, answer = await client.post_json("/v1/chat/completions", {"stream": False, "max_tokens": 1})
        assert status == 200
        assert isinstance(answer, dict)
        assert answer["usage"]["completion_tokens"] == 1
        assert await client.post_json("/v1/x", {"truth": {"status": 404, "body": "no"}}) == (404, None)
    async with client_of(f"http://127.0.0.1:{closed_port()}") as client:
        with pytest.raises(ConfigError, match="does not answer"):
            await client.post_json("/tokenize", {})


async def test_an_answer_without_end_to_a_question_is_cut_off(
    server: TruthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_QUESTION_BYTES", 1000)
    async with client_of(server.url) as client:
        with pytest.raises(ConfigError, match="/v1/x answers with more than 1000 bytes"):
            await client.post_json("/v1/x", {"truth": {"status": 200, "body": "x" * 2000}})


async def test_a_question_waits_less_long_than_a_request(server: TruthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_QUESTION_S", 0.2)
    async with client_of(server.url) as client:
        with pytest.raises(ConfigError, match=r"does not answer: not within 0\.2 s"):
            await client.post_json("/v1/x", {"truth": {"headers_delay_ms": 60_000}})


# Servers that send what no server should


async def test_a_usage_that_cannot_be_is_none_and_noted(server: TruthServer) -> None:
    raw = 'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\n'
    for count in (2**70, -41, 100_000):
        chunks = [Chunk(), Chunk(kind="raw", text=raw % count)]
        record = (await ask(server, Truth(chunks=chunks, usage="never"))).record
        assert (record.outcome, record.usage_seen, record.output_tokens) == ("ok", False, 1)
        assert (record.prompt_tokens, record.chunk_tokens) == (None, [])
        assert "completion_tokens" in str(record.note)


async def test_long_texts_of_the_server_are_shortened(server: TruthServer) -> None:
    raw = 'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"%s"}]}\n\n' % ("y" * 4000)
    headers = {"x-request-id": "r" * 4000, "x-headrace-lane": "l" * 4000}
    truth = Truth(chunks=[Chunk(kind="raw", text=raw)], headers=headers, finish=False)
    record = (await ask(server, truth)).record
    assert record.outcome == "ok"
    for text in (record.request_id, record.served_lane, record.finish_reason):
        assert len(text or "") == 300


def test_what_a_record_keeps_of_a_header_can_be_written() -> None:
    assert client_module._kept("a\udcff") == "a?"
    assert client_module._kept(None) is None


# https


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody trusts, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "cert.pem", folder / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=t -out {paths[0]} -keyout {paths[1]}"
    subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return paths


WHOLE_ANSWER = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'
HTTP_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(WHOLE_ANSWER) + WHOLE_ANSWER


async def test_https_trusts_whom_the_system_trusts_and_nobody_else(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # the server sees a broken handshake
    async with raw_server(HTTP_ANSWER, context) as port:
        async with client_of(f"https://127.0.0.1:{port}/v1") as client:
            record = (await send(client, wire())).record
        assert record.outcome == "refused"
        assert "certificate" in (record.error or "").lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        async with client_of(f"https://127.0.0.1:{port}/v1") as client:
            assert (await send(client, wire())).record.outcome == "ok"


# The target


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/models"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/models"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/models"),
        (" http://127.0.0.1:8000/v1/ ", "http://127.0.0.1:8000/v1/models"),
        ("https://api.example.com", "https://api.example.com/v1/models"),
        ("https://api.example.com/openai/v1", "https://api.example.com/openai/v1/models"),
        ("http://[::1]:8000", "http://[::1]:8000/v1/models"),
    ],
)
def test_a_target_is_a_base_url_with_or_without_v1(text: str, url: str) -> None:
    assert str(parse_target(text).url("/v1/models")) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:8000",
        "localhost",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host/v1?key=1",
        "http://host/#a",
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--target: "):
        parse_target(text)


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_target("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


async def test_a_host_without_an_address_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    with pytest.raises(ConfigError, match=r"--target: 'nowhere' is not found: Name or service not known"):
        async with client_of("http://nowhere:1"):
            pass


async def test_a_name_is_looked_up_once(server: TruthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    look_up: Callable[..., Any] = loop.getaddrinfo
    asked: list[str] = []

    async def counting(host: str, *rest: Any, **named: Any) -> Any:
        asked.append(host)
        return await look_up(host, *rest, **named)

    monkeypatch.setattr(loop, "getaddrinfo", counting)
    async with client_of(f"http://localhost:{server.port}") as client:
        sent = await asyncio.gather(*(send(client, wire(Truth(tokens=1))) for _ in range(5)))
    assert [one.record.outcome for one in sent] == ["ok"] * 5
    assert asked.count("localhost") == 1


def test_the_key_comes_from_the_environment() -> None:
    assert api_key({"OPENAI_API_KEY": " sk-1 "}) == "sk-1"
    assert api_key({}) is None
    assert api_key({"MY_KEY": "k"}, "MY_KEY", required=True) == "k"
    with pytest.raises(ConfigError, match="the environment has no MY_KEY"):
        api_key({}, "MY_KEY", required=True)
    with pytest.raises(ConfigError) as caught:
        api_key({"MY_KEY": "line\nbreak"}, "MY_KEY")
    assert "break" not in str(caught.value)
