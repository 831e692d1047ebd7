"""POST /v1/messages: the Messages API over the wire, as its clients see it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config.schema import Tenant
from tests.api.harness import HELLO, MODEL, Gate, Served, config, serving


def asked(**fields: Any) -> dict[str, Any]:
    """A small valid request."""
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}], **fields}


def events(text: str) -> list[tuple[str, Any]]:
    """``(event name, data)`` of a stream; the name must be the data's type."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        decoded = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {decoded['type']}"
        found.append((decoded["type"], decoded))
    return found


async def send(served: Served, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    return await served.client.post("/v1/messages", json=asked(**fields), headers=headers)


async def test_an_answer_is_a_message_with_blocks_and_counts(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        answer = await send(served, system="Be brief.")
    body = answer.json()
    assert answer.status_code == 200 and answer.headers["request-id"] == answer.headers["x-request-id"]
    assert body["id"].startswith("msg_") and body["model"] == MODEL
    assert (body["type"], body["role"]) == ("message", "assistant")
    assert body["content"] == [{"type": "text", "text": HELLO}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    rendered = "system: Be brief.\nuser: hi\nassistant: "
    assert body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] == len(rendered)
    assert body["usage"]["output_tokens"] >= len(HELLO)


async def test_a_stream_tells_the_same_block_by_block(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        whole = (await send(served)).json()
        streamed = await send(served, stream=True)
    found = events(streamed.text)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta") == HELLO
    start, delta = found[0][1]["message"], found[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None and start["usage"]["input_tokens"] > 0
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("stream", [False, True])
async def test_it_says_why_an_answer_ended(tmp_path: Path, stream: bool) -> None:
    """A stop sequence is named, a limit is told apart from the model's own end."""
    async with serving(tmp_path) as served:
        at_word = await send(served, stop_sequences=["nowhere", " from"], stream=stream)
        at_limit = await send(served, max_tokens=3, stream=stream)

    def end(answer: Any) -> tuple[str, str | None]:
        said = events(answer.text)[-2][1]["delta"] if stream else answer.json()
        return said["stop_reason"], said["stop_sequence"]

    assert end(at_word) == ("stop_sequence", " from")
    assert end(at_limit) == ("max_tokens", None)


async def test_an_answer_goes_on_after_its_given_beginning(tmp_path: Path) -> None:
    """A last message of the assistant's is the beginning of the answer; blocks of text and thinking are read."""
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "It is"}]},
    ]
    async with serving(tmp_path) as served:
        answer = await send(served, messages=turns)
        counted = await served.client.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": turns})
    usage = answer.json()["usage"]
    assert answer.status_code == 200
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


USER = {"role": "user", "content": "hi"}
TOOL = {"name": "now", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "image"}]}]}, "messages[1].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "content[0].id"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"stop_sequences": [""]}, "stop"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [TOOL]}, "tools: the embedded engine"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format: the embedded"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"metadata": {"user_id": 7}}, "metadata.user_id"),
    ],
)
async def test_what_is_wrong_is_400_in_the_apis_form(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    async with serving(tmp_path) as served:
        answer = await send(served, **fields)
    body = answer.json()
    assert answer.status_code == 400
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert word in body["error"]["message"] and body["request_id"] == answer.headers["request-id"]


async def test_other_refusals_have_the_apis_form_too(tmp_path: Path) -> None:
    """Unknown models and paths, wrong methods, broken JSON, large bodies; in a lane's path as well."""
    async with serving(tmp_path, config(max_body_bytes=2000)) as served:
        client = served.client
        answers = {
            "not_found_error": [
                await send(served, model="other"),
                await client.get("/v1/messages/batches"),
                await client.get("/realtime/v1/messages/batches"),
            ],
            "invalid_request_error": [
                await client.get("/v1/messages"),
                await client.post("/v1/messages", content=b"{"),
                await client.post("/v1/messages", content=b"[]"),
                await client.post("/v1/messages", content=b"\xff"),
                await client.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": []}),
            ],
            "request_too_large": [await send(served, system="x" * 3000)],
        }
    for kind, refused in answers.items():
        for answer in refused:
            assert 400 <= answer.status_code < 500, answer.text
            assert answer.json()["type"] == "error" and answer.json()["error"]["type"] == kind, answer.text


async def test_a_key_may_come_as_x_api_key(tmp_path: Path) -> None:
    """Its clients send keys that way; for other APIs it means nothing."""
    settings = msgspec.structs.replace(config(), tenants={"team": Tenant(api_keys=("secret-key",))})
    async with serving(tmp_path, settings) as served:
        good = await send(served, {"x-api-key": "secret-key"})
        bearer = await send(served, {"authorization": "Bearer secret-key"})
        bad = await send(served, {"x-api-key": "other"})
        none = await send(served)
        chat = await served.chat(headers={"x-api-key": "secret-key"})
    assert (good.status_code, bearer.status_code) == (200, 200)
    assert (bad.status_code, none.status_code, chat.status_code) == (401, 401, 401)
    assert bad.json()["error"]["type"] == "authentication_error"
    assert "error" in chat.json() and "type" not in chat.json()


async def test_an_engine_that_dies_in_a_stream_is_told_by_an_error_event(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        streamed = asyncio.create_task(send(served, stream=True))
        await served.until(lambda: served.deps.gateway.ledger.waiting == 1)
        gate.open(3)
        await served.until(lambda: served.deps.gateway.ledger.running == 1)
        served.engine.kill("out of memory")
        found = events((await streamed).text)
        served.engine.revive()
    assert found[0][0] == "message_start" and found[-1][0] == "error"
    assert found[-1][1]["error"]["type"] == "api_error"
    assert "message_stop" not in [name for name, _ in found]
