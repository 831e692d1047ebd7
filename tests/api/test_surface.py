"""Models, tokenizing, health and metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.harness import HELLO, Gate, config, serving


async def test_models_are_the_name_and_the_aliases(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        listed = (await served.client.get("/v1/models")).json()
        one = (await served.client.get("/v1/models/alias")).json()
        unknown = await served.client.get("/v1/models/gpt/4")
        prefixed = await served.client.get("/realtime/v1/models")
    assert [model["id"] for model in listed["data"]] == ["scripted", "alias"]
    assert (one["id"], one["object"], one["created"], one["owned_by"]) == (
        "alias",
        "model",
        1_600_000_000,
        "headrace",
    )
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert prefixed.json() == listed


async def test_an_alias_can_be_deleted_only_where_allowed(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        refused = await served.client.delete("/v1/models/alias")
    async with serving(tmp_path, config(allow_model_delete=True)) as served:
        main = await served.client.delete("/v1/models/scripted")
        deleted = await served.client.delete("/v1/models/alias")
        again = await served.client.delete("/v1/models/alias")
        gone = await served.complete("x")
        served.deps.live.swap(config())
        back = await served.client.get("/v1/models/alias")
    assert (refused.status_code, main.status_code, again.status_code) == (403, 403, 404)
    assert deleted.json() == {"id": "alias", "object": "model", "deleted": True}
    assert (gone.status_code, back.status_code) == (200, 200)


async def test_tokenize_and_detokenize_are_inverse(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        tokenized = (await served.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        text = (await served.client.post("/detokenize", json={"tokens": tokenized["tokens"]})).json()
        chat = (await served.client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert tokenized == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9"],
    }
    assert text == {"prompt": "hé"}
    assert bytes(chat["tokens"]).decode() == "user: x\nassistant: "


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {"tokens": [999]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**40]}),
        ("/detokenize", {"tokens": "x"}),
    ],
)
async def test_what_cannot_be_tokenized_is_400(tmp_path: Path, path: str, body: object) -> None:
    async with serving(tmp_path) as served:
        assert (await served.client.post(path, json=body)).status_code == 400


async def test_ready_says_why_it_is_not(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        ready = await served.client.get("/ready")
        served.engine.kill()
        dead = await served.client.get("/ready")
        served.engine.revive()
    assert (ready.status_code, dead.status_code) == (200, 503)
    assert dead.json() == {"ready": False, "reason": "engine_not_ready"}


async def test_metrics_count_requests_tokens_and_gaps(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        tokens = (await served.chat()).json()["usage"]["completion_tokens"]
        await served.chat(temperature=9)
        text = (await served.client.get("/metrics")).text
    samples = {
        (sample.name, sample.labels.get("lane"), sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["headrace_requests_total", "interactive", "ok"] == 1
    assert samples["headrace_requests_total", "none", "rejected"] == 1
    assert samples["headrace_generated_tokens_total", "interactive", None] == tokens
    assert samples["headrace_itl_seconds_count", "interactive", "ok"] == tokens - 1
    for name in ("ttft", "tpot", "e2e", "queue_wait"):
        assert samples[f"headrace_{name}_seconds_count", "interactive", "ok"] == 1
    assert samples["headrace_engine_up", None, None] == 1
    assert samples["headrace_engine_step_seconds_count", None, None] > 0
    for name in ("headrace_kv_used_tokens", "headrace_kv_used_bytes", "headrace_kv_used_ratio"):
        assert (name, None, None) in samples


async def test_waiting_and_running_are_told_by_lane(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate, max_sequences=1) as served:
        answers = [asyncio.create_task(served.chat()) for _ in range(2)]
        await served.until(lambda: served.deps.gateway.ledger.waiting == 2)
        gate.open(1)
        await served.until(lambda: served.deps.gateway.ledger.running == 1)
        text = (await served.client.get("/metrics")).text
        gate.open(100)
        await asyncio.gather(*answers)
    assert 'headrace_requests_running{lane="interactive"} 1.0' in text
    assert 'headrace_requests_waiting{lane="interactive"} 1.0' in text


async def test_one_log_line_per_request_without_prompt_or_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.access")
    async with serving(tmp_path) as served:
        await served.chat("hidden words", headers={"authorization": "Bearer hidden-key", "x-request-id": "r1"})
        await served.client.get("/health")
    (record,) = [record for record in caplog.records if record.name == "headrace.access"]
    line = json.loads(record.getMessage())
    assert (line["request_id"], line["lane"], line["outcome"], line["status"]) == ("r1", "interactive", "ok", 200)
    assert line["output_tokens"] > 0 and line["ttft_s"] is not None and line["e2e_s"] >= line["ttft_s"]
    assert "hidden" not in caplog.text and HELLO not in caplog.text
