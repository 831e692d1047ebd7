"""The embedded engine's process: it may die, hang, or be orphaned, and its model file may be broken."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from headrace.engines.llama.client import EngineTimeouts, LlamaEngine
from headrace.errors import EngineError, EngineGone, EngineNotReady, ModelError
from headrace.messages.engine import EngineMessage, Knobs, SequenceOutput, StepOutput
from headrace.scheduling.knobs import SchedulingKnobs
from tests.contract.conftest import Bench, llama, start_message

BACK_WITHIN_S = 30.0


@pytest.fixture
def step_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every step that the engine reports; the one that takes a sequence in always is."""
    sizes: list[int] = []
    original = LlamaEngine._on_message

    def note(engine: LlamaEngine, message: EngineMessage) -> None:
        if isinstance(message, StepOutput) and message.load is not None and message.load.running:
            sizes.append(message.load.prefill_tokens + message.load.decode_tokens)
        original(engine, message)

    monkeypatch.setattr(LlamaEngine, "_on_message", note)
    return sizes


async def until_back(engine: LlamaEngine, restarts: int) -> float:
    """Seconds until the engine has been restarted ``restarts`` times and is ready."""
    started_s = time.monotonic()
    async with asyncio.timeout(BACK_WITHIN_S):
        while engine.restarts < restarts or engine.ready is None:
            await asyncio.sleep(0.005)
    return time.monotonic() - started_s


def wait_for_exit(pid_fd: int, timeout_s: float) -> bool:
    """True when the process behind the descriptor has ended, reaped or not."""
    poller = select.poll()
    poller.register(pid_fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


async def test_killed_in_mid_stream_it_says_so_and_is_back(tiny_gguf: Path, step_sizes: list[int]) -> None:
    """Running and waiting requests get EngineGone, ``ready`` becomes None, a new process serves the same
    text, and the knobs that were set are set there too."""
    async with llama(tiny_gguf) as engine:
        bench = Bench(engine, itertools.count())
        before = "".join(output.text for output in await bench.outputs(bench.request(max_tokens=30)))
        engine.set_knobs(Knobs(threads=1))
        engine.set_knobs(Knobs(scheduling=SchedulingKnobs(2, 2)))
        readers = [asyncio.create_task(bench.outputs(bench.request(max_tokens=None))) for _ in range(12)]
        while len((await engine.snapshot()).sequences) < 12:
            await asyncio.sleep(0)
        first_pid = engine.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, EngineGone)
        assert engine.ready is None and engine.load is None
        with pytest.raises(EngineNotReady):
            await bench.outputs(bench.request())
        assert await until_back(engine, 1) < BACK_WITHIN_S
        assert engine.pid != first_pid
        after = await bench.outputs(bench.request(max_tokens=30))
        assert "".join(output.text for output in after) == before
        step_sizes.clear()
        await bench.outputs(bench.request(prompt_tokens=40, max_tokens=3))
        assert step_sizes and max(step_sizes) <= 2
        snapshot = await engine.snapshot()
        assert snapshot.sequences == [] and snapshot.integrity is None


async def test_killed_again_and_again_it_comes_back(tiny_gguf: Path) -> None:
    """Idle or not; each time anew."""
    async with llama(tiny_gguf) as engine:
        bench = Bench(engine, itertools.count())
        for restarts in (1, 2, 3):
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await until_back(engine, restarts)
            assert (await bench.outputs(bench.request()))[-1].finish == "length"


async def test_a_snapshot_asked_of_a_dying_engine_does_not_hang(tiny_gguf: Path) -> None:
    """The asker gets EngineGone."""
    async with llama(tiny_gguf) as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        asked = asyncio.create_task(engine.snapshot())
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineGone):
            await asked


