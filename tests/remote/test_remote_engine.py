"""An engine over HTTP, against a real server that does what servers do at their worst."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from benchmarks.programmable_engine import EngineProcess
from headrace.engines.remote.engine import RemoteEngine
from headrace.errors import RemoteFailure
from headrace.messages.engine import SamplingParams, SequenceOutput, Submit, WireRequest

_numbers = itertools.count()
MESSAGES = b'[{"role":"user","content":"hi"}]'


def chat(max_tokens: int | None = 8, *, fields: bytes = b"", continued: str = "") -> Submit:
    wire = WireRequest("chat", MESSAGES, fields, continued=continued)
    return Submit(f"r{next(_numbers)}", [], SamplingParams(), "interactive", 0, max_tokens, wire=wire)


async def outputs(engine: RemoteEngine, request: Submit) -> list[SequenceOutput]:
    return [output async for output in engine.submit(request)]


def text(found: list[SequenceOutput]) -> str:
    return "".join(output.text for output in found)


def words(count: int, first: int = 0) -> str:
    return "".join(f"w{number} " for number in range(first, first + count))


@pytest.mark.parametrize("fault", ["", "split", "crlf", "together", "comments", "no_done"])
async def test_an_answer_is_whole_however_its_bytes_come(
    server: EngineProcess, engine: RemoteEngine, fault: str
) -> None:
    """Single bytes, CRLF, several events at once, comments between them, no [DONE]."""
    server.control(fault=fault)
    found = await outputs(engine, chat(8))
    assert text(found) == words(8)
    assert found[-1].finish == "length" and sum(output.tokens for output in found) == 8
    assert found[-1].prompt_tokens >= 1


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("cut", "cut"),
        ("stall", "timeout"),
        ("hang", "timeout"),
        ("close", "cut"),
        ("error_event", "cut"),
        ("bad_json", "junk"),
        ("binary", "junk"),
        ("bad_chunk", "junk"),
        ("giant_event", "junk"),
        ("giant_header", "junk"),
        ("html", "junk"),
    ],
)
async def test_what_a_server_does_wrong_ends_the_request_with_its_kind(
    server: EngineProcess, engine: RemoteEngine, fault: str, kind: str
) -> None:
    """Never a hang, never a whole answer made of half of one; the next request is served."""
    server.control(fault=fault, fault_count=1)
    with pytest.raises(RemoteFailure) as caught:
        await outputs(engine, chat(8))
    assert caught.value.kind == kind
    assert "127.0.0.1" not in str(caught.value)
    assert text(await outputs(engine, chat(4))) == words(4)


@pytest.mark.parametrize(
    ("status", "kind"), [(500, "status"), (502, "status"), (401, "status"), (503, "busy"), (429, "busy")]
)
async def test_a_servers_own_faults_are_failures(
    server: EngineProcess, engine: RemoteEngine, status: int, kind: str
) -> None:
    """A refused key too: that is between headrace and the engine."""
    server.control(fault="status", fault_status=status)
    with pytest.raises(RemoteFailure) as caught:
        await outputs(engine, chat())
    assert caught.value.kind == kind


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_clients_fault_is_an_end_in_the_engines_words(
    server: EngineProcess, engine: RemoteEngine, status: int
) -> None:
    server.control(fault="status", fault_status=status)
    (end,) = await outputs(engine, chat())
    assert end.finish == "error" and end.refused_status == status and end.error == "as programmed"


async def test_an_abort_reaches_the_server(server: EngineProcess, engine: RemoteEngine) -> None:
    """Its stream is closed, and it stops generating."""
    server.control(itl_s=0.01, tokens=10_000)
    before = server.stats()["aborted"]
    request = chat(None)
    stream = engine.submit(request)
    await anext(stream)
    engine.abort(request.request_id)
    assert [output.finish async for output in stream][-1] == "abort"
    while server.stats()["live"]:
        await asyncio.sleep(0.01)
    assert server.stats()["aborted"] == before + 1


async def test_a_slow_reader_holds_the_server_back_and_loses_nothing(
    server: EngineProcess, engine: RemoteEngine
) -> None:
    """Memory is bounded by TCP: a server that could send a million tokens at once has to wait."""
    server.control(tokens=100_000)
    stream = engine.submit(chat(100_000))
    first = await anext(stream)
    for _ in range(30):
        await asyncio.sleep(0.01)
    generated = server.stats()["tokens"]
    assert generated < 90_000, "the server was never held back"
    await stream.aclose()
    assert first.text == "w0 "


async def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure(
    server: EngineProcess, engine: RemoteEngine
) -> None:
    """The server goes away between two requests and comes back: the second one opens a new connection."""
    await outputs(engine, chat(2))
    server.kill()
    server.revive()
    assert text(await outputs(engine, chat(2))) == words(2)


async def test_what_was_generated_before_is_continued(server: EngineProcess, engine: RemoteEngine) -> None:
    """The text goes back as the beginning of the answer."""
    server.control(tokens=20)
    found = await outputs(engine, chat(8, continued=words(3)))
    assert text(found) == words(8, first=3)
    body = server.bodies()[-1]
    assert body["messages"][-1] == {"role": "assistant", "content": words(3)}
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


async def test_a_clients_fields_reach_the_engine(server: EngineProcess, engine: RemoteEngine) -> None:
    """As they were sent, under the engine's own model name."""
    fields = b'"temperature":0.25,"tools":[{"type":"function"}],"x-unknown":{"a":[1,null]}'
    await outputs(engine, chat(3, fields=fields))
    body = server.bodies()[-1]
    assert body["temperature"] == 0.25 and body["tools"] == [{"type": "function"}]
    assert body["x-unknown"] == {"a": [1, None]} and body["model"] == "m" and body["max_tokens"] == 3


async def test_its_metrics_and_health_are_read(server: EngineProcess, engine: RemoteEngine) -> None:
    server.control(kv_usage=0.75)
    figures = await engine.scrape()
    assert figures.kv_share == 0.75 and figures.running == 0 and figures.waiting == 0
    await engine.probe()
    server.control(health_status=503)
    with pytest.raises(RemoteFailure, match="503"):
        await engine.probe()


async def test_nobody_listens(server: EngineProcess, engine: RemoteEngine) -> None:
    """A refused connection is a failure at once."""
    server.kill()
    try:
        with pytest.raises(RemoteFailure) as caught:
            await outputs(engine, chat())
        assert caught.value.kind == "connect"
    finally:
        server.revive()
