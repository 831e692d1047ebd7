"""What happens when clients leave, the operator stops the server, or the engine process dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from benchmarks.harness import Served

pytestmark = pytest.mark.model
CHAT = "/v1/chat/completions"


def _body(max_tokens: int, **more: object) -> dict[str, object]:
    message = {"role": "user", "content": "Tell me a long story about a mill."}
    return {
        "model": "smollm2",
        "messages": [message],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def _until(condition: str, client: httpx.AsyncClient, limit_s: float) -> float:
    """Poll a path until it answers 200 ("up") or something else ("down"); returns how long that took."""
    path, wanted = condition.rsplit(" ", 1)
    started_s = time.monotonic()
    while time.monotonic() - started_s < limit_s:
        up = (await client.get(path)).status_code == 200
        if up == (wanted == "up"):
            return time.monotonic() - started_s
        await asyncio.sleep(0.01)  # between two polls of a real process
    raise AssertionError(f"{condition}: not within {limit_s} s")


async def _gauge(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


async def test_a_client_that_disconnects_frees_its_sequence_at_once(own_server: Served) -> None:
    """The next step's load report, seen through another request, has no trace of the client that left."""
    async with httpx.AsyncClient(base_url=own_server.base_url, timeout=60) as client:
        async with client.stream("POST", CHAT, json=_body(2000, stream=True)) as response:
            async for _ in _events(response):
                break
        # The probe runs for a few steps; its last load report is of a step after the disconnect was seen.
        await client.post(CHAT, json=_body(8))
        assert await _gauge(client, "headrace_requests_running") == 0
        assert await _gauge(client, "headrace_kv_used_tokens") < 200


async def test_sigterm_lets_running_requests_finish_refuses_new_ones_and_exits_with_0(own_server: Served) -> None:
    """Drain: /ready fails at once, the running stream ends whole, the exit status is 0."""
    async with httpx.AsyncClient(base_url=own_server.base_url, timeout=60) as client:
        async with client.stream("POST", CHAT, json=_body(200, stream=True)) as response:
            events = _events(response)
            await anext(events)
            os.kill(own_server.pid, signal.SIGTERM)
            await _until("/ready down", client, 5)
            refused = await client.post(CHAT, json=_body(4))
            assert refused.status_code == 503
            rest = [event async for event in events]
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert await asyncio.to_thread(own_server.process.wait, 30) == 0


async def test_an_engine_killed_mid_stream_gives_a_clean_error_event_and_comes_back(own_server: Served) -> None:
    """SIGKILL: bytes were sent, so the stream ends with an error event; /ready fails; back in under 30 s."""
    async with httpx.AsyncClient(base_url=own_server.base_url, timeout=60) as client:
        async with client.stream("POST", CHAT, json=_body(2000, stream=True)) as response:
            events = _events(response)
            await anext(events)
            await anext(events)
            os.kill(own_server.engine_pid(), signal.SIGKILL)
            rest = [event async for event in events]
        assert "error" in json.loads(rest[-1])
        assert rest[-1] != "[DONE]"
        await _until("/ready up", client, 30)
        answer = await client.post(CHAT, json=_body(4))
        assert answer.status_code == 200


async def test_a_request_that_sent_no_byte_survives_the_engines_death(own_server: Served) -> None:
    """A non-streaming request has sent nothing yet: it is run again on the new process, and answers."""
    async with httpx.AsyncClient(base_url=own_server.base_url, timeout=90) as client:
        expected = (await client.post(CHAT, json=_body(120))).json()["choices"][0]["message"]["content"]
        running = asyncio.create_task(client.post(CHAT, json=_body(120)))
        while await _gauge(client, "headrace_requests_running") < 1:
            await asyncio.sleep(0.005)  # between two polls of a real process
        os.kill(own_server.engine_pid(), signal.SIGKILL)
        answer = await running
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"] == expected


async def test_ready_fails_while_the_engine_is_gone(own_server: Served) -> None:
    """Between the kill and the new process's ready, /ready says 503 and /health still answers."""
    async with httpx.AsyncClient(base_url=own_server.base_url, timeout=60) as client:
        os.kill(own_server.engine_pid(), signal.SIGKILL)
        await _until("/ready down", client, 5)
        assert (await client.get("/health")).status_code == 200
        assert await _until("/ready up", client, 30) < 30