class HandClock:
    """Time that passes only when a test says so, and counts how often it was read."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now_s

    async def read_again(self, times: int) -> None:
        """Wait until it was read ``times`` times more."""
        target = self.reads + times
        while self.reads < target:
            await asyncio.sleep(0.005)


STALL = EngineTimeouts(stall_s=0.2)


@pytest.mark.parametrize("work", ["sequence", "snapshot"])
async def test_a_process_that_hangs_is_replaced(tiny_gguf: Path, work: str) -> None:
    """Silent for longer than ``stall_s`` with something asked of it: killed and started anew."""
    clock = HandClock()
    async with llama(tiny_gguf, STALL, clock=clock) as engine:
        bench = Bench(engine, itertools.count())
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        asked: asyncio.Task[object] = (
            asyncio.create_task(bench.outputs(bench.request()))
            if work == "sequence"
            else asyncio.create_task(engine.snapshot())
        )
        await clock.read_again(2)  # it is asked
        clock.now_s = STALL.stall_s - 0.01
        await clock.read_again(4)
        assert not asked.done() and engine.restarts == 0
        clock.now_s += 0.02
        with pytest.raises(EngineGone):
            await asked
        await until_back(engine, 1)
        assert (await bench.outputs(bench.request()))[-1].finish == "length"


async def test_silence_without_work_is_no_hang(tiny_gguf: Path) -> None:
    """An idle engine, and one whose finished stream nobody has read yet, are left alone."""
    clock = HandClock()
    async with llama(tiny_gguf, STALL, clock=clock) as engine:
        bench = Bench(engine, itertools.count())
        unread = engine.submit(bench.request(max_tokens=3))
        await anext(unread)
        while (await engine.snapshot()).sequences:
            await asyncio.sleep(0)
        clock.now_s += 1000.0
        await clock.read_again(4)  # the supervisor looks
        assert engine.ready is not None and engine.restarts == 0
        assert [output.finish async for output in unread][-1] == "length"
        assert (await bench.outputs(bench.request()))[-1].finish == "length"


async def test_close_while_it_restarts(tiny_gguf: Path) -> None:
    """Closing wins: no process is left, nothing comes back."""
    async with llama(tiny_gguf) as engine:
        first_pid = engine.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        second_pid = engine.pid
        while second_pid in (None, first_pid):
            await asyncio.sleep(0)
            second_pid = engine.pid
        assert second_pid is not None
        pid_fd = os.pidfd_open(second_pid)
        await engine.close()
        assert wait_for_exit(pid_fd, 10)
        assert engine.pid is None and engine.ready is None
        os.close(pid_fd)


async def test_close_of_a_hanging_process_ends_it(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not answer the goodbye; it is killed, and its reader gets an error instead of silence."""
    monkeypatch.setattr("headrace.engines.llama.client.CLOSE_TIMEOUT_S", 0.2)
    async with llama(tiny_gguf) as engine:
        bench = Bench(engine, itertools.count())
        stream = await bench.begin(bench.request(max_tokens=None))
        assert engine.pid is not None
        pid_fd = os.pidfd_open(engine.pid)
        os.kill(engine.pid, signal.SIGSTOP)
        await engine.close()
        assert wait_for_exit(pid_fd, 10)
        os.close(pid_fd)
        with pytest.raises(EngineGone):
            async for _ in stream:
                pass


