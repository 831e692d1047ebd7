"""Which HTTP client reads streams with the least processor time: the choice for remote engines.

``python -m benchmarks.http_clients`` reads 64-token streams, 100 at once, from a programmable engine in another process
with headrace's client over httptools, with aiohttp and with httpx, all on uvloop, and says events per CPU-second of
this process. Each one only counts events.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import aiohttp
import httpx
import msgspec

from benchmarks.harness import report
from benchmarks.programmable_engine import EngineProcess
from headrace.engines.remote.connection import Address, Pool, post
from headrace.errors import RemoteFailure

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "stream": True}
PATH = "/v1/chat/completions"
AT_ONCE = 100


class _Counter:
    def __init__(self) -> None:
        self.events = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        assert status == 200

    def body(self, piece: bytes) -> None:
        self.events += piece.count(b"\n\n")

    def ended(self, problem: RemoteFailure | None) -> None:
        assert problem is None
        self.done.set_result(None)


async def with_httptools(url: str, requests: int) -> int:
    address = Address.of(url)
    pool = Pool(address, clock=time.monotonic, connect_s=5.0)
    message = post(address, PATH, b"", msgspec.json.encode(BODY))

    async def one() -> int:
        counter = _Counter()
        connection = pool.take() or await pool.connect()
        connection.send(message, counter)
        await counter.done
        return counter.events

    events = await _at_once(one, requests)
    pool.close()
    return events


async def with_aiohttp(url: str, requests: int) -> int:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:

        async def one() -> int:
            events = 0
            async with session.post(url + PATH, json=BODY) as response:
                async for piece in response.content.iter_any():
                    events += piece.count(b"\n\n")
            return events

        return await _at_once(one, requests)


async def with_httpx(url: str, requests: int) -> int:
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:

        async def one() -> int:
            events = 0
            async with client.stream("POST", url + PATH, json=BODY) as response:
                async for piece in response.aiter_raw():
                    events += piece.count(b"\n\n")
            return events

        return await _at_once(one, requests)


async def _at_once(one: Callable[[], Awaitable[int]], requests: int) -> int:
    places = asyncio.Semaphore(AT_ONCE)

    async def placed() -> int:
        async with places:
            return await one()

    return sum(await asyncio.gather(*(placed() for _ in range(requests))))


def main() -> None:
    """Measure and report."""
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    engine = EngineProcess({"itl_s": 0.005, "tokens": 64, "places": 1000})
    clients = {"httptools": with_httptools, "aiohttp": with_aiohttp, "httpx": with_httpx}
    found: dict[str, list[float]] = {name: [] for name in clients}
    try:
        for _ in range(arguments.rounds):
            for name, client in clients.items():
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    before_s = time.process_time()
                    events = runner.run(client(engine.url, arguments.requests))
                    found[name].append(events / (time.process_time() - before_s))
    finally:
        engine.kill()
    rows = [
        [name, f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f}-{max(rates):,.0f}"]
        for name, rates in found.items()
    ]
    report("http_clients", "python -m benchmarks.http_clients", ["client", "events/CPU-s", "range"], rows, found)


if __name__ == "__main__":
    main()
