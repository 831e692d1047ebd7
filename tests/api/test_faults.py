"""Clients that go away, engines that die, servers that stop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from headrace.api.gateway import RESTART_WAIT_S
from headrace.config.schema import Config
from tests.api.harness import HELLO, FakeTime, Gate, Served, chat_body, config, events, post, serving


async def idle(served: Served) -> None:
    """Until nothing is admitted any more."""
    await served.until(lambda: served.deps.gateway.ledger.empty)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_sequence_with_the_next_step(tmp_path: Path, stream: bool) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        reader, writer = await served.connect()
        writer.write(post("/v1/chat/completions", chat_body(stream=stream)))
        await served.until(lambda: served.deps.gateway.ledger.waiting == 1)
        gate.open(3)
        await served.until(lambda: served.deps.gateway.ledger.running == 1)
        if stream:
            assert b"200 OK" in await reader.readline()
        writer.close()
        await idle(served)
        gate.open(1)
        await served.until(lambda: not served.engine.live_requests)
        metrics = (await served.client.get("/metrics")).text
    assert 'headrace_requests_total{lane="interactive",outcome="aborted"} 1.0' in metrics


async def test_a_client_that_leaves_before_the_first_token_frees_its_sequence(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        _, writer = await served.connect()
        writer.write(post("/v1/completions", {"model": "alias", "prompt": ["a", "b"], "n": 2}))
        await served.until(lambda: len(served.engine.live_requests) == 4)
        writer.close()
        await idle(served)
        gate.open(1)
        await served.until(lambda: not served.engine.live_requests)


async def test_a_client_that_pipelines_and_leaves_frees_its_sequence(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        _, writer = await served.connect()
        request = post("/v1/chat/completions", chat_body(stream=True))
        writer.write(request + request)
        await served.until(lambda: len(served.engine.live_requests) == 1)
        writer.close()
        await idle(served)
        gate.open(1)
        await served.until(lambda: not served.engine.live_requests)


@pytest.mark.parametrize("stream", [True, False])
async def test_engine_death_before_the_first_byte_is_not_seen(tmp_path: Path, stream: bool) -> None:
    gate, asleep, awake = Gate(), asyncio.Event(), asyncio.Event()

    async def sleep(_: float) -> None:
        asleep.set()
        await awake.wait()

    async with serving(tmp_path, pace=gate, sleep=sleep) as served:
        answer = asyncio.create_task(served.chat(stream=stream))
        await served.until(lambda: len(served.engine.live_requests) == 1)
        served.engine.kill()
        await asleep.wait()
        assert (await served.client.get("/ready")).status_code == 503
        assert (await served.chat()).status_code == 503
        served.engine.revive()
        awake.set()
        gate.open(100)
        response = await answer
        metrics = (await served.client.get("/metrics")).text
    assert response.status_code == 200
    assert "headrace_engine_restarts_total 1.0" in metrics
    if stream:
        chunks = events(response.text)[:-1]
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == HELLO
    else:
        assert response.json()["choices"][0]["message"]["content"] == HELLO


async def test_a_plain_answer_half_made_is_made_again(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        answer = asyncio.create_task(served.chat(n=2))
        await served.until(lambda: len(served.engine.live_requests) == 2)
        gate.open(5)
        await served.until(lambda: served.deps.gateway.ledger.running == 2)
        served.engine.kill()
        served.engine.revive()
        gate.open(100)
        body = (await answer).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == [HELLO, HELLO]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_stays_away_is_503(tmp_path: Path, stream: bool) -> None:
    time = FakeTime()
    async with serving(tmp_path, pace=Gate(), clock=time, sleep=time.sleep) as served:
        answer = asyncio.create_task(served.chat(stream=stream))
        await served.until(lambda: len(served.engine.live_requests) == 1)
        served.engine.kill()
        response = await answer
        health = await served.client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_gone"
    assert int(response.headers["retry-after"]) > 0
    assert time.now_s >= 1000 + RESTART_WAIT_S
    assert health.status_code == 200


async def test_engine_death_in_a_stream_is_an_error_event_without_done(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        answer = asyncio.create_task(served.chat(stream=True, n=2))
        await served.until(lambda: len(served.engine.live_requests) == 2)
        gate.open(3)
        await served.until(lambda: served.deps.gateway.ledger.running == 2)
        served.engine.kill("out of memory")
        response = await answer
        metrics = (await served.client.get("/metrics")).text
    *chunks, last = events(response.text)
    assert chunks
    assert last["error"]["code"] == "engine_gone"
    assert "out of memory" in last["error"]["message"]
    assert 'headrace_requests_total{lane="interactive",outcome="error"} 1.0' in metrics


async def test_drain_refuses_new_requests_and_finishes_running_ones(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        running = asyncio.create_task(served.chat(stream=True))
        await served.until(lambda: len(served.engine.live_requests) == 1)
        drain = asyncio.create_task(served.deps.gateway.drain())
        await served.until(lambda: served.deps.gateway.draining)
        refused = await served.chat()
        ready = await served.client.get("/ready")
        assert not drain.done()
        gate.open(100)
        response = await running
        await drain
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_not_ready")
    assert "retry-after" in refused.headers
    assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
    assert events(response.text)[-1] == "[DONE]"


async def test_what_outlasts_the_drain_ends_with_an_error_event(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        running = asyncio.create_task(served.chat(stream=True))
        await served.until(lambda: len(served.engine.live_requests) == 1)
        gate.open(3)
        await served.until(lambda: served.deps.gateway.ledger.running == 1)
        drain = asyncio.create_task(served.deps.gateway.drain(0.0))
        await served.until(lambda: served.deps.gateway.draining)
        await asyncio.sleep(0)
        gate.open(100)
        response = await running
        await drain
    last = events(response.text)[-1]
    assert "shutting down" in last["error"]["message"]


async def test_a_full_queue_sheds_with_a_retry_after(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, config(max_queue=2), pace=gate) as served:
        waiting = [asyncio.create_task(served.chat()) for _ in range(2)]
        await served.until(lambda: served.deps.gateway.ledger.waiting == 2)
        shed = await served.chat()
        gate.open(100)
        answers = await asyncio.gather(*waiting)
        metrics = (await served.client.get("/metrics")).text
    assert (shed.status_code, shed.json()["error"]["code"]) == (429, "queue_full")
    assert shed.headers["x-headrace-shed-reason"] == "queue_full"
    assert shed.headers["x-headrace-lane"] == "interactive"
    assert int(shed.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in answers] == [200, 200]
    assert 'headrace_requests_total{lane="interactive",outcome="shed"} 1.0' in metrics


def capped(**lane_fields: int) -> Config:
    settings = config()
    lane = msgspec.structs.replace(settings.lanes["interactive"], **lane_fields)
    return msgspec.structs.replace(settings, lanes={**settings.lanes, "interactive": lane})


async def test_a_lane_cap_holds_requests_at_the_door_in_order(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, capped(max_running=1, max_queue=3), pace=gate) as served:
        answers: list[asyncio.Task[httpx.Response]] = []
        for count in range(1, 4):
            answers.append(asyncio.create_task(served.chat(f"number {count}")))
            await served.until(lambda count=count: served.deps.gateway.ledger.waiting == count)  # type: ignore[misc]
        assert len(served.engine.live_requests) == 1
        shed = await served.chat()
        other = asyncio.create_task(served.chat(headers={"x-headrace-lane": "batch"}))
        await served.until(lambda: len(served.engine.live_requests) == 2)
        gate.open(1000)
        statuses = [(await answer).status_code for answer in [*answers, other]]
        prompts = [served.deps.tokenizer.decode(s.prompt_tokens) for s in served.engine.submitted]
    assert statuses == [200] * 4
    assert shed.headers["x-headrace-shed-reason"] == "lane_queue_full"
    assert [prompt.split()[2] for prompt in prompts if "number" in prompt] == ["1", "2", "3"]


async def test_a_held_client_that_leaves_gives_up_its_turn(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, capped(max_running=1), pace=gate) as served:
        first = asyncio.create_task(served.chat())
        await served.until(lambda: len(served.engine.live_requests) == 1)
        _, writer = await served.connect()
        writer.write(post("/v1/chat/completions", chat_body()))
        await served.until(lambda: served.deps.gateway.ledger.lane("interactive").held == 1)
        last = asyncio.create_task(served.chat())
        await served.until(lambda: served.deps.gateway.ledger.lane("interactive").held == 2)
        writer.close()
        await served.until(lambda: served.deps.gateway.ledger.lane("interactive").held == 1)
        gate.open(1000)
        assert [(await first).status_code, (await last).status_code] == [200, 200]


async def test_held_requests_are_refused_when_the_server_drains(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(tmp_path, capped(max_running=1), pace=gate) as served:
        first = asyncio.create_task(served.chat())
        await served.until(lambda: len(served.engine.live_requests) == 1)
        held = asyncio.create_task(served.chat())
        await served.until(lambda: served.deps.gateway.ledger.lane("interactive").held == 1)
        drain = asyncio.create_task(served.deps.gateway.drain())
        response = await held
        gate.open(100)
        assert (await first).status_code == 200
        await drain
    assert response.status_code == 503