def damaged(source: bytes, how: str) -> bytes:
    match how:
        case "empty":
            return b""
        case "not a GGUF":
            return b"<html>404</html>" * 100
        case "only the magic":
            return source[:4]
        case "header cut":
            return source[:2000]
        case "weights cut":
            return source[: len(source) // 2]
        case "last byte missing":
            return source[:-1]
        case "counts absurd":
            return source[:8] + b"\xff" * 16 + source[24:]
        case "unknown architecture":
            return source.replace(b"llama", b"lamas")
    raise AssertionError(how)


@pytest.mark.parametrize(
    "how",
    [
        "empty",
        "not a GGUF",
        "only the magic",
        "header cut",
        "weights cut",
        "last byte missing",
        "counts absurd",
        "unknown architecture",
    ],
)
async def test_a_broken_model_file_is_a_model_error(tiny_gguf: Path, tmp_path: Path, how: str) -> None:
    """``start`` names the file; no process is left."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(damaged(tiny_gguf.read_bytes(), how))
    engine = LlamaEngine(start_message(path))
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        await engine.start()
    assert engine.pid is None and engine.ready is None
    await engine.close()


async def test_a_missing_model_file_is_a_model_error(tmp_path: Path) -> None:
    """With its path."""
    engine = LlamaEngine(start_message(tmp_path / "nowhere.gguf"))
    with pytest.raises(ModelError, match=r"no model file at .*nowhere\.gguf"):
        await engine.start()
    await engine.close()


async def test_a_file_that_breaks_while_it_serves_is_tried_until_it_is_whole(tiny_gguf: Path, tmp_path: Path) -> None:
    """The restart fails, is repeated, and succeeds once the file is back."""
    path, away = tmp_path / "model.gguf", tmp_path / "away.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    async with llama(path) as engine:
        bench = Bench(engine, itertools.count())
        path.rename(away)
        first_pid = engine.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        while engine.pid in (None, first_pid):
            await asyncio.sleep(0.005)
        failing = engine.pid
        async with asyncio.timeout(BACK_WITHIN_S):
            while engine.pid in (None, failing):  # the next try
                await asyncio.sleep(0.005)
        assert engine.ready is None
        away.rename(path)
        await until_back(engine, 1)
        assert (await bench.outputs(bench.request()))[-1].finish == "length"


async def test_a_start_that_takes_too_long_is_given_up(tiny_gguf: Path) -> None:
    """EngineError names the setting; no process is left."""
    engine = LlamaEngine(start_message(tiny_gguf), EngineTimeouts(start_s=0.001))
    with pytest.raises(EngineError, match=r"engine\.start_timeout_s"):
        await engine.start()
    assert engine.pid is None
    await engine.close()


async def test_a_knob_bounds_the_next_steps(tiny_gguf: Path, step_sizes: list[int]) -> None:
    """A prompt of 60 tokens needs one step with the first limits and twenty with three tokens a step."""
    async with llama(tiny_gguf, prefix_cache=False) as engine:
        bench = Bench(engine, itertools.count())
        await bench.outputs(bench.request(prompt_tokens=60, max_tokens=2))
        assert max(step_sizes) == 60
        engine.set_knobs(Knobs(scheduling=SchedulingKnobs(step_tokens=3)))
        step_sizes.clear()
        await bench.outputs(bench.request(prompt_tokens=60, max_tokens=2))
        assert max(step_sizes) == 3
        with pytest.raises(ValueError, match="step_tokens must be at least 1"):
            engine.set_knobs(Knobs(scheduling=SchedulingKnobs(step_tokens=0)))


async def test_a_prompt_that_it_knows_is_not_computed_again(tiny_gguf: Path, step_sizes: list[int]) -> None:
    """All but its last token is cached; the first output says so, and the load counts it. Another tenant's is not."""
    async with llama(tiny_gguf) as engine:
        bench = Bench(engine, itertools.count())
        tenants = ("a", "a", "b")
        first, second, other = [
            await bench.outputs(msgspec.structs.replace(bench.request(prompt_tokens=60), tenant=tenant))
            for tenant in tenants
        ]
        assert [outputs[0].cached_tokens for outputs in (first, second, other)] == [0, 59, 0]
        assert [output.token_ids for output in first] == [output.token_ids for output in second]
        assert sum(1 for size in step_sizes if size == 60) == 2
        load = engine.load
        assert load is not None and (load.prefix_query_tokens, load.prefix_hit_tokens) == (180, 59)
        snapshot = await engine.snapshot()
        assert snapshot.integrity is None and snapshot.load.idle_residents > 0


async def test_knobs_set_while_it_starts_hold_from_the_first_step(tiny_gguf: Path, step_sizes: list[int]) -> None:
    """A process that has not read its first message does not trip over them, at the first start and the next."""
    engine = LlamaEngine(start_message(tiny_gguf))
    starting = asyncio.create_task(engine.start())
    engine.set_knobs(Knobs(scheduling=SchedulingKnobs(step_tokens=7)))
    while engine._connection is None:
        await asyncio.sleep(0)
    engine.set_knobs(Knobs(scheduling=SchedulingKnobs(step_tokens=3)))
    try:
        await starting
        bench = Bench(engine, itertools.count())
        await bench.outputs(bench.request(prompt_tokens=60, max_tokens=2))
        assert max(step_sizes) == 3
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        while engine.ready is not None:
            await asyncio.sleep(0)
        engine.set_knobs(Knobs(scheduling=SchedulingKnobs(step_tokens=5)))
        await until_back(engine, 1)
        step_sizes.clear()
        await bench.outputs(bench.request(prompt_tokens=60, max_tokens=2))
        assert max(step_sizes) == 5
    finally:
        await engine.close()


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.contract.conftest import start_message
from headrace.engines.llama.client import LlamaEngine
from headrace.messages.engine import SamplingParams, Submit

async def main():
    engine = LlamaEngine(start_message(Path(sys.argv[1])))
    await engine.start()
    if sys.argv[2] == "busy":
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        stream = engine.submit(Submit("r", [50] * 6, sampling, "interactive", 0))
        await anext(stream)
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_it_ends_when_its_gateway_is_killed(tiny_gguf: Path, state: str) -> None:
    """No orphan keeps the memory and the cores, whether it sleeps or computes."""
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tiny_gguf), state],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid_fd = os.pidfd_open(int(parent.stdout.readline()))
        assert not wait_for_exit(pid_fd, 0)
        parent.kill()
        assert wait_for_exit(pid_fd, 10)
        os.close(pid_fd)


async def test_signals_meant_for_the_gateway_do_not_end_it(tiny_gguf: Path) -> None:
    """A Ctrl-C or a service manager's SIGTERM reaches the whole group; the gateway decides when to stop."""
    async with llama(tiny_gguf) as engine:
        bench = Bench(engine, itertools.count())
        assert engine.pid is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.pid, number)
        outputs: list[SequenceOutput] = await bench.outputs(bench.request(max_tokens=20))
        assert outputs[-1].finish == "length" and engine.restarts == 0
