"""Tenants' limits over HTTP: 429 with the limit's name and a true Retry-After, and what costs nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.schema import Config, Tenant
from headrace.errors import EngineGone
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.tenant_metrics import MOST_TENANTS
from tests.api.harness import FakeTime, Gate, Served, chat_body, config, post, serving

KEY = {"authorization": "Bearer secret"}
OTHER_KEY = {"authorization": "Bearer other"}


def limited(other: Tenant | None = None, **limits: Any) -> Config:
    """Tenant ``acme`` with these limits, and ``other`` without any."""
    tenants = {"acme": Tenant(api_keys=("secret",), **limits), "other": other or Tenant(api_keys=("other",))}
    return msgspec.structs.replace(config(), tenants=tenants)


def metric(served: Served, line: str) -> float:
    for found in served.deps.metrics.exposition().decode().splitlines():
        if found.startswith(line + " "):
            return float(found.rsplit(" ", 1)[1])
    return 0.0


async def test_requests_per_minute(tmp_path: Path) -> None:
    """Two at once, then 429 until one has leaked away; the other tenant does not notice."""
    clock = FakeTime()
    async with serving(tmp_path, limited(requests_per_min=6, burst_s=20), clock=clock, sleep=clock.sleep) as served:
        first, second, third = [await served.chat(headers=KEY) for _ in range(3)]
        other = await served.chat(headers=OTHER_KEY)
        clock.now_s += float(third.headers["retry-after"])
        again = await served.chat(headers=KEY)
        refusals = metric(served, 'headrace_tenant_refusals_total{limit="tenant_requests",tenant="acme"}')
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert (other.status_code, again.status_code, refusals) == (200, 200, 1)
    assert third.headers["retry-after"] == "10"
    assert third.headers["x-headrace-shed-reason"] == third.json()["error"]["code"] == "tenant_requests"
    assert third.json()["error"]["type"] == "rate_limit_error"
    assert first.headers["x-ratelimit-limit-requests"] == "6"
    assert [first.headers["x-ratelimit-remaining-requests"], third.headers["x-ratelimit-remaining-requests"]] == [
        "1",
        "0",
    ]
    assert "x-ratelimit-limit-tokens" not in first.headers and "x-ratelimit-limit-requests" not in other.headers


async def test_tokens_per_minute(tmp_path: Path) -> None:
    """Prompt and output count, as they really were."""
    clock = FakeTime()
    async with serving(tmp_path, limited(tokens_per_min=600), clock=clock, sleep=clock.sleep) as served:
        one = await served.client.post(
            "/v1/completions", json={"model": "scripted", "prompt": "x" * 500, "max_tokens": 10}, headers=KEY
        )
        used = one.json()["usage"]["total_tokens"]
        two = await served.client.post(
            "/v1/completions", json={"model": "scripted", "prompt": "x" * 200, "max_tokens": 10}, headers=KEY
        )
        small = await served.client.post(
            "/v1/completions", json={"model": "scripted", "prompt": "x", "max_tokens": 1}, headers=KEY
        )
    assert (one.status_code, two.status_code, small.status_code) == (200, 429, 200)
    assert two.headers["x-headrace-shed-reason"] == "tenant_tokens"
    assert int(two.headers["x-ratelimit-remaining-tokens"]) == 600 - used
    # 210 tokens are asked for and 600 - used are left; ten leak away each second.
    assert int(two.headers["retry-after"]) == -(-(210 - (600 - used)) // 10)


async def test_requests_at_once_and_places_come_back(tmp_path: Path) -> None:
    """A client that leaves gives its place back."""
    gate = Gate()
    async with serving(tmp_path, limited(max_concurrent=1), pace=gate) as served:
        _, writer = await served.connect()
        writer.write(post("/v1/chat/completions", chat_body(stream=True), "authorization: Bearer secret"))
        await served.until(lambda: bool(served.engine.live_requests))
        refused = await served.chat(headers=KEY)
        running = metric(served, 'headrace_tenant_in_flight{tenant="acme"}')
        writer.transport.abort()
        await served.until(lambda: not served.deps.quotas.in_flight()["acme"])
        gate.open(1000)
        assert (await served.chat(headers=KEY)).status_code == 200
        ended = metric(served, 'headrace_tenant_requests_total{outcome="aborted",tenant="acme"}')
        left = metric(served, 'headrace_tenant_in_flight{tenant="acme"}')
    assert (refused.status_code, refused.headers["x-headrace-shed-reason"]) == (429, "tenant_concurrency")
    assert (running, ended, left) == (1, 1, 0)


async def test_a_slow_body_holds_a_place(tmp_path: Path) -> None:
    """Clients that trickle their bodies cannot be more than the tenant may have at once."""
    async with serving(tmp_path, limited(max_concurrent=1)) as served:
        _, writer = await served.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n")
        writer.write(b"content-length: 100\r\n\r\n{")
        await served.until(lambda: served.deps.quotas.in_flight() == {"acme": 1})
        assert (await served.chat(headers=KEY)).status_code == 429


async def test_what_is_not_the_tenants_fault_costs_nothing_and_what_is_does(tmp_path: Path) -> None:
    """Shed, or failed by the engine: given back. A bad request: counted."""
    async with serving(tmp_path, limited(requests_per_min=1)) as served:
        admit = served.deps.gateway.admit

        async def gone(*_: Any) -> Any:
            raise EngineGone("it died")

        served.deps.gateway.admit = gone  # type: ignore[assignment, method-assign]
        failed = await served.chat(headers=KEY)
        served.deps.gateway.admit = admit  # type: ignore[method-assign]
        bad = await served.client.post("/v1/chat/completions", content=b"{", headers=KEY)
        over = await served.chat(headers=KEY)
    assert (failed.status_code, bad.status_code, over.status_code) == (503, 400, 429)


async def test_a_refusal_is_the_clients_doing(tmp_path: Path) -> None:
    """It counts as rejected, and neither for nor against the lanes' targets."""
    async with serving(tmp_path, limited(tokens_per_min=10)) as served:
        assert (await served.chat("x" * 100, headers=KEY)).status_code == 200
        assert (await served.chat("x" * 100, headers=KEY)).status_code == 429
        rejected = metric(served, 'headrace_requests_total{lane="interactive",outcome="rejected"}')
        violated = served.deps.metrics.goodput.violated
        tokens = metric(served, 'headrace_tenant_tokens_total{kind="prompt",tenant="acme"}')
    assert (rejected, violated) == (1, {})
    assert tokens >= 100


