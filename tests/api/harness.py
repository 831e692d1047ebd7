"""A whole server in the test's event loop, on a free port, over a scripted engine."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from headrace.api.app import create_app
from headrace.api.deps import Deps
from headrace.api.gateway import Gateway, Sleep
from headrace.api.live import LiveConfig
from headrace.api.server import HttpServer, bind, http_server
from headrace.api.store import CompletionStore
from headrace.config.schema import Config, ModelConfig, ServerConfig
from headrace.engines.scripted import (
    LearnedRates,
    Pace,
    Script,
    ScriptedEngine,
    ScriptedTokenizer,
    immediate,
    text_script,
)
from headrace.messages.engine import EngineLoad, SelfMeasurement
from headrace.telemetry.metrics import Metrics

MODEL = "scripted"
HELLO = "Hello from the script."


class Gate:
    """A pace that lets the engine step only when told to."""

    def __init__(self) -> None:
        self._steps = asyncio.Semaphore(0)

    async def __call__(self, _: EngineLoad) -> None:
        await self._steps.acquire()

    def open(self, steps: int) -> None:
        for _ in range(steps):
            self._steps.release()


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


def config(**server: Any) -> Config:
    """A configuration with one scripted model; keywords are server settings."""
    return Config(
        model=ModelConfig(source=MODEL, aliases=("alias",)), server=ServerConfig(host="127.0.0.1", port=0, **server)
    )


@dataclass
class Served:
    """A running server and everything behind it."""

    base_url: str
    port: int
    client: httpx.AsyncClient
    engine: ScriptedEngine
    deps: Deps
    server: HttpServer
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def chat(
        self, content: Any = "hi", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers=headers)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    async def connect(self, *, receive_buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare TCP connection to the server."""
        raw = socket.socket()
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=raw, limit=2**16)
        self.writers.append(writer)
        return reader, writer

    async def until(self, condition: Callable[[], bool]) -> None:
        """Let everything run until the condition holds; the test's timeout bounds it."""
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    folder: Path,
    settings: Config | None = None,
    *,
    script: Script | None = None,
    pace: Pace = immediate,
    clock: Callable[[], float] = time.monotonic,
    sleep: Sleep = asyncio.sleep,
    max_sequences: int = 32,
    max_context_tokens: int = 4096,
    measurement: SelfMeasurement | None = None,
    learned: LearnedRates | None = None,
) -> AsyncIterator[Served]:
    """Serve until the block ends; then the counts must be in order."""
    settings = settings or config()
    engine = ScriptedEngine(
        script or text_script(HELLO),
        clock=clock,
        pace=pace,
        max_sequences=max_sequences,
        max_context_tokens=max_context_tokens,
        measurement=measurement,
        learned=learned,
    )
    await engine.start()
    live = LiveConfig(settings)
    metrics = Metrics("test")
    gateway = Gateway(live, engine, metrics, clock=clock, sleep=sleep)
    ids = itertools.count()
    deps = Deps(
        live=live,
        engine=engine,
        tokenizer=ScriptedTokenizer(),
        gateway=gateway,
        store=CompletionStore(folder, settings.server.max_stored_completions),
        metrics=metrics,
        clock=clock,
        wall_clock=lambda: 1_700_000_000.0,
        new_id=lambda: f"{next(ids):08d}",
        started_at_s=1_600_000_000.0,
    )
    sockets = bind(settings.server)
    port = sockets[0].getsockname()[1]
    server = http_server(create_app(deps), settings.server)
    task = asyncio.create_task(server.serve(sockets=sockets))
    base_url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
        served = Served(base_url, port, client, engine, deps, server)
        try:
            yield served
        finally:
            for writer in served.writers:
                writer.transport.abort()
            server.should_exit = True
            await engine.close()
            await client.aclose()
            await task
    gateway.check_integrity()


def post(path: str, body: Any, *headers: str) -> bytes:
    """An HTTP request as bytes."""
    content = msgspec.json.encode(body)
    lines = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {len(content)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def chat_body(**fields: Any) -> dict[str, Any]:
    """A small valid chat request."""
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}


def events(text: str) -> list[Any]:
    """The data of a server-sent event stream; ``[DONE]`` stays a string."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [item if item == "[DONE]" else msgspec.json.decode(item) for item in data]
