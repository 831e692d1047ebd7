"""What goes over the wire for a planned request, legal or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.planned import RIGHT_STATUSES, MalformedKind, PlannedRequest, Schedule, SharedPrefix
from headrace.bench.requests.bodies import RequestBodies, Turn, Wire
from headrace.bench.requests.malformed import HUGE_BODY_BYTES, MALFORMED_KINDS
from headrace.bench.requests.texts import PromptTexts
from headrace.bench.requests.token_scale import Endpoint, TokenScale
from tests.api.harness import MODEL, serving

SCALE = TokenScale(template_tokens=10, message_tokens=4, system_tokens=6)


def bodies(scale: TokenScale = SCALE, **settings: Any) -> RequestBodies:
    return RequestBodies(model="m", texts=PromptTexts(), scale=scale, **settings)


def request(input_tokens: int = 100, output_tokens: int = 20, **fields: Any) -> PlannedRequest:
    fields = {"index": 0, "class_name": "c", "text_seed": 1, **fields}
    return PlannedRequest(input_tokens=input_tokens, output_tokens=output_tokens, **fields)


def fields(wire: Wire) -> dict[str, Any]:
    decoded = msgspec.json.decode(wire.body)
    assert isinstance(decoded, dict)
    return decoded


def tokens(messages: list[dict[str, str]], scale: TokenScale = SCALE) -> float:
    """The tokens of a chat by the scale: what a server of one token a word would count."""
    system = messages[0]["role"] == "system"
    more = len(messages) - 1
    extra = scale.system_tokens + (more - 1) * scale.message_tokens if system else more * scale.message_tokens
    return scale.template_tokens + extra + sum(len(message["content"].split()) for message in messages)


def test_a_chat_request_is_what_it_was_planned_to_be() -> None:
    wire = bodies().build(request())
    assert wire.path == "/v1/chat/completions"
    assert wire.headers == {"content-type": "application/json"}
    assert wire.right_statuses == {200}
    body = fields(wire)
    (message,) = body.pop("messages")
    assert body == {"model": "m", "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    assert message == {"role": "user", "content": wire.question}
    assert tokens([message]) == 100


def test_a_text_completion_has_the_same_tokens_in_a_prompt() -> None:
    wire = bodies(endpoint="completions").build(request())
    assert wire.path == "/v1/completions"
    assert len(fields(wire)["prompt"].split()) == 90
    assert "messages" not in fields(wire)


def test_lane_session_and_priority_are_sent_where_servers_look_for_them() -> None:
    wire = bodies().build(request(lane="long", session="dialogue-7", priority=3))
    assert wire.headers["x-headrace-lane"] == "long"
    assert wire.headers["x-session-id"] == "dialogue-7"
    assert fields(wire)["priority"] == 3


def test_what_a_class_says_wins_over_what_the_run_says() -> None:
    made = bodies(headers={"X-Tenant-Id": "a", "X-Run": "7"}, body={"temperature": 0.5, "top_p": 0.9}, ignore_eos=True)
    wire = made.build(request(headers={"x-tenant-id": "b", "X-Headrace-Lane": "batch"}, lane="long", body={"top_p": 1}))
    assert wire.headers == {
        "content-type": "application/json",
        "x-tenant-id": "b",
        "x-run": "7",
        "x-headrace-lane": "batch",
    }
    body = fields(wire)
    assert (body["temperature"], body["top_p"], body["ignore_eos"]) == (0.5, 1, True)


def test_usage_is_asked_for_only_in_streams_and_never_against_the_classs_word() -> None:
    assert "stream_options" not in fields(bodies(stream=False).build(request()))
    assert "stream_options" not in fields(bodies().build(request(body={"stream": False})))
    own = {"stream_options": {"include_usage": False}}
    assert fields(bodies().build(request(body=own)))["stream_options"] == {"include_usage": False}


def test_the_limits_field_can_have_another_name() -> None:
    body = fields(bodies(max_tokens_field="max_completion_tokens").build(request()))
    assert body["max_completion_tokens"] == 20
    assert "max_tokens" not in body


@given(st.integers(40, 3000), st.integers(0, 2**53 - 1), st.integers(1, 20))
def test_a_prompt_with_a_shared_prefix_has_the_planned_tokens_in_all(total: int, seed: int, shared: int) -> None:
    prefix = SharedPrefix(key="bank/1", tokens=shared)
    messages = fields(bodies().build(request(total, text_seed=seed, prefix=prefix)))["messages"]
    assert [message["role"] for message in messages] == ["system", "user"]
    assert len(messages[0]["content"].split()) == shared
    assert tokens(messages) == total


def test_a_shared_prefix_is_the_same_to_the_byte_in_every_request_of_its_key() -> None:
    prefix = SharedPrefix(key="bank/1", tokens=50)
    first, second = (fields(bodies().build(request(text_seed=seed, prefix=prefix)))["messages"] for seed in (1, 2))
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_without_a_system_role_the_prefix_begins_the_users_message() -> None:
    scale = TokenScale(template_tokens=10, system_role=False)
    prefix = SharedPrefix(key="bank/1", tokens=50)
    (message,) = fields(bodies(scale).build(request(prefix=prefix)))["messages"]
    (other,) = fields(bodies(scale).build(request(prefix=prefix, text_seed=2)))["messages"]
    assert message["content"].split()[:50] == other["content"].split()[:50]
    assert message["content"].split()[50] != other["content"].split()[50]
    assert tokens([message], scale) == 100


def test_a_shared_prefix_is_whole_even_where_the_prompt_was_planned_shorter() -> None:
    messages = fields(bodies().build(request(20, prefix=SharedPrefix(key="k", tokens=500))))["messages"]
    assert messages[0]["content"] == PromptTexts().shared("k", 500)
    assert len(messages[1]["content"].split()) == 1


def test_blocks_of_a_trace_give_prompts_that_begin_alike() -> None:
    one, two = (
        fields(bodies().build(request(1034, text_seed=ids[-1], prefix=SharedPrefix(hash_ids=ids, block_tokens=256))))
        for ids in ((7, 8, 9, 10), (7, 8, 11, 12))
    )
    first, second = one["messages"][0]["content"].split(), two["messages"][0]["content"].split()
    assert len(first) == len(second) == 1024
    assert first[:512] == second[:512]
    assert first[512:520] != second[512:520]


def test_a_later_turn_carries_the_real_replies_and_has_the_planned_tokens() -> None:
    made = bodies()
    prefix = SharedPrefix(key="app/0", tokens=30)
    first = request(100, 20, prefix=prefix, session="s")
    second = request(160, 25, index=1, prefix=prefix, session="s", turn=1, after=0, text_seed=2)
    third = request(215, 5, index=2, prefix=prefix, session="s", turn=2, after=1, text_seed=3)
    opening = made.build(first)
    turns = [Turn(first, opening.question, " ".join(["reply"] * 20))]
    following = made.build(second, turns)
    turns.append(Turn(second, following.question, " ".join(["again"] * 25)))
    messages = fields(made.build(third, turns))["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert messages[:2] == fields(opening)["messages"]
    assert messages[:4] == fields(following)["messages"]
    assert messages[2]["content"] == turns[0].reply
    assert tokens(fields(following)["messages"]) == 160
    assert tokens(messages) == 215


def test_a_turn_that_failed_is_left_out_of_the_next_ones_history() -> None:
    first, second = request(100, 20), request(160, 25, index=1, turn=1, after=0)
    made = bodies()
    (message,) = fields(made.build(second, [Turn(first, made.build(first).question, "")]))["messages"]
    # Of the planned 160 tokens, the 120 of the failed turn are missing, and 8 for two more messages.
    assert message["role"] == "user"
    assert len(message["content"].split()) == 32


def test_without_a_system_role_the_history_holds_the_shared_prefix_once() -> None:
    made = bodies(TokenScale(system_role=False))
    prefix = SharedPrefix(key="app/0", tokens=30)
    first, second = request(100, 20, prefix=prefix), request(160, 25, index=1, turn=1, after=0, prefix=prefix)
    opening = made.build(first)
    shared = PromptTexts().shared("app/0", 30)
    messages = fields(made.build(second, [Turn(first, opening.question, "yes")]))["messages"]
    assert messages[0]["content"].startswith(shared)
    assert shared not in messages[2]["content"]
    # After a failed first turn the prefix must not be lost.
    (alone,) = fields(made.build(second, [Turn(first, opening.question, "")]))["messages"]
    assert alone["content"].startswith(shared)


def test_a_conversation_of_text_completions_is_one_growing_text() -> None:
    made = bodies(TokenScale(), endpoint="completions")
    first, second = request(100, 20), request(160, 25, index=1, turn=1, after=0, text_seed=2)
    opening = made.build(first)
    following = made.build(second, [Turn(first, opening.question, "and so on")])
    prompt = fields(following)["prompt"]
    assert prompt == f"{opening.question}\n\nand so on\n\n{following.question}"
    assert len(following.question.split()) == 40


# -- illegal requests -------------------------------------------------------------------------------------


def illegal(kind: MalformedKind, seed: int = 0, **fields: Any) -> PlannedRequest:
    return request(fields.pop("input_tokens", 0), 0, malformed=kind, text_seed=seed, **fields)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_broken_json_is_json_in_no_variant(endpoint: Endpoint) -> None:
    made = bodies(endpoint=endpoint)
    sent = {made.build(illegal("broken_json", seed)).body for seed in range(6)}
    assert len(sent) == 6
    for body in sent:
        with pytest.raises((ValueError, UnicodeDecodeError)):
            msgspec.json.decode(body)


@pytest.mark.parametrize("kind", MALFORMED_KINDS)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_an_illegal_request_is_the_same_bytes_each_time_and_says_what_refuses_it(
    kind: MalformedKind, endpoint: Endpoint
) -> None:
    wires = [bodies(endpoint=endpoint, headers={"x": "y"}).build(illegal(kind, 5, input_tokens=50)) for _ in range(2)]
    assert wires[0] == wires[1]
    assert wires[0].right_statuses == RIGHT_STATUSES[kind]
    assert wires[0].headers == {"content-type": "application/json", "x": "y"}
    assert 200 not in wires[0].right_statuses


def test_sizes_of_the_large_kinds() -> None:
    made = bodies()
    assert HUGE_BODY_BYTES <= len(made.build(illegal("huge_body")).body) < HUGE_BODY_BYTES + 2**19
    (message,) = fields(made.build(illegal("too_long", input_tokens=16384)))["messages"]
    assert len(message["content"].split()) == 16384
    assert made.build(illegal("no_body")).body == b""


def test_large_bodies_are_made_before_the_run_and_once() -> None:
    made = bodies()
    requests = [illegal("huge_body"), illegal("too_long", input_tokens=5000), request()]
    made.prepare(Schedule(requests=requests, duration_s=1, seed=0, source={}, slos={}))
    first = [made.build(planned).body for planned in requests[:2]]
    second = [made.build(planned).body for planned in requests[:2]]
    assert all(one is two for one, two in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", MALFORMED_KINDS)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_headrace_refuses_every_kind_and_variant_rightly(
    kind: MalformedKind, endpoint: Endpoint, tmp_path: Path
) -> None:
    made = RequestBodies(model=MODEL, texts=PromptTexts(), scale=TokenScale(), endpoint=endpoint)
    async with serving(tmp_path, max_context_tokens=512) as served:
        for seed in range(6):
            wire = made.build(illegal(kind, seed, input_tokens=1024))
            answer = await served.client.post(wire.path, content=wire.body, headers=wire.headers)
            assert answer.status_code in wire.right_statuses, (seed, answer.text)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_headrace_takes_a_legal_one(endpoint: Endpoint, tmp_path: Path) -> None:
    made = RequestBodies(model=MODEL, texts=PromptTexts(), scale=TokenScale(), endpoint=endpoint, ignore_eos=True)
    async with serving(tmp_path) as served:
        wire = made.build(request(50, 8, lane="interactive", session="s", prefix=SharedPrefix(key="k", tokens=20)))
        answer = await served.client.post(wire.path, content=wire.body, headers=wire.headers)
    assert answer.status_code == 200
    assert answer.headers["x-headrace-lane"] == "interactive"
    assert '"usage"' in answer.text
