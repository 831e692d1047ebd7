"""Two minutes of what the open internet does to a server: clients that vanish, send rubbish, read slowly."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from benchmarks.harness import Served, headrace_server
from headrace.lanes.defaults import default_lanes

CLIENTS = 200
DURATION_S = 120.0
MALFORMED = [
    b"{",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b'{"model":"smollm2"}',
    b'{"model":"smollm2","messages":[]}',
    b'{"model":"smollm2","messages":"hello"}',
    b'{"model":"nope","messages":[{"role":"user","content":"x"}]}',
    b'{"model":"smollm2","messages":[{"role":"user","content":"x"}],"temperature":9}',
    b'{"model":"smollm2","messages":[{"role":"user","content":"x"}],"max_tokens":-1}',
    b"[" * 5000,
]


@dataclass
class Tally:
    """What the clients saw."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def _body(random_source: random.Random) -> dict[str, object]:
    words = " ".join(random_source.choice(["river", "stone", "mill", "gate", "流水"]) for _ in range(20))
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Write about: {words}"}],
        "max_tokens": random_source.randint(1, 24),
        "temperature": 0.8,
    }


async def _kept(client: httpx.AsyncClient, tally: Tally, random_source: random.Random) -> None:
    """A well-formed request that is read to its end: it must be answered, or told to come back."""
    stream = random_source.random() < 0.5
    response = await client.post("/v1/chat/completions", json={**_body(random_source), "stream": stream})
    if response.status_code == 429:
        if float(response.headers["retry-after"]) <= 0:
            tally.problems.append("429 without a positive Retry-After")
        tally.counts["shed"] += 1
        return
    answered = response.text.rstrip().endswith("[DONE]") if stream else "choices" in response.json()
    if response.status_code != 200 or not answered:
        tally.problems.append(f"kept request: {response.status_code} {response.text[-200:]}")
    tally.counts["answered"] += 1


async def _vanish(served: Served, tally: Tally, random_source: random.Random) -> None:
    """Connect, send all or half of a request, read a little or nothing, hang up without a word."""
    reader, writer = await asyncio.open_connection(served.host, served.port)
    payload = json.dumps({**_body(random_source), "stream": True, "max_tokens": 200}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
    writer.write(head + payload[: random_source.choice([len(payload), len(payload) // 2])])
    await writer.drain()
    try:
        async with asyncio.timeout(random_source.random()):
            await reader.read(random_source.choice([1, 100, 5000]))
    except TimeoutError:
        pass
    writer.transport.abort()
    tally.counts["vanished"] += 1


async def _malformed(client: httpx.AsyncClient, tally: Tally, random_source: random.Random) -> None:
    """Rubbish must be answered with a 4xx in the API's own form."""
    response = await client.post(
        "/v1/chat/completions",
        content=random_source.choice(MALFORMED),
        headers={"content-type": "application/json"},
    )
    if not 400 <= response.status_code < 500 or "message" not in response.json()["error"]:
        tally.problems.append(f"malformed: {response.status_code} {response.text[:200]}")
    tally.counts["malformed"] += 1


async def _slow_reader(served: Served, tally: Tally, random_source: random.Random) -> None:
    """Read a few bytes at a time; the answer must still come whole."""
    reader, writer = await asyncio.open_connection(served.host, served.port, limit=256)
    payload = json.dumps({**_body(random_source), "stream": True}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        + f"Content-Length: {len(payload)}\r\n\r\n".encode()
        + payload
    )
    tail, first = b"", b""
    while data := await reader.read(64):
        first = first or data
        tail = (tail + data)[-200:]
        await asyncio.sleep(0.005)  # this client's slowness, not a wait for the server
    writer.close()
    if b" 429 " in first:
        tally.counts["shed"] += 1
        return
    if b"[DONE]" not in tail:
        tally.problems.append(f"slow reader: ends with {tail!r}")
    tally.counts["slow"] += 1


async def _client(served: Served, number: int, until_s: float, tally: Tally) -> None:
    random_source = random.Random(number)
    async with httpx.AsyncClient(base_url=served.base_url, timeout=120.0) as client:
        while time.monotonic() < until_s:
            kind = random_source.random()
            if kind < 0.6:
                await _kept(client, tally, random_source)
            elif kind < 0.75:
                await _vanish(served, tally, random_source)
            elif kind < 0.9:
                await _malformed(client, tally, random_source)
            else:
                await _slow_reader(served, tally, random_source)


def _resident_bytes(served: Served) -> int:
    gateway = psutil.Process(served.pid)
    return int(sum(process.memory_info().rss for process in [gateway, *gateway.children()]))


async def _metric(served: Served, name: str) -> float:
    async with httpx.AsyncClient(base_url=served.base_url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
async def test_two_minutes_of_hostile_clients_leave_nothing_behind(tmp_path: Path) -> None:
    """200 clients for two minutes: memory flat, no stuck slot, every well-formed kept request answered.

    The lanes queue: with their usual `overload: shed` nearly all of so many clients would be refused at once, and the
    engine would have a quiet time.
    """
    config = tmp_path / "headrace.yaml"
    lanes = {name: {"overload": "queue"} for name in default_lanes()}
    # A store that is full before memory is looked at: what it may take is no leak.
    stores = {"kv_tiers": {"ram_bytes": 8 * 2**20}}
    config.write_text(yaml.safe_dump({"lanes": lanes, "engine": stores}))
    with headrace_server(["--log-level", "warning", "--config", str(config)]) as served:
        tally = Tally()
        # A quarter of the time fills caches, allocator pools and every band; flat is measured after it.
        await asyncio.gather(
            *[_client(served, 1000 + n, time.monotonic() + DURATION_S / 4, tally) for n in range(CLIENTS)]
        )
        before_bytes = _resident_bytes(served)
        await asyncio.gather(*[_client(served, n, time.monotonic() + DURATION_S, tally) for n in range(CLIENTS)])
        after_bytes = _resident_bytes(served)
        print(f"{dict(tally.counts)}; resident {before_bytes / 1e6:.0f} -> {after_bytes / 1e6:.0f} MB")

        assert not tally.problems[:5], f"{len(tally.problems)} problems"
        assert tally.counts["answered"] > CLIENTS
        async with httpx.AsyncClient(base_url=served.base_url, timeout=60.0) as client:
            answer = await client.post("/v1/chat/completions", json=_body(random.Random(0)))
            assert answer.status_code == 200
        assert await _metric(served, "headrace_requests_running") == 0
        assert await _metric(served, "headrace_requests_waiting") == 0
        assert await _metric(served, "headrace_kv_used_tokens") == 0
        # Seen over 2,000 requests: 3 MB less and 2 MB more. What comes and goes is the table of 590 KB that libllama's
        # sampler keeps for each running sequence, up to 16 of them at once, so a swing of 10 MB is none of a leak. The
        # bound still tells one of 8 KB per request: a sequence's tokens and text, or its exchange in a cycle.
        assert after_bytes < before_bytes + 16_000_000
