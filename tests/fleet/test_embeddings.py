"""/v1/embeddings over remote engines, through the ``openai`` package's own client; refused where none has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from benchmarks.programmable_engine import EngineProcess
from tests.api.harness import MODEL, serving
from tests.fleet.conftest import config_of, group_of

Servers = Callable[..., list[EngineProcess]]


async def test_inputs_are_passed_on_and_embeddings_come_back(servers: Servers, door: Any) -> None:
    """Under the client's name for the model; fields that headrace does not know reach the engine."""
    (server,) = servers(1)
    async with (
        door(config_of({"g": group_of([server])})) as served,
        AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        found = await sdk.embeddings.create(
            model="m", input=["a", "bcd"], encoding_format="float", dimensions=1, extra_body={"truncate": True}
        )
    assert [item.embedding for item in found.data] == [[1.0], [3.0]] and found.model == "m"
    body = server.bodies()[-1]
    assert body["input"] == ["a", "bcd"] and body["dimensions"] == 1 and body["truncate"] is True


async def test_another_replica_is_asked_where_one_fails(servers: Servers, door: Any) -> None:
    one, other = servers(2)
    one.control(fault="status", fault_status=500)
    async with door(config_of({"g": group_of([one, other])})) as served:
        for _ in range(6):
            answer = await served.client.post("/v1/embeddings", json={"model": "m", "input": "abc"})
            assert answer.status_code == 200 and answer.json()["data"][0]["embedding"] == [3.0]


@pytest.mark.parametrize(
    ("status", "code"), [(404, "no_embeddings"), (501, "no_embeddings"), (422, "refused_by_engine")]
)
async def test_an_engines_refusal_is_400(servers: Servers, door: Any, status: int, code: str) -> None:
    (server,) = servers(1)
    server.control(fault="status", fault_status=status)
    async with door(config_of({"g": group_of([server])})) as served:
        answer = await served.client.post("/v1/embeddings", json={"model": "m", "input": "abc"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == code


async def test_the_embedded_engine_has_none(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        answer = await served.client.post("/v1/embeddings", json={"model": MODEL, "input": "abc"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_embeddings"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"model": None}, "model"),
    ],
)
async def test_what_is_wrong_is_400_and_named(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with serving(tmp_path) as served:
        answer = await served.client.post("/v1/embeddings", json={"model": MODEL, "input": "a", **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
