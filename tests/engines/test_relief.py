"""The relief core: which sequences it gets, and that they come out as from the main core."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.relief import Relief, prefer_relief
from headrace.errors import EngineError
from headrace.kv.budget import BandBudget
from headrace.messages.engine import StepOutput
from headrace.scheduling.bands import Band
from headrace.scheduling.step import DecodeFirst, StepLimits
from tests.engines.harness import GREEDY, Model, Results, engine_core, request, run

BAND = Band(256, 4)
FOREVER_S = 60.0


class Bench:
    """A relief over the synthetic model, its outputs in a queue."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.sent: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self.relief = Relief(self._make_core, self.sent.put)
        self.relief.prepare()
        while not self.relief.takes(request("probe", [1], max_tokens=1), 99, True):
            pass  # until its thread has made the core; the test's time limit is the bound

    def _make_core(self) -> EngineCore:
        budget = BandBudget((BAND,), self._model.weights.kv_bytes_per_token(), 1 << 30, ())
        model = self._model
        core = EngineCore(
            model.library, model.weights, model.vocabulary, budget, DecodeFirst(), limits=StepLimits(), threads=1
        )
        core.context(0)
        return core

    def results(self, count: int) -> Results:
        """Take outputs in until ``count`` sequences have ended."""
        results = Results()
        while sum(result.finish is not None for result in results.values()) < count:
            results.take(self.sent.get(timeout=FOREVER_S))
        return results


@pytest.fixture
def bench(tiny: Model) -> Iterator[Bench]:
    made = Bench(tiny)
    yield made
    made.relief.stop()


@given(st.integers(0, 40))
def test_sequences_are_shared_in_the_ratio_of_the_two_speeds(count: int) -> None:
    """Sent one by one, the relief at half the speed ends up with a third of them, give or take one."""
    core = relief = 0
    for _ in range(count):
        if prefer_relief(core, relief, 0.5):
            relief += 1
        else:
            core += 1
    assert abs(relief - count / 3) <= 1


def test_the_relief_computes_what_the_main_core_computes(bench: Bench, tiny: Model) -> None:
    """Same prompts, same greedy tokens."""
    requests = [request(f"r{n}", tiny.tokens("the mill " * (n + 1)), max_tokens=12) for n in range(6)]
    with engine_core(tiny, BAND) as core:
        expected = run(core, requests)
    for one in requests:
        bench.relief.submit(one)
    results = bench.results(len(requests))
    assert {name: result.tokens for name, result in results.items()} == {
        name: result.tokens for name, result in expected.items()
    }


def test_only_a_crowded_engine_gives_the_relief_work_and_only_what_stays_in_its_band(bench: Bench) -> None:
    """It cannot promote: a sequence without a limit, or with one beyond its band, is not for it."""
    fits = request("a", [1] * 100, max_tokens=156)
    assert bench.relief.takes(fits, 9, True)
    assert not bench.relief.takes(fits, 9, False)
    assert not bench.relief.takes(fits, 1, True)  # the main core is faster still
    assert not bench.relief.takes(request("b", [1] * 100, max_tokens=157), 9, True)
    assert not bench.relief.takes(request("c", [1] * 100, max_tokens=None), 9, True)


def test_an_abort_reaches_the_relief_and_frees_the_sequence(bench: Bench) -> None:
    """The aborted one ends with ``abort``, the accounts are clean, the other goes on to its end."""
    bench.relief.submit(request("gone", [1, 2, 3], max_tokens=200, sampling=GREEDY))
    bench.relief.submit(request("kept", [1, 2, 3], max_tokens=30, sampling=GREEDY))
    bench.relief.abort("gone")
    results = bench.results(2)
    assert results["gone"].finish == "abort"
    assert results["kept"].finish == "length"
    seen = bench.relief.inspect()
    assert seen is not None and seen.integrity is None and not seen.sequences


def test_stopping_ends_what_still_runs(tiny: Model) -> None:
    """Everything live ends with ``abort`` and the thread is over."""
    bench = Bench(tiny)
    bench.relief.submit(request("running", [1, 2, 3], max_tokens=250, sampling=GREEDY))
    bench.relief.stop()
    assert bench.results(1)["running"].finish in ("abort", "length")
    assert bench.relief.inspect() is None


def test_without_memory_for_it_there_is_no_relief() -> None:
    """Its context cannot be created: the engine goes on without, and asks it for nothing."""

    def no_memory() -> EngineCore:
        raise EngineError("no memory")

    relief = Relief(no_memory, lambda output: None)
    relief.prepare()
    relief.stop()
    assert not relief.takes(request("a", [1], max_tokens=1), 99, True)
    assert relief.live_count == 0


def test_computed_one_by_one_or_together_the_tokens_are_the_same(tiny: Model) -> None:
    """``one_by_one_limit`` changes how a step is cut into calls, not what comes out."""
    requests = [request(f"r{n}", tiny.tokens("stone " * (n + 1)), max_tokens=10) for n in range(4)]
    with engine_core(tiny, BAND) as core:
        together = run(core, requests)
    with engine_core(tiny, BAND) as core:
        core.one_by_one_limit = 8
        apart = run(core, {n: [one] for n, one in enumerate(requests)})
    assert {name: result.tokens for name, result in apart.items()} == {
        name: result.tokens for name, result in together.items()
    }