async def test_tokenize_counts_as_a_request(tmp_path: Path) -> None:
    async with serving(tmp_path, limited(requests_per_min=1)) as served:
        answers = [await served.client.post("/tokenize", json={"prompt": "x"}, headers=KEY) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


async def test_a_reload_changes_limits_and_keeps_what_was_used(tmp_path: Path) -> None:
    async with serving(tmp_path, limited(requests_per_min=1)) as served:
        statuses = [(await served.chat(headers=KEY)).status_code for _ in range(2)]
        served.deps.live.swap(limited(requests_per_min=3))
        statuses += [(await served.chat(headers=KEY)).status_code for _ in range(3)]
    assert statuses == [200, 429, 200, 200, 429]


async def test_many_at_once_never_exceed_the_limit(tmp_path: Path) -> None:
    """Fifty together, five may: five run and forty-five are told so."""
    gate = Gate()
    async with serving(tmp_path, limited(max_concurrent=5), pace=gate) as served:
        asked = [asyncio.create_task(served.chat(headers=KEY)) for _ in range(50)]
        await served.until(lambda: sum(task.done() for task in asked) == 45)
        gate.open(1000)
        answers = [(await task).status_code for task in asked]
        assert served.deps.quotas.in_flight() == {"acme": 0}
    assert (answers.count(200), answers.count(429)) == (5, 45)


def test_metrics_have_a_bounded_number_of_tenants() -> None:
    """The first hundred have lines of their own; whatever comes after them shares one."""
    metrics = Metrics("test")
    for number in range(MOST_TENANTS + 50):
        metrics.tenants.entered(f"t{number}")
        metrics.tenants.ended(f"t{number}", "ok", prompt_tokens=1, output_tokens=1)
        metrics.tenants.left(f"t{number}")
    metrics.tenants.ended(None, "ok", prompt_tokens=0, output_tokens=0)
    text = metrics.exposition().decode()
    lines = [line for line in text.splitlines() if line.startswith("headrace_tenant_requests_total{")]
    assert len(lines) == MOST_TENANTS + 2
    assert 'headrace_tenant_requests_total{outcome="ok",tenant="other"} 50.0' in lines
    assert 'headrace_tenant_in_flight{tenant="other"} 0.0' in text
