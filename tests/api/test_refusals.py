"""Every wrong request gets its status and a message that says what was wrong and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.config.schema import Tenant
from tests.api.harness import MODEL, config, serving

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b"{", "too early"),
        (b'{"model" "x"}', "byte 9"),
        (b'{"model":"\xff"}', "UTF-8"),
        (b"\xff\xfe", "byte 0"),
        (b'{"messages":[],"temperature":NaN}', "byte 29"),
        (b'{"messages":' + b"[" * 100_000, "nested too deeply"),
        (b'{"x":' + b"[" * 100_000, "nested too deeply"),
        (b'{"model":"\\ud800"}', "surrogate"),
        (b"[]", "expected object"),
    ],
)
async def test_malformed_bodies(tmp_path: Path, body: bytes, message: str) -> None:
    async with serving(tmp_path) as served:
        response = await served.client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "expected array, got str"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot' is unknown"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got int"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type", "text only"),
        ({"temperature": 2.1}, "temperature", "between 0 and 2, not 2.1"),
        ({"temperature": "hot"}, "temperature", "got str"),
        ({"temperature": True}, "temperature", "got bool"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"presence_penalty": -2.5}, "presence_penalty", "between -2 and 2"),
        ({"frequency_penalty": 3}, "frequency_penalty", "between -2 and 2"),
        ({"n": 0}, "n", "between 1 and 128"),
        ({"n": 129}, "n", "between 1 and 128"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        ({"max_tokens": -1}, "max_tokens", "between 0 and"),
        ({"seed": 10**30}, "seed", "not a number of"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": ""}, "stop", "empty"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "ids go from 0 to 256"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "only text"),
        ({"tool_choice": "required"}, "tool_choice", "cannot be forced"),
        ({"guided_json": {}}, "guided_json", "cannot be constrained"),
        ({"metadata": {"k": "v" * 513}, "store": True}, "metadata", "512"),
    ],
)  # fmt: skip
async def test_wrong_fields(tmp_path: Path, change: dict[str, Any], param: str, message: str) -> None:
    async with serving(tmp_path) as served:
        body = {"model": MODEL, "messages": USER, **change}
        response = await served.client.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "at least one token"),
        ([], "must not be empty"),
        ([1, "a"], "mixes"),
        ([999], "outside 0..256"),
        ([[]], "at least one token"),
        (["x"] * 129, "at most 128"),
        (None, "got null"),
        ([[1.5]], "expected int"),
    ],
)
async def test_wrong_prompts(tmp_path: Path, prompt: Any, message: str) -> None:
    async with serving(tmp_path) as served:
        response = await served.complete(prompt)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


async def test_unknown_model_is_404_and_says_what_there_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        unknown = await served.client.post("/v1/chat/completions", json={"model": "gpt", "messages": USER})
        missing = await served.client.post("/v1/chat/completions", json={"messages": USER})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert "scripted, alias" in unknown.json()["error"]["message"]
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "model"


async def test_prompt_beyond_the_context_says_both_numbers(tmp_path: Path) -> None:
    async with serving(tmp_path, max_context_tokens=100) as served:
        response = await served.complete("x" * 101)
        full = await served.complete("x" * 100)
        scored = await served.complete("x" * 100, max_tokens=0)
        fitting = await served.complete("x" * 99)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert "101 tokens" in error["message"] and "holds 100" in error["message"]
    assert (full.status_code, scored.status_code, fitting.status_code) == (400, 200, 200)
    assert fitting.json()["usage"]["completion_tokens"] == 1


async def test_too_many_sequences_in_one_request(tmp_path: Path) -> None:
    async with serving(tmp_path, config(max_choices=4)) as served:
        response = await served.complete(["a", "b", "c"], n=2)
    assert response.status_code == 400
    assert "3 prompts times 2" in response.json()["error"]["message"]


async def test_unknown_path_and_method_have_the_same_form(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        path = await served.client.get("/v1/nothing")
        method = await served.client.put("/v1/chat/completions")
        slash = await served.client.get("/v1/models/")
    assert (path.status_code, path.json()["error"]["code"]) == (404, "not_found")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "GET, HEAD, POST"
    assert slash.status_code == 404


async def test_keys(tmp_path: Path) -> None:
    settings = config()
    settings = type(settings)(
        model=settings.model,
        server=settings.server,
        tenants={"acme": Tenant(api_keys=("secret",), lanes=("batch",))},
    )
    async with serving(tmp_path, settings) as served:
        none = await served.chat()
        wrong = await served.chat(headers={"authorization": "Bearer nope"})
        right = await served.chat(headers={"authorization": "Bearer secret"})
        lane = await served.chat(headers={"authorization": "Bearer secret", "x-headrace-lane": "realtime"})
        models = await served.client.get("/v1/models")
        health = await served.client.get("/health")
    assert (none.status_code, wrong.status_code, models.status_code) == (401, 401, 401)
    assert none.headers["www-authenticate"] == "Bearer"
    assert (right.status_code, right.headers["x-headrace-lane"]) == (200, "batch")
    assert (lane.status_code, health.status_code) == (403, 200)


async def test_unknown_lane_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        response = await served.chat(headers={"x-headrace-lane": "interactiv"})
    assert response.status_code == 400
    assert "did you mean 'interactive'" in response.json()["error"]["message"]


async def test_a_wrong_content_type_does_not_matter(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        body = json.dumps({"model": MODEL, "messages": USER})
        response = await served.client.post(
            "/v1/chat/completions", content=body, headers={"content-type": "text/plain"}
        )
    assert response.status_code == 200
