"""``headrace serve``: the command that puts everything together and runs it."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import platformdirs
from rich.console import Console

from headrace import __version__
from headrace.cli.feasibility_table import feasibility_lines, feasibility_table
from headrace.cli.kv import run_for_serve
from headrace.cli.model import shown_progress
from headrace.cli.ready_report import ready_lines
from headrace.config.load import LoadedConfig, load_with_origins
from headrace.config.scheduling import needs_restart, scheduling_knobs
from headrace.config.schema import Config, KvTiersConfig, ServerConfig
from headrace.errors import ConfigError, EngineNotReady, GateError
from headrace.lanes.feasibility import report
from headrace.messages.engine import Ready, Start, TierPlan
from headrace.models import store

if TYPE_CHECKING:
    from headrace.engines.fleet.fleet import Fleet
    from headrace.engines.protocol import Engine, Tokenizer

log = logging.getLogger("headrace")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The flags; None means not given."""

    config_path: str | None
    model: str | None
    host: str | None
    port: int | None
    log_level: str | None

    def overrides(self) -> dict[str, object]:
        """Flags by the configuration key they stand for."""
        return {
            "model.source": self.model,
            "server.host": self.host,
            "server.port": self.port,
            "log_level": self.log_level,
        }

    def load(self, file: Path | None = None) -> LoadedConfig:
        """Read the configuration with these flags over it, from ``file`` or (None) from where it is looked for. Raises
        ConfigError."""
        return load_with_origins(file or self.config_path, overrides=self.overrides())


@click.command()
@click.option("--config", "config_path", metavar="FILE", help="Configuration file (default: ./headrace.yaml if there).")
@click.option("--model", metavar="NAME|PATH.gguf", help="Model to serve: a name from 'headrace model list' or a GGUF.")
@click.option("--host", metavar="ADDRESS", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on [8000; 0: any free one].")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="Least level to log [info].",
)
def serve(
    config_path: str | None, model: str | None, host: str | None, port: int | None, log_level: str | None
) -> None:
    """Serve a model over HTTP, each request in its lane.

    A model from the catalog is fetched first when it is not installed. SIGTERM or Ctrl-C drains: running
    requests finish, new ones are refused, then the command ends with 0. SIGHUP reads the configuration again.
    """
    options = ServeOptions(config_path, model, host, port, log_level)
    loaded = options.load()
    _set_up_logging(loaded.config.log_level)
    if loaded.file is not None:
        log.info("configuration: %s", loaded.file)
    model_path: Path | None = None
    if loaded.config.embeds_engine:
        with shown_progress() as progress:
            model_path = store.resolve(loaded.config.model.source, progress)
        _pass_gate(loaded.config, model_path)
    # uvloop: the gateway's work per token is taken from the same cores as the arithmetic.
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(options, loaded, model_path))


def _pass_gate(config: Config, model_path: Path) -> None:
    """Raises GateError unless every band's precision has passed the gate for this model, or may be measured now and
    passes."""
    from headrace.evaluate.kv_gate.admit import check, gate_key, gated, missing
    from headrace.evaluate.kv_gate.results import read_results, result_path

    dtypes = gated(band.kv_dtype for band in config.engine.bands)
    if not dtypes:
        return
    if config.engine.kv_gate == "run":
        try:
            absent = missing(dtypes, read_results(result_path(model_path)), gate_key(model_path))
        except GateError as error:
            log.warning("%s", error)
            absent = dtypes
        if absent:
            log.info("measuring KV at %s against f16 first; this takes some minutes", ", ".join(absent))
            run_for_serve(model_path, absent, threads=config.engine.threads, gpu_layers=config.engine.gpu_layers)
    options = "".join(f" --dtype {dtype}" for dtype in dtypes)
    check(model_path, dtypes, f"headrace kv gate --model {shlex.quote(config.model.source)}{options}")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for this system; asyncio's own loop does the same, slower
        return None
    return uvloop.new_event_loop


