"""Answers that are no streams, and those that no server should send."""

from __future__ import annotations

import email.utils

import pytest

from headrace.bench.drive import client as client_module
from tests.bench.asking import WALL_S, ask, assert_after, assert_times_are_the_servers
from tests.bench.truth_answers import Chunk, Truth
from tests.bench.truth_server import TruthServer


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
