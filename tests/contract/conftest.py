"""Engines under the contract: how to start each, and what to give it."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from benchmarks.programmable_engine import EngineProcess
from headrace.config.groups import GroupConfig, ReplicaConfig
from headrace.config.schema import Config
from headrace.engines.fleet.fleet import Fleet
from headrace.engines.llama.client import EngineTimeouts, LlamaEngine
from headrace.engines.protocol import Engine
from headrace.engines.remote.connection import Address
from headrace.engines.remote.engine import RemoteEngine, RemoteSettings
from headrace.engines.remote.request_body import Dialect
from headrace.engines.scripted import ScriptedEngine, text_script
from headrace.messages.engine import SamplingParams, SequenceOutput, Start, Submit
from headrace.models.tiny import make_tiny_gguf
from headrace.scheduling.knobs import SchedulingKnobs

SEQUENCES = 8
CONTEXT_TOKENS = 32_768
"""So long that a sequence without a limit outlives every test, however slow the machine."""


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic model's file."""
    return make_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def start_message(path: Path) -> Start:
    """One thread: two that wait for each other crawl while other tests keep a core busy."""
    return Start(
        model_path=str(path),
        model_name="tiny",
        bands=[(512, SEQUENCES), (CONTEXT_TOKENS, 2)],
        scheduling=SchedulingKnobs(step_tokens=128, max_prefill_tokens=64, strategy="continuous"),
        threads=1,
        self_measure=False,
    )


@dataclass
class Bench:
    """An engine and the requests that a test gives it."""

    engine: Engine
    numbers: itertools.count[int]

    def request(self, *, max_tokens: int | None = 5, prompt_tokens: int = 6, request_id: str | None = None) -> Submit:
        """A request that goes on until ``max_tokens``."""
        return Submit(
            request_id=request_id or f"r{next(self.numbers)}",
            prompt_tokens=[50] * prompt_tokens,
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            lane="interactive",
            priority=0,
            max_tokens=max_tokens,
            arrived_s=time.monotonic(),
        )

    async def outputs(self, request: Submit) -> list[SequenceOutput]:
        """Everything that comes out."""
        return [output async for output in self.engine.submit(request)]

    async def begin(self, request: Submit) -> AsyncIterator[SequenceOutput]:
        """A stream whose first output has come: the sequence runs."""
        stream = self.engine.submit(request)
        output = await anext(stream)
        assert output.finish is None
        return stream


@contextlib.asynccontextmanager
async def llama(
    path: Path,
    timeouts: EngineTimeouts | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    prefix_cache: bool = True,
) -> AsyncIterator[LlamaEngine]:
    """A started embedded engine, closed at the end."""
    start = msgspec.structs.replace(start_message(path), prefix_cache=prefix_cache)
    engine = LlamaEngine(start, timeouts or EngineTimeouts(), clock=clock)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "llama": lambda path: LlamaEngine(start_message(path)),
    "scripted": lambda _: ScriptedEngine(
        text_script("the river "),
        clock=time.monotonic,
        max_sequences=SEQUENCES,
        max_context_tokens=CONTEXT_TOKENS,
    ),
}
"""Every engine that keeps the protocol and needs no server. A new one is added here and gets the whole suite."""


REMOTE, FLEET = "remote", "fleet"


@pytest.fixture(scope="session")
def programmable_engine() -> Iterator[EngineProcess]:
    """A server for the remote engine, in a process of its own."""
    program = {"places": SEQUENCES, "max_context_tokens": CONTEXT_TOKENS, "itl_s": 0.0005, "tokens": 10**6}
    process = EngineProcess(program)
    yield process
    process.kill()


@pytest.fixture(params=[*ENGINES, REMOTE, FLEET])
def new_engine(request: pytest.FixtureRequest, tiny_gguf: Path) -> Engine:
    """An engine that has not been started."""
    if request.param == REMOTE:
        process: EngineProcess = request.getfixturevalue("programmable_engine")
        settings = RemoteSettings(Address.of(process.url), Dialect("vllm"), max_sequences=SEQUENCES)
        return RemoteEngine(settings)
    if request.param == FLEET:
        process = request.getfixturevalue("programmable_engine")
        group = GroupConfig(kind="vllm", model="m", replicas=(ReplicaConfig(process.url),), max_in_flight=2 * SEQUENCES)
        return Fleet(Config(groups={"only": group}))
    return ENGINES[request.param](tiny_gguf)


@pytest.fixture
async def bench(new_engine: Engine) -> AsyncIterator[Bench]:
    """A started engine; after each test it must still be sound, then it is closed."""
    ready = await new_engine.start()
    assert new_engine.ready == ready
    yield Bench(new_engine, itertools.count())
    if new_engine.ready is not None:
        assert (await new_engine.snapshot()).integrity is None
    await new_engine.close()
