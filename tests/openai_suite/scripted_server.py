"""``headrace serve`` with a scripted engine in the model's place: ``scripted_server.py --config FILE``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
import uuid
from pathlib import Path

import uvloop

from headrace import __version__
from headrace.api.app import create_app
from headrace.api.deps import Deps
from headrace.api.gateway import Gateway
from headrace.api.live import LiveConfig
from headrace.api.server import serve_http
from headrace.api.store import CompletionStore
from headrace.config.load import load
from headrace.config.schema import ServerConfig
from headrace.engines.scripted import ScriptedEngine, ScriptedTokenizer, text_script
from headrace.messages.engine import EngineLoad
from headrace.telemetry.metrics import Metrics


async def serve(file: Path, answer: str, step_s: float) -> None:
    config = load(file)
    assert config.server.store_dir is not None, "the configuration must name server.store_dir"

    async def pace(_: EngineLoad) -> None:
        await asyncio.sleep(step_s)

    engine = ScriptedEngine(text_script(answer), clock=time.monotonic, pace=pace)
    await engine.start()
    live = LiveConfig(config)
    metrics = Metrics(__version__)
    gateway = Gateway(live, engine, metrics, clock=time.monotonic)
    deps = Deps(
        live=live,
        engine=engine,
        tokenizer=ScriptedTokenizer(),
        gateway=gateway,
        store=CompletionStore(Path(config.server.store_dir), config.server.max_stored_completions),
        metrics=metrics,
        clock=time.monotonic,
        wall_clock=time.time,
        new_id=lambda: uuid.uuid4().hex,
        started_at_s=time.time(),
    )

    async def reload() -> ServerConfig:
        live.swap(load(file))
        return live.config.server

    def listening(host: str, port: int) -> None:
        print(f"listening on {host}:{port}", flush=True)

    try:
        await serve_http(create_app(deps), gateway, config, reload=reload, on_listening=listening)
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--answer", default="Hello from the script.")
    parser.add_argument("--step-s", type=float, default=0.0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    uvloop.run(serve(given.config, given.answer, given.step_s))


if __name__ == "__main__":
    main()
