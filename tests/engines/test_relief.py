"""The relief core: sequences that it takes get their whole answer, and its thread ends cleanly."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.llama.channel import GatewayGone
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.relief import RELIEF_SPEED, Relief, prefer_relief
from headrace.errors import EngineError
from headrace.kv.budget import BandBudget
from headrace.messages.engine import StepOutput
from headrace.scheduling.bands import Band
from headrace.scheduling.step import DecodeFirst, StepLimits
from tests.engines.harness import DEFAULT_LIMITS, Model, Reference, Results, request

BAND = Band(256, 4)
TIMEOUT_S = 20.0


@pytest.fixture
def make_core(tiny: Model) -> Iterator[Callable[[], EngineCore]]:
    """Makes cores; those that a test leaves open are closed."""
    cores: list[EngineCore] = []

    def make() -> EngineCore:
        budget = BandBudget((BAND,), tiny.weights.kv_bytes_per_token(), 1 << 30, ())
        core = EngineCore(
            tiny.library, tiny.weights, tiny.vocabulary, budget, DecodeFirst(), limits=DEFAULT_LIMITS, threads=1
        )
        cores.append(core)
        return core

    yield make
    for core in cores:
        core.close()


class Outbox:
    """What the relief sends, for the test's thread to read."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self.results = Results()

    def send(self, output: StepOutput) -> None:
        self._steps.put(output)

    def read_until(self, done: Callable[[Results], bool]) -> Results:
        while not done(self.results):
            self.results.take(self._steps.get(timeout=TIMEOUT_S))
        return self.results


def wait_until_made(relief: Relief) -> None:
    """The core is made on the relief's thread; an inspection waits for it."""
    relief.prepare()
    while relief.inspect() is None:
        assert relief._thread is not None and relief._thread.is_alive()


@given(st.integers(0, 200), st.integers(0, 200), st.floats(0.1, 1.0))
def test_a_sequence_goes_where_its_share_is_larger(core_live: int, relief_live: int, speed: float) -> None:
    """One more sequence on the core gets 1/(n+1) of its speed, on the relief ``speed``/(m+1)."""
    assert prefer_relief(core_live, relief_live, speed) == (core_live + 1 > (relief_live + 1) / speed)


def test_the_first_sequences_stay_on_the_core() -> None:
    """At half the speed the relief is worth it from the third sequence on."""
    placed = {"core": 0, "relief": 0}
    order = []
    for _ in range(9):
        where = "relief" if prefer_relief(placed["core"], placed["relief"], RELIEF_SPEED) else "core"
        placed[where] += 1
        order.append(where)
    assert order[:2] == ["core", "core"] and placed == {"core": 6, "relief": 3}


def test_it_answers_what_it_takes_and_frees_what_is_aborted(
    make_core: Callable[[], EngineCore], tiny: Model, tiny_reference: Reference
) -> None:
    """On its own thread, with the same text as the reference; afterwards it is empty and sound."""
    outbox = Outbox()
    relief = Relief(make_core, outbox.send)
    assert relief.inspect() is None and relief.live_count == 0
    wait_until_made(relief)
    prompt = tiny.tokens("the river")
    expected, _ = tiny_reference.greedy(prompt, 12, frozenset())
    relief.submit(request("kept", prompt, max_tokens=12))
    relief.submit(request("dropped", prompt, max_tokens=200))
    outbox.read_until(lambda results: "dropped" in results)
    relief.abort("dropped")
    results = outbox.read_until(lambda r: len(r) == 2 and all(one.finish is not None for one in r.values()))
    assert results["kept"].finish == "length" and results["kept"].tokens == expected
    assert results["dropped"].finish == "abort"
    seen = relief.inspect()
    assert seen is not None and seen.sequences == [] and seen.integrity is None
    assert relief.live_count == 0
    relief.stop()


def test_stopping_ends_its_sequences_with_abort(make_core: Callable[[], EngineCore]) -> None:
    """And its thread; nobody waits for a thread that never was."""
    outbox = Outbox()
    relief = Relief(make_core, outbox.send)
    wait_until_made(relief)
    for number in range(6):
        relief.submit(request(f"r{number}", [3] * 5, max_tokens=240))
    outbox.read_until(lambda results: bool(results))
    relief.stop()
    results = outbox.read_until(lambda r: len(r) == 6 and all(one.finish is not None for one in r.values()))
    assert {one.finish for one in results.values()} == {"abort"}
    assert relief.inspect() is None
    Relief(make_core, outbox.send).stop()


def test_it_takes_only_while_crowded_and_only_what_fits_for_good(make_core: Callable[[], EngineCore]) -> None:
    """Its sequences cannot be promoted, so prompt and output must fit its band."""
    relief = Relief(make_core, Outbox().send)
    fitting = request("r", [3] * 56, max_tokens=200)
    assert not relief.takes(fitting, 8, True), "no core yet"
    wait_until_made(relief)
    assert relief.takes(fitting, 8, True)
    assert not relief.takes(fitting, 8, False)
    assert not relief.takes(fitting, 0, True)
    assert not relief.takes(request("r", [3] * 57, max_tokens=200), 8, True)
    assert not relief.takes(request("r", [3], max_tokens=None), 8, True)
    relief.stop()
    assert not relief.takes(fitting, 8, True), "nobody would answer"


def test_without_memory_there_is_no_relief() -> None:
    """The engine goes on without; nothing waits for it."""

    def no_memory() -> EngineCore:
        raise EngineError("libllama cannot create a context")

    relief = Relief(no_memory, Outbox().send)
    relief.prepare()
    relief.set_limits(StepLimits(8, 8))
    relief.stop()
    assert relief.inspect() is None and not relief.takes(request("r", [3], max_tokens=1), 9, True)


def test_when_the_gateway_is_gone_an_inspection_does_not_hang(make_core: Callable[[], EngineCore]) -> None:
    """The thread may end between the question and the answer."""

    stepped, asked = threading.Event(), threading.Event()

    class Inbox(queue.SimpleQueue[Any]):
        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item, block, timeout)
            if isinstance(item, Future):
                asked.set()

    def gone(_: StepOutput) -> None:
        stepped.set()
        assert asked.wait(TIMEOUT_S)
        raise GatewayGone

    relief = Relief(make_core, gone)
    relief._inbox = Inbox()
    wait_until_made(relief)
    asked.clear()
    relief.submit(request("r", [3] * 5, max_tokens=5))
    assert stepped.wait(TIMEOUT_S)
    assert relief.inspect() is None
    relief.stop()
