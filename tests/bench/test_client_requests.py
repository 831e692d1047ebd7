"""What the client sends."""

from __future__ import annotations

import msgspec
import pytest

from headrace.bench.drive import client as client_module
from headrace.bench.requests.bodies import Wire
from headrace.errors import ConfigError
from tests.bench.asking import ask, client_of, closed_port, send, wire
from tests.bench.truth_answers import Truth
from tests.bench.truth_server import TruthServer


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
