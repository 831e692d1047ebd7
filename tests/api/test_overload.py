"""Admission by prediction, seen from outside: what is accepted, degraded and shed, and how the answer says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from headrace.config.schema import Config, Tenant
from headrace.engines.scripted import LearnedRates
from headrace.lanes.lane import SLO, Fallback, Lane
from headrace.messages.engine import SelfMeasurement
from tests.api.harness import FakeTime, Gate, Served, config, serving

MEASURED = SelfMeasurement(prefill_tokens_per_s=1000.0, decode_tokens_per_s=50.0, step_overhead_s=0.001)
"""1 ms a prompt token, and the scripted tokenizer makes one of every character."""


def with_lane(**lane: object) -> Config:
    """Every request in one lane of these settings, besides the default lanes."""
    base = config()
    lanes = {**base.lanes, "one": Lane(priority=10, **lane)}  # type: ignore[arg-type]
    return msgspec.structs.replace(base, lanes=lanes, default_lane="one")


@asynccontextmanager
async def behind_a_long_prompt(
    tmp_path: Path, settings: Config, *, learned: LearnedRates | None = None
) -> AsyncIterator[tuple[Served, Gate]]:
    """A server on which the clock stands still and a prompt of 3,000 tokens waits for its first step."""
    gate, time = Gate(), FakeTime()
    async with serving(
        tmp_path, settings, pace=gate, clock=time, sleep=time.sleep, measurement=MEASURED, learned=learned
    ) as served:
        first = asyncio.create_task(served.complete("x" * 3000))
        await served.until(lambda: served.deps.gateway.ledger.waiting == 1)
        try:
            yield served, gate
        finally:
            gate.open(1000)
            assert (await first).status_code == 200


async def finished(gate: Gate, answer: asyncio.Task[httpx.Response]) -> httpx.Response:
    gate.open(1000)
    return await answer


async def accepted(served: Served, answer: asyncio.Task[httpx.Response]) -> None:
    """Until a request is in the engine (or, wrongly, answered)."""
    await served.until(lambda: served.deps.gateway.ledger.waiting == 2 or answer.done())
    assert not answer.done(), answer.result().text


async def test_a_request_that_would_come_too_late_is_shed_with_the_time_to_come_back(tmp_path: Path) -> None:
    """The first token would come in 3.1 s, the target is 0.2 s and ten times that the patience."""
    async with behind_a_long_prompt(tmp_path, with_lane(slo=SLO(p99_ttft_s=0.2))) as (served, _):
        shed = await served.complete("x" * 100)
        text = (await served.client.get("/metrics")).text
    assert shed.status_code == 429
    assert shed.headers["x-headrace-shed-reason"] == "predicted_late"
    assert shed.headers["retry-after"] == "3"
    error = shed.json()["error"]
    assert (error["code"], error["type"]) == ("predicted_late", "rate_limit_error")
    assert "first token is predicted in 3.1 s" in error["message"]
    assert 'headrace_admissions_total{decision="accept",lane="one"} 1.0' in text
    assert 'headrace_admissions_total{decision="shed",lane="one"} 1.0' in text
    assert 'headrace_sheds_total{lane="one",reason="predicted_late"} 1.0' in text
    assert 'headrace_predicted_ttft_seconds_count{lane="one"} 2.0' in text
    assert 'headrace_requests_total{lane="one",outcome="shed"} 1.0' in text


@pytest.mark.parametrize(
    "lane",
    [
        {"slo": SLO(p99_ttft_s=0.2), "overload": "queue"},
        {"slo": SLO(p99_ttft_s=0.2), "patience": 16.0},
        {"slo": SLO(p99_ttft_s=0.4)},
        {},
    ],
)
async def test_what_queues_has_patience_or_has_no_target_is_accepted(tmp_path: Path, lane: dict[str, object]) -> None:
    async with behind_a_long_prompt(tmp_path, with_lane(**lane)) as (served, gate):
        answer = asyncio.create_task(served.complete("x" * 100))
        await accepted(served, answer)
        response = await finished(gate, answer)
    assert response.status_code == 200
    assert response.headers["x-headrace-predicted-ttft-ms"] == "3100"


async def test_a_requests_own_target_counts(tmp_path: Path) -> None:
    async with behind_a_long_prompt(tmp_path, with_lane()) as (served, _):
        shed = await served.chat(headers={"x-slo-ttft-ms": "100"})
    assert shed.headers["x-headrace-shed-reason"] == "predicted_late"


async def test_a_more_urgent_request_does_not_wait_and_is_not_shed(tmp_path: Path) -> None:
    async with behind_a_long_prompt(tmp_path, with_lane()) as (served, gate):
        answer = asyncio.create_task(served.chat("x" * 82, headers={"x-headrace-lane": "realtime"}))
        await accepted(served, answer)
        response = await finished(gate, answer)
    assert response.headers["x-headrace-predicted-ttft-ms"] == "100"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_degraded_answer_is_shorter_and_says_so(tmp_path: Path, stream: bool) -> None:
    """Behind 3 s of prompts, 100 tokens of 20 ms and more would end after 5 s; three tokens end in time."""
    settings = with_lane(
        slo=SLO(p99_e2e_s=2.2),
        patience=2.0,
        overload="degrade",
        fallback=Fallback(max_tokens=3),
        typical_output_tokens=100,
    )
    async with behind_a_long_prompt(tmp_path, settings) as (served, gate):
        answer = asyncio.create_task(served.chat(stream=stream))
        await accepted(served, answer)
        response = await finished(gate, answer)
        asked = served.engine.submitted[-1]
        text = (await served.client.get("/metrics")).text
    assert response.headers["x-headrace-degraded"] == "max_tokens=3"
    assert (asked.max_tokens, asked.expected_tokens) == (3, 3)
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 3
        assert response.json()["choices"][0]["finish_reason"] == "length"
    assert 'headrace_admissions_total{decision="degrade",lane="one"} 1.0' in text


async def test_a_wait_that_a_shorter_answer_does_not_shorten_is_shed(tmp_path: Path) -> None:
    settings = with_lane(slo=SLO(p99_ttft_s=0.2), overload="degrade", fallback=Fallback(max_tokens=3))
    async with behind_a_long_prompt(tmp_path, settings) as (served, _):
        shed = await served.chat()
    assert shed.headers["x-headrace-shed-reason"] == "predicted_late"


async def test_another_tenants_flood_does_not_shed_a_calm_one(tmp_path: Path) -> None:
    base = with_lane(slo=SLO(p99_ttft_s=0.2))
    settings = msgspec.structs.replace(base, tenants={"calm": Tenant()})
    async with behind_a_long_prompt(tmp_path, settings) as (served, gate):
        flooding = await served.chat()
        calm = asyncio.create_task(served.chat("x" * 82, headers={"x-tenant-id": "calm"}))
        await accepted(served, calm)
        response = await finished(gate, calm)
    assert flooding.status_code == 429
    assert response.headers["x-headrace-predicted-ttft-ms"] == "200"


async def test_what_the_engine_has_learned_replaces_what_was_measured_at_start(tmp_path: Path) -> None:
    learned = LearnedRates(prefill_tokens_per_s=100.0, decode_step_s=0.02)
    time = FakeTime()
    async with serving(
        tmp_path, with_lane(), clock=time, sleep=time.sleep, measurement=MEASURED, learned=learned
    ) as served:
        before = await served.complete("x" * 500, max_tokens=1)
        after = await served.complete("x" * 500, max_tokens=1)
    assert before.headers["x-headrace-predicted-ttft-ms"] == "500"
    # Ten times slower, and corrected by what the first answer taught: by a third of it at most.
    assert int(after.headers["x-headrace-predicted-ttft-ms"]) > 1600


async def test_an_engine_that_knows_nothing_of_its_speed_sheds_nothing(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, with_lane(slo=SLO(p99_ttft_s=1e-6)), pace=gate) as served:
        answers = [asyncio.create_task(served.complete("x" * 1000)) for _ in range(20)]
        await served.until(lambda: served.deps.gateway.ledger.waiting == 20)
        gate.open(1000)
        responses = await asyncio.gather(*answers)
    assert {response.status_code for response in responses} == {200}
    assert not any("x-headrace-predicted-ttft-ms" in response.headers for response in responses)


async def test_an_idle_engine_takes_a_request_whatever_its_target(tmp_path: Path) -> None:
    settings = with_lane(slo=SLO(p99_ttft_s=1e-6, p99_e2e_s=1e-6), patience=1.0)
    async with serving(tmp_path, settings, measurement=MEASURED) as served:
        for _ in range(3):
            assert (await served.complete("x" * 3000)).status_code == 200


async def test_lanes_learn_their_output_length_and_how_good_predictions_are(tmp_path: Path) -> None:
    async with serving(tmp_path, with_lane(typical_output_tokens=500), measurement=MEASURED) as served:
        for _ in range(30):
            response = await served.chat()
        tokens = response.json()["usage"]["completion_tokens"]
        expected = served.engine.submitted[-1].expected_tokens
        text = (await served.client.get("/metrics")).text
    assert expected is not None and tokens <= expected < 60
    assert 'headrace_expected_output_tokens{lane="one",statistic="mean"}' in text
    assert 'headrace_ttft_prediction_error_ratio{lane="one"}' in text


async def test_the_engine_is_told_what_is_due_and_what_to_expect(tmp_path: Path) -> None:
    base = with_lane(slo=SLO(p99_ttft_s=1.0, p99_tpot_s=0.2, p99_e2e_s=5.0), typical_output_tokens=40)
    settings = msgspec.structs.replace(base, tenants={"acme": Tenant()})
    time = FakeTime()
    async with serving(tmp_path, settings, clock=time, sleep=time.sleep) as served:
        headers = {"x-tenant-id": "acme", "x-slo-tpot-ms": "50"}
        await served.chat(headers=headers, stream=True)
        await served.chat(max_tokens=7)
        streamed, plain = served.engine.submitted
    assert (streamed.tenant, streamed.tpot_s, streamed.stream) == ("acme", 0.05, True)
    assert (streamed.deadline_s, streamed.finish_by_s) == (time.now_s + 1, time.now_s + 5)
    assert streamed.expected_tokens == 40
    assert (plain.tenant, plain.tpot_s, plain.stream, plain.expected_tokens) == (None, 0.2, False, 7)
