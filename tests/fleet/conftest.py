"""A fleet of programmable servers, with the gateway's HTTP edge in front."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from benchmarks.programmable_engine import EngineProcess
from headrace.config.groups import GroupConfig, ProbeConfig, ReplicaConfig, RetryConfig, TimeoutConfig
from headrace.config.schema import Config
from headrace.engines.fleet.fleet import Fleet
from headrace.engines.protocol import Engine, Tokenizer
from headrace.lanes.lane import Lane
from headrace.messages.engine import SamplingParams, SequenceOutput, Submit, WireRequest

MESSAGES = b'[{"role":"user","content":"hi"}]'
_numbers = itertools.count()


@pytest.fixture
def servers() -> Iterator[Callable[..., list[EngineProcess]]]:
    """Starts servers; all are killed at the end."""
    started: list[EngineProcess] = []

    def start(count: int, **program: Any) -> list[EngineProcess]:
        new = [EngineProcess(program) for _ in range(count)]
        started.extend(new)
        return new

    yield start
    for process in started:
        process.kill()


QUICK = ProbeConfig(interval_s=0.1, timeout_s=0.5, rest_s=0.3, max_rest_s=1.0, progress_s=1.0)
LIMITS = TimeoutConfig(connect_s=0.5, first_token_s=1.0, between_tokens_s=1.0, total_s=20.0)


def group_of(processes: Sequence[EngineProcess], **changes: Any) -> GroupConfig:
    """A group of these servers with short times."""
    settings: dict[str, Any] = {
        "kind": "vllm",
        "model": "m",
        "replicas": tuple(ReplicaConfig(process.url) for process in processes),
        "health": QUICK,
        "timeouts": LIMITS,
        "retry": RetryConfig(backoff_s=0.01),
        "queue_wait_s": 5.0,
        "unavailable_wait_s": 1.0,
    }
    return GroupConfig(**{**settings, **changes})


def config_of(groups: dict[str, GroupConfig], **lane: Any) -> Config:
    """One lane, ``chat``."""
    lane.setdefault("group", next(iter(groups)))
    return Config(groups=groups, lanes={"chat": Lane(**lane)}, default_lane="chat")


@contextlib.asynccontextmanager
async def running(config: Config, embedded: Engine | None = None) -> AsyncIterator[Fleet]:
    """A started fleet whose replicas are all well; at the end nothing may be left of any request."""
    fleet = Fleet(config, embedded=embedded, randomness=Random(7))
    await fleet.start()
    replicas = [replica for group in fleet.groups.values() for replica in group.replicas.values()]
    while not all(replica.engine.ready is not None and replica.health.healthy(0.0) for replica in replicas):
        await asyncio.sleep(0.01)
    try:
        yield fleet
        await idle(fleet)
        assert fleet.integrity() is None
        for replica in replicas:
            assert replica.in_flight == 0 and replica.waiting_tokens == 0
    finally:
        await fleet.close()
    assert fleet.live == 0


async def idle(fleet: Fleet) -> None:
    """Wait until no request is live; the test's timeout bounds it."""
    while fleet.live:
        await asyncio.sleep(0.01)


def chat(max_tokens: int | None = 8, **changes: Any) -> Submit:
    """A small chat request."""
    wire = WireRequest(
        "chat",
        changes.pop("messages", MESSAGES),
        changes.pop("fields", b""),
        changes.pop("continuable", True),
    )
    name, priority = f"r{next(_numbers)}", changes.pop("priority", 0)
    sampling = SamplingParams()
    changes.setdefault("estimated_prompt_tokens", 8)
    return Submit(name, [], sampling, "chat", priority, max_tokens, wire=wire, **changes)


async def outputs(fleet: Fleet, request: Submit) -> list[SequenceOutput]:
    return [output async for output in fleet.submit(request)]


def text(found: Sequence[SequenceOutput]) -> str:
    return "".join(output.text for output in found)


def words(count: int) -> str:
    return "".join(f"w{number} " for number in range(count))


@dataclass
class Door:
    """A gateway over HTTP."""

    client: httpx.AsyncClient
    fleet: Fleet
    url: str

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.fixture
def door(tmp_path: Path) -> Callable[..., contextlib.AbstractAsyncContextManager[Door]]:
    """Serves a configuration over HTTP."""
    import time

    import msgspec

    from headrace.api.app import create_app
    from headrace.api.deps import Deps
    from headrace.api.gateway import Gateway
    from headrace.api.live import LiveConfig
    from headrace.api.no_vocabulary import NoVocabulary
    from headrace.api.server import bind, http_server
    from headrace.api.store import CompletionStore
    from headrace.config.schema import ServerConfig
    from headrace.telemetry.fleet_metrics import FleetCollector
    from headrace.telemetry.metrics import Metrics

    @contextlib.asynccontextmanager
    async def serve(
        config: Config, embedded: Engine | None = None, tokenizer: Tokenizer | None = None
    ) -> AsyncIterator[Door]:
        config = msgspec.structs.replace(config, server=ServerConfig(port=0))
        async with running(config, embedded) as fleet:
            live, metrics, ids = LiveConfig(config), Metrics("test"), itertools.count()
            gateway = Gateway(live, fleet, metrics, clock=time.monotonic)
            metrics.watch_fleet(FleetCollector(fleet, lambda: iter(live.config.lanes), time.monotonic))
            deps = Deps(
                live=live,
                engine=fleet,
                tokenizer=tokenizer or NoVocabulary(),
                gateway=gateway,
                store=CompletionStore(tmp_path, 10),
                metrics=metrics,
                clock=time.monotonic,
                wall_clock=time.time,
                new_id=lambda: f"{next(ids):08d}",
                started_at_s=0.0,
                fleet=fleet,
            )
            sockets = bind(config.server)
            url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
            server = http_server(create_app(deps), config.server)
            task = asyncio.create_task(server.serve(sockets=sockets))
            async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                try:
                    yield Door(client, fleet, url)
                finally:
                    await client.aclose()
                    server.should_exit = True
                    await task
            gateway.check_integrity()

    return serve
