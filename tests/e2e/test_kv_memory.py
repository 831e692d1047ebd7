"""Documents at once in a KV budget that holds two, on real processes: all finish, and it can be seen why."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import headrace_server
from headrace.models.tiny import make_tiny_gguf

DOCUMENT_TOKENS, OUTPUT_TOKENS = 12_300, 60
ONE = 12_416
BYTES_PER_TOKEN = 512
"""Of the synthetic model: 2 layers, 2 heads of 32 keys and 32 values, F16."""


def configuration(folder: Path) -> Path:
    """Five streams for documents; the budget has room for two of them."""
    file = folder / "headrace.yaml"
    settings: dict[str, Any] = {
        # Nobody is shed for its part of the engine: memory alone decides here.
        "lanes": {"batch": {"overload": "queue"}},
        "model": {"source": str(make_tiny_gguf(folder / "tiny.gguf")), "name": "tiny"},
        "engine": {
            "bands": [
                {"max_context_tokens": 1024, "max_sequences": 16},
                {"max_context_tokens": 13_312, "max_sequences": 5},
            ],
            "kv_memory": {
                "budget_bytes": int(2 * ONE / 0.84) * BYTES_PER_TOKEN,
                "parked_bytes": 0,
                "spill_dir": str(folder / "spill"),
            },
        },
    }
    file.write_text(json.dumps(settings), encoding="utf-8")
    return file


def prompt(number: int, tokens: int) -> list[int]:
    return [300 + (number * 37 + 11 * at) % 150 for at in range(tokens)]


def samples(text: str) -> dict[str, float]:
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line and not line.startswith("#")
    }


async def test_five_documents_in_a_budget_of_two_all_finish(tmp_path: Path) -> None:
    """They wait or are parked; a burst of short requests is served meanwhile; another document is told to come back.
    What was spilled is gone when the server has ended."""
    used: list[float] = []
    refused: httpx.Response | None = None
    with headrace_server(["--config", str(configuration(tmp_path))]) as served:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=120) as client:

            async def ask(number: int, tokens: int, output: int, lane: str) -> httpx.Response:
                body = {
                    "model": "tiny",
                    "prompt": prompt(number, tokens),
                    "max_tokens": output,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                return await client.post("/v1/completions", json=body, headers={"x-headrace-lane": lane})

            documents = [
                asyncio.create_task(ask(number, DOCUMENT_TOKENS, OUTPUT_TOKENS, "long")) for number in range(5)
            ]
            short: list[asyncio.Task[httpx.Response]] = []
            while not all(task.done() for task in documents):
                seen = samples((await client.get("/metrics")).text)
                used.append(seen.get("headrace_kv_used_tokens", 0.0))
                if refused is None and seen.get('headrace_kv_level{level="refuse"}') == 1:
                    refused = await ask(9, DOCUMENT_TOKENS, 4, "long")
                    short = [asyncio.create_task(ask(20 + number, 60, 200, "batch")) for number in range(20)]
                await asyncio.sleep(0.05)
            answers = [await task for task in documents]
            brief = [await task for task in short]
            end = samples((await client.get("/metrics")).text)
            account = (await client.get("/admin/kv")).json()
    assert [answer.status_code for answer in answers] == [200] * 5
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {OUTPUT_TOKENS}
    assert refused is not None and refused.status_code == 429
    assert refused.headers["x-headrace-kv-level"] in ("refuse", "move")
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in brief] == [200] * 20
    assert max(used) <= end["headrace_kv_budget_tokens"]
    assert end['headrace_kv_level_entered_total{level="refuse"}'] >= 1
    assert account["level"] == "normal" and account["integrity"] is None
    assert end["headrace_kv_parked_total"] <= end["headrace_kv_spills_total"] + end["headrace_kv_dropped_total"]
    assert list((tmp_path / "spill").iterdir()) == []
