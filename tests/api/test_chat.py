"""Chat completions: what comes back, streamed and not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.engines.scripted import text_script
from tests.api.harness import HELLO, MODEL, config, events, serving


async def test_answers_with_text_usage_and_finish_reason(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        body = (await served.chat()).json()
    assert body["object"] == "chat.completion"
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": HELLO, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_stream_is_role_then_text_then_finish_then_usage_then_done(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        response = await served.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == HELLO
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "stop"
    ]
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1


async def test_stream_without_usage_has_no_usage_field(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        *chunks, _ = events((await served.chat(stream=True)).text)
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_gives_n_choices(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path) as served:
        response = await served.chat(n=3, stream=stream)
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for chunk in events(response.text)[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    else:
        texts = {choice["index"]: choice["message"]["content"] for choice in response.json()["choices"]}
    assert texts == {0: HELLO, 1: HELLO, 2: HELLO}


async def test_choices_draw_from_different_streams_of_one_seed(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.chat(n=3, seed=7)
        seeds = [submit.sampling.seed for submit in served.engine.submitted]
    assert len(set(seeds)) == 3
    assert seeds[0] == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_cover_every_token(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, script=text_script("ab")) as served:
        response = await served.chat(logprobs=True, top_logprobs=2, max_tokens=2, stream=stream)
    if stream:
        found = [c["choices"][0]["logprobs"] for c in events(response.text)[:-1]]
        entries = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    else:
        entries = response.json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert [entry["bytes"] for entry in entries] == [[97], [98]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


async def test_zero_tokens_is_an_empty_answer_of_finish_length(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        body = (await served.chat(max_completion_tokens=0)).json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0


async def test_stop_string_never_shows_even_across_tokens(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        response = await served.chat(stop=["the scr"], stream=True)
    chunks = events(response.text)[:-1]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "Hello from "


async def test_text_parts_are_one_text_and_developer_is_system(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        messages = [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
        ]
        await served.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
        prompt = served.deps.tokenizer.decode(served.engine.submitted[0].prompt_tokens)
    assert prompt == "system: a\nb\nuser: c\nassistant: "


@pytest.mark.parametrize(("choice", "given"), [("auto", True), ("none", False)])
async def test_tools_reach_the_template_unless_told_not_to(tmp_path: Path, choice: str, given: bool) -> None:
    async with serving(tmp_path) as served:
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert (await served.chat(tools=tools, tool_choice=choice)).status_code == 200
        prompt = served.deps.tokenizer.decode(served.engine.submitted[0].prompt_tokens)
    assert prompt.startswith("tools: 1") is given


async def test_unset_output_length_leaves_the_limit_to_the_engine(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.chat()
        await served.chat(max_tokens=100_000)
        limits = [submit.max_tokens for submit in served.engine.submitted]
        tokens = len(served.engine.submitted[0].prompt_tokens)
    assert limits == [None, 4096 - tokens]


async def test_lane_defaults_and_caps_apply(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.chat(headers={"x-headrace-lane": "realtime"})
        submit = served.engine.submitted[0]
    assert (submit.lane, submit.priority, submit.max_tokens) == ("realtime", 0, 64)
    assert submit.deadline_s == pytest.approx(submit.arrived_s + 0.2)


async def test_slo_headers_tighten_the_deadline_and_never_loosen_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for milliseconds in ("50", "5000"):
            await served.chat(headers={"x-headrace-lane": "realtime", "x-slo-ttft-ms": milliseconds})
        waits = [(submit.deadline_s or 0) - submit.arrived_s for submit in served.engine.submitted]
        refused = await served.chat(headers={"x-slo-tpot-ms": "soon"})
    assert waits == [pytest.approx(0.05), pytest.approx(0.2)]
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-slo-tpot-ms"


async def test_a_lane_prefix_in_the_path_names_the_lane(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        response = await served.client.post("/batch/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-headrace-lane"] == "batch"
    assert response.headers["x-headrace-lane-rule"] == "path"


async def test_what_is_not_used_is_said_in_a_header_or_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        lenient = await served.chat(verbosity="low", temperture=1, user="u")
    async with serving(tmp_path, config(unsupported_params="reject")) as served:
        strict = await served.chat(temperture=1)
        hint = await served.chat(user="u", safety_identifier="s", store=False)
    assert lenient.headers["x-headrace-ignored"] == "verbosity, temperture"
    assert strict.status_code == 400
    assert "did you mean 'temperature'" in strict.json()["error"]["message"]
    assert hint.status_code == 200


async def test_request_ids_are_kept_when_sane_and_made_otherwise(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        kept = await served.chat(headers={"x-request-id": "abc-1:2.3_4"})
        made = await served.chat(headers={"x-request-id": "a b"})
        missing = await served.client.get("/nowhere", headers={"x-request-id": "mine"})
    assert kept.headers["x-request-id"] == "abc-1:2.3_4"
    assert made.headers["x-request-id"].startswith("req-")
    assert missing.headers["x-request-id"] == "mine"


async def test_two_requests_with_one_request_id_both_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        answers = await asyncio.gather(*(served.chat(headers={"x-request-id": "same"}) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
