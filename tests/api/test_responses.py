"""/v1/responses, through the ``openai`` package's own client where it can say it, else over raw HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.api.harness import HELLO, MODEL, Served, config, serving


def client(served: Served, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.base_url}/v1", api_key=key, max_retries=0)


async def test_text_in_and_text_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client(served) as sdk:
        answer = await sdk.responses.create(model=MODEL, input="hi", instructions="Be brief.", metadata={"a": "b"})
        parts = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        same = await sdk.responses.create(model=MODEL, input=parts, instructions="Be brief.")  # type: ignore[arg-type]
    assert answer.output_text == same.output_text == HELLO
    assert answer.id.startswith("resp_") and answer.status == "completed" and answer.metadata == {"a": "b"}
    assert answer.usage is not None and same.usage is not None
    assert answer.usage.input_tokens == same.usage.input_tokens == len("system: Be brief.\nuser: hi\nassistant: ")


async def test_the_limit_is_told_apart_from_the_models_own_end(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client(served) as sdk:
        answer = await sdk.responses.create(model=MODEL, input="hi", max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens" and answer.output_text == HELLO[:3]


@pytest.mark.parametrize("store", [True, False])
async def test_a_stream_tells_how_the_response_grows(tmp_path: Path, store: bool) -> None:
    async with serving(tmp_path) as served, client(served) as sdk:
        stream = await sdk.responses.create(model=MODEL, input="hi", stream=True, store=store)
        found: list[Any] = [event async for event in stream]
    kinds = [event.type for event in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert "".join(event.delta for event in found[4:-4]) == found[-4].text == HELLO
    assert found[-1].response.output_text == HELLO and found[-1].response.usage.output_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_from_a_stored_response(tmp_path: Path, stream: bool) -> None:
    """The model sees what was said before; instructions are not carried on."""
    async with serving(tmp_path) as served, client(served) as sdk:
        if stream:
            events = [e async for e in await sdk.responses.create(model=MODEL, input="one", stream=True)]
            first: Any = events[-1].response  # type: ignore[union-attr]
        else:
            first = await sdk.responses.create(model=MODEL, input="one", instructions="Be brief.")
        second = await sdk.responses.create(model=MODEL, input="two", previous_response_id=first.id)
        third = await sdk.responses.create(model=MODEL, input="three", previous_response_id=second.id)
        again = await sdk.responses.retrieve(first.id)
        chats = (await served.client.get("/v1/chat/completions")).json()["data"]
    seen = f"user: one\nassistant: {HELLO}\nuser: two\n"
    assert second.usage is not None and third.usage is not None
    assert second.usage.input_tokens == len(seen + "assistant: ")
    assert third.usage.input_tokens == len(f"{seen}assistant: {HELLO}\nuser: three\nassistant: ")
    assert again.output_text == HELLO and again.id == first.id
    assert chats == []


async def test_a_response_is_there_until_deleted_and_only_where_it_was_stored(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client(served) as sdk:
        kept = await sdk.responses.create(model=MODEL, input="hi")
        other = await sdk.responses.create(model=MODEL, input="hi", store=False)
        await sdk.responses.delete(kept.id)
        for response_id in (kept.id, other.id, "resp_x"):
            with pytest.raises(NotFoundError):
                await sdk.responses.retrieve(response_id)
            with pytest.raises(NotFoundError):
                await sdk.responses.delete(response_id)
            with pytest.raises(NotFoundError):
                await sdk.responses.create(model=MODEL, input="hi", previous_response_id=response_id)


USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"stream": 1}, "stream"),
        ({"model": None}, "model"),
    ],
)
async def test_what_is_wrong_is_400_and_named(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with serving(tmp_path) as served:
        answer = await served.client.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


async def test_a_tenant_sees_its_own_responses_only(tmp_path: Path) -> None:
    import msgspec

    from headrace.config.schema import Tenant

    tenants = {"a": Tenant(api_keys=("key-a",)), "b": Tenant(api_keys=("key-b",))}
    settings = msgspec.structs.replace(config(), tenants=tenants)
    async with serving(tmp_path, settings) as served, client(served, "key-a") as a, client(served, "key-b") as b:
        kept = await a.responses.create(model=MODEL, input="hi")
        with pytest.raises(NotFoundError):
            await b.responses.retrieve(kept.id)
        with pytest.raises(NotFoundError):
            await b.responses.create(model=MODEL, input="hi", previous_response_id=kept.id)
        assert (await a.responses.retrieve(kept.id)).id == kept.id