def _set_up_logging(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Its start and stop messages repeat ours in other words.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def start_message(config: Config, model_path: Path, model_name: str) -> Start:
    """What the engine process is told at its start."""
    engine = config.engine
    return Start(
        model_path=str(model_path),
        model_name=model_name,
        bands=[(band.max_context_tokens, band.max_sequences) for band in engine.bands],
        scheduling=scheduling_knobs(config),
        memory_budget_bytes=engine.memory_budget_bytes,
        threads=engine.threads,
        gpu_layers=engine.gpu_layers,
        self_measure=engine.self_measure,
        prefix_cache=engine.prefix_cache,
        prefix_sharing=engine.prefix_sharing,
        kv_dtypes=[band.kv_dtype for band in engine.bands],
        layouts=[band.layout for band in engine.bands],
        kv_budget_bytes=engine.kv_memory.budget_bytes,
        parked_bytes=engine.kv_memory.parked_bytes,
        spill_dir=engine.kv_memory.spill_dir,
        spill_bytes=engine.kv_memory.spill_bytes,
        kv_tiers=_tier_plan(engine.kv_tiers) if engine.prefix_cache else None,
    )


def _tier_plan(tiers: KvTiersConfig) -> TierPlan | None:
    if tiers.ram_bytes == 0:
        return None
    return TierPlan(tiers.ram_bytes, tiers.disk_path, tiers.disk_bytes, tiers.compress_threshold, tiers.codec)


def _store_folder(config: Config) -> Path:
    if config.server.store_dir is not None:
        return Path(config.server.store_dir).expanduser()
    return Path(platformdirs.user_state_dir("headrace")) / "completions"


async def _serve(options: ServeOptions, loaded: LoadedConfig, model_path: Path | None) -> None:
    # Imported here: the HTTP stack and libllama's bindings are not needed to refuse a bad configuration.
    from headrace.api.app import create_app
    from headrace.api.deps import Deps
    from headrace.api.gateway import Gateway
    from headrace.api.live import LiveConfig
    from headrace.api.no_vocabulary import NoVocabulary
    from headrace.api.server import serve_http
    from headrace.api.store import CompletionStore
    from headrace.api.tls import tls_context
    from headrace.config.model_names import served_model_names
    from headrace.control.loop import TunerLoop
    from headrace.engines.fleet.fleet import Fleet
    from headrace.engines.fleet.webhook import webhook
    from headrace.engines.llama import library
    from headrace.engines.llama.client import EngineTimeouts, LlamaEngine
    from headrace.engines.llama.vocabulary import Vocabulary
    from headrace.telemetry.fleet_metrics import FleetCollector
    from headrace.telemetry.metrics import Metrics

    config = loaded.config
    tls_context(config.server.tls)  # a certificate that cannot be used is told before a model is loaded
    embedded: LlamaEngine | None = None
    if model_path is not None:
        embedded = LlamaEngine(
            start_message(config, model_path, served_model_names(config)[0]),
            EngineTimeouts(config.engine.start_timeout_s, config.engine.stall_timeout_s),
        )
    live = LiveConfig(config)
    metrics = Metrics(__version__)
    fleet: Fleet | None = None
    engine: Engine
    if config.groups:
        post = None if config.fleet.alert_webhook is None else webhook(config.fleet.alert_webhook)
        engine = fleet = Fleet(config, embedded=embedded, version=__version__, post_alerts=post)
        metrics.watch_fleet(FleetCollector(fleet, lambda: iter(live.config.lanes), time.monotonic))
    else:
        assert embedded is not None
        engine = embedded
    gateway = Gateway(live, engine, metrics, clock=time.monotonic)
    tuning = TunerLoop(
        live, metrics, lambda: engine.load, clock=time.monotonic, sleep=asyncio.sleep, randomness=random.Random()
    )
    starting = asyncio.create_task(_start(embedded, fleet), name="headrace-engine-start")
    tuner = asyncio.create_task(tuning.run(), name="headrace-tuner")
    try:
        tokenizer: Tokenizer = NoVocabulary()
        if model_path is not None:
            path = model_path
            tokenizer = await asyncio.to_thread(lambda: Vocabulary.from_file(library.load(), path))
        app = create_app(
            Deps(
                live=live,
                engine=engine,
                tokenizer=tokenizer,
                gateway=gateway,
                store=CompletionStore(_store_folder(config), config.server.max_stored_completions),
                metrics=metrics,
                clock=time.monotonic,
                wall_clock=time.time,
                new_id=lambda: secrets.token_hex(12),
                started_at_s=time.time(),
                fleet=fleet,
            )
        )

        async def reload() -> ServerConfig:
            fresh = _reloaded(options, loaded)
            tls_context(fresh.server.tls)  # what can be refused is tried before anything is put in force
            live.swap(fresh)
            if fleet is not None:
                fleet.reconfigure(live.config)
            logging.getLogger().setLevel(fresh.log_level.upper())
            log.info("configuration read again")
            return fresh.server

        def on_listening(host: str, port: int) -> None:
            shown_host = f"[{host}]" if ":" in host else host
            log.info("listening on %s://%s:%d/v1", _scheme(config), shown_host, port)
            starting.add_done_callback(lambda task: _say_ready(task, config, shown_host, port))

        serving = asyncio.create_task(
            serve_http(app, gateway, config, reload=reload, on_listening=on_listening), name="headrace-http"
        )
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is not None:
            # A model that does not load never will: there is nothing to serve, restarting cannot help.
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            starting.result()
        await serving
    finally:
        if not starting.done():
            starting.cancel()
        tuner.cancel()
        await asyncio.gather(starting, tuner, return_exceptions=True)
        await engine.close()
        if embedded is not None:
            await embedded.close()


async def _start(embedded: Engine | None, fleet: Fleet | None) -> Ready | None:
    """Start the embedded engine, the fleet or both. Remote engines may come later; an embedded one that cannot be
    loaded ends the server, whose exception this is. None: nothing is ready yet."""
    if fleet is None:
        assert embedded is not None
        return await embedded.start()
    if embedded is None:
        return await _start_fleet(fleet)
    ready, _ = await asyncio.gather(embedded.start(), _start_fleet(fleet))
    return ready


async def _start_fleet(fleet: Fleet) -> Ready | None:
    try:
        return await fleet.start()
    except EngineNotReady as error:
        log.warning("%s; trying on", error)
        return None


def _reloaded(options: ServeOptions, started: LoadedConfig) -> Config:
    """The configuration read again. Raises ConfigError when it is wrong or changes what needs a restart. A file that
    was found at start and is gone is an error, not a server without configuration."""
    fresh = options.load(started.file).config
    fixed = needs_restart(started.config, fresh)
    if fixed:
        raise ConfigError(f"{', '.join(fixed)} changed, which needs a restart; nothing was reloaded")
    return fresh


def _say_ready(task: asyncio.Task[Ready | None], config: Config, host: str, port: int) -> None:
    """Tell the person what is being served, in which memory, and which lane targets this machine can meet."""
    if task.cancelled() or task.exception() is not None:
        return
    # What was loaded stays: the collector need not look at it again while tokens wait. It looks for garbage among the
    # old once the new are a quarter of them; the second call tells it that none are left, else cycles that connections
    # leave would pile up to a quarter of everything loaded (ten megabytes).
    gc.collect()
    gc.freeze()
    gc.collect()
    ready = task.result()
    if ready is None:
        log.info("listening at %s://%s:%d/v1; not ready before an engine is", _scheme(config), host, port)
        return
    if config.embeds_engine:
        for line in ready_lines(ready):
            log.info("%s", line)
    if ready.measurement is not None:
        rows = report(config, ready.measurement)
        if sys.stderr.isatty():
            Console(stderr=True).print(feasibility_table(rows))
        else:
            for line in feasibility_lines(rows):
                log.info("%s", line)
    log.info("ready: %s://%s:%d/v1", _scheme(config), host, port)


def _scheme(config: Config) -> str:
    return "http" if config.server.tls.certificate is None else "https"
