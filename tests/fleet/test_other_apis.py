"""The Messages and Responses APIs over remote engines: what is passed on, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from benchmarks.programmable_engine import EngineProcess
from headrace.api.answer import Answer
from headrace.api.anthropic_format import MessagesFormat
from headrace.api.plan import Plan
from headrace.api.prompts import Prompt
from headrace.api.responses_format import ResponsesFormat
from headrace.api.responses_wire import ResponsesRequest
from headrace.lanes.classify import LaneDecision
from headrace.lanes.lane import SLO, Lane
from headrace.messages.engine import SequenceOutput
from tests.fleet.conftest import config_of, group_of, words

Servers = Callable[..., list[EngineProcess]]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
OUTPUTS = [
    SequenceOutput("r", more_tokens=1, delta=b'{"reasoning_content":"Hm."}', prompt_tokens=9),
    SequenceOutput("r", "Let me see.", more_tokens=1),
    SequenceOutput(
        "r",
        more_tokens=1,
        delta=b'{"tool_calls":[{"index":0,"id":"c0","type":"function","function":{"name":"now","arguments":""}}]}',
    ),
    SequenceOutput(
        "r", more_tokens=1, delta=b'{"tool_calls":[{"index":1,"id":"c1","function":{"name":"where","arguments":"{"}}]}'
    ),
    SequenceOutput("r", more_tokens=1, delta=b'{"tool_calls":[{"index":0,"function":{"arguments":"{\\"city\\":"}}]}'),
    SequenceOutput("r", more_tokens=1, delta=b'{"tool_calls":[{"index":0,"function":{"arguments":"\\"Bern\\"}"}}]}'),
    SequenceOutput("r", more_tokens=1, delta=b'{"tool_calls":[{"index":1,"function":{"arguments":"}"}}]}'),
    SequenceOutput("r", finish="tool_calls", prompt_tokens=9),
]


def plan(*, stream: bool) -> Plan:
    lane = LaneDecision("chat", Lane(), "default")
    return Plan(
        "chatcmpl-7", "m", 1, [Prompt([], estimated=9)], 1, 1, False, stream, False, lane, SLO(), [], remote=True
    )


def answer() -> Answer:
    found = Answer()
    for output in OUTPUTS:
        found.add(output)
    return found


def decoded(events: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(block.split(b"\ndata: ")[1]) for block in events.strip().split(b"\n\n")]


def written(form: MessagesFormat | ResponsesFormat) -> list[dict[str, Any]]:
    """The events of ``OUTPUTS``; each is asked for twice, as it is for a client that reads slowly."""
    events = form.opening()
    for output in OUTPUTS:
        once = form.chunk(0, output)
        assert form.chunk(0, output) == once
        events += once
    return decoded(events + form.closing([answer()]))


def test_thinking_text_and_calls_are_blocks_of_a_message() -> None:
    body = MessagesFormat(plan(stream=False)).body([answer()])
    assert body["stop_reason"] == "tool_use"
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "c0", "name": "now", "input": {"city": "Bern"}},
        {"type": "tool_use", "id": "c1", "name": "where", "input": {}},
    ]


def test_a_streamed_message_adds_up_to_the_whole_one() -> None:
    """Blocks begin in order, each ends once, and pieces of two calls sent in turn stay apart."""
    blocks: list[dict[str, Any]] = []
    ended: list[int] = []
    for event in written(MessagesFormat(plan(stream=True))):
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "pieces": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] not in ended
            (piece,) = [value for name, value in event["delta"].items() if name != "type"]
            blocks[event["index"]]["pieces"] += piece
        elif event["type"] == "content_block_stop":
            ended.append(event["index"])
    assert [(block["type"], block["pieces"]) for block in blocks] == [
        ("thinking", "Hm."),
        ("text", "Let me see."),
        ("tool_use", '{"city":"Bern"}'),
        ("tool_use", "{}"),
    ]
    assert ended == [0, 1, 2, 3]


def test_arguments_that_are_no_json_come_as_text() -> None:
    cut = Answer()
    cut.add(SequenceOutput("r", delta=b'{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{\\"a"}}]}'))
    cut.add(SequenceOutput("r", finish="length"))
    (block,) = MessagesFormat(plan(stream=False)).body([cut])["content"]
    assert block["input"] == {"INVALID_JSON": '{"a'} and block["id"].startswith("toolu_")


def test_a_streamed_response_adds_up_to_the_whole_one() -> None:
    request = ResponsesRequest(model="m", input="hi")
    whole = ResponsesFormat(plan(stream=False), request).body([answer()])
    events = written(ResponsesFormat(plan(stream=True), request))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed" and events[-1]["response"] == whole
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.get("arguments") for item in whole["output"][2:]] == ['{"city":"Bern"}', "{}"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_and_schemas_reach_a_remote_engine(servers: Servers, door: Any, stream: bool) -> None:
    (server,) = servers(1)
    async with door(config_of({"g": group_of([server])})) as served:
        message = {
            "model": "m",
            "max_tokens": 4,
            "stream": stream,
            "system": "Be brief.",
            "stop_sequences": ["END"],
            "messages": [
                {"role": "user", "content": "Where?"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "now", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Bern"}]},
            ],
            "tools": [{"name": "now", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        }
        answered = await served.client.post("/v1/messages", json=message)
        response = {
            "model": "m",
            "max_output_tokens": 4,
            "stream": stream,
            "input": [
                {"role": "user", "content": "Where?"},
                {"type": "function_call", "call_id": "t1", "name": "now", "arguments": '{"a":1}'},
                {"type": "function_call_output", "call_id": "t1", "output": "Bern"},
            ],
            "instructions": "Be brief.",
            "tools": [{"type": "function", "name": "now", "description": "d", "parameters": SCHEMA}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "text": {"format": {"type": "json_schema", "name": "output", "schema": SCHEMA, "strict": True}},
        }
        responded = await served.client.post("/v1/responses", json=response)
        counted = await served.client.post("/v1/messages/count_tokens", json={"model": "m", "messages": [USER]})
    assert answered.status_code == responded.status_code == 200, (answered.text, responded.text)
    assert words(1).strip() in answered.text and words(1).strip() in responded.text
    first, second = server.bodies()[-2:]
    assert first.pop("stop") == ["END"]
    assert first == second
    call = {"id": "t1", "type": "function", "function": {"name": "now", "arguments": '{"a":1}'}}
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "Bern"},
    ]
    assert first["tools"] == [
        {"type": "function", "function": {"name": "now", "description": "d", "parameters": SCHEMA}}
    ]
    assert first["tool_choice"] == "required" and first["parallel_tool_calls"] is False
    assert first["response_format"]["json_schema"] == {"name": "output", "schema": SCHEMA, "strict": True}
    assert counted.json()["input_tokens"] > 0 and counted.headers["x-headrace-estimated"] == "input_tokens"


USER = {"role": "user", "content": "hi"}
