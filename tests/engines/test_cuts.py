"""Passes of a step one by one: outputs as they come, times of their own, and prefill cut short."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import pytest

from headrace.engines.llama import interrupt
from headrace.engines.llama.context import Context
from headrace.messages.engine import StepOutput, Submit
from headrace.scheduling.cost import prefill_pairs
from headrace.scheduling.knobs import SchedulingKnobs
from tests.engines.harness import (
    BAND,
    SMALL_CHUNKS,
    CutAt,
    Model,
    Result,
    Results,
    assert_all_same_or_near_tie,
    engine_core,
    request,
    run,
    said,
    submits,
)


@pytest.mark.parametrize("emitting", [True, False])
def test_decode_outputs_are_handed_on_before_the_prefill_pass(
    tiny: Model, monkeypatch: pytest.MonkeyPatch, emitting: bool
) -> None:
    """With ``emit``, and each output once; without it a step returns everything at its end."""
    log: list[str] = []
    original = Context.decode

    def decode(context: Context, cut: Callable[[], bool] | None = None) -> bool:
        log.append("decode pass" if context.batch.size == 1 else "prefill pass")
        return original(context, cut)

    def emit(output: StepOutput) -> None:
        assert output.load is None
        log.append("emitted " + ",".join(o.request_id for o in output.outputs))

    with engine_core(tiny, BAND, limits=SMALL_CHUNKS) as core:
        core.submit(submits(tiny, 1)[0])
        core.step()
        core.submit(request("long", [7] * 40, max_tokens=3))
        core.emit = emit if emitting else None
        monkeypatch.setattr(Context, "decode", decode)
        last = [o.request_id for o in core.step().outputs]
    if emitting:
        assert log == ["decode pass", "emitted r0", "prefill pass"] and last == []
    else:
        assert log == ["decode pass", "prefill pass"] and last == ["r0"]


def test_decode_and_prefill_are_learned_from_as_calls_of_their_own(tiny: Model) -> None:
    """One ``Call`` a pass, with its own time."""
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS) as core:
        ticks = itertools.count()
        core._clock = lambda: float(next(ticks))
        calls: list[tuple[int, int, int]] = []
        original = core.costs.add

        def add(rows: int, context_tokens: int, pairs: int, took_s: float) -> None:
            assert took_s > 0
            calls.append((rows, context_tokens, pairs))
            original(rows, context_tokens, pairs, took_s)

        core.costs.add = add  # type: ignore[method-assign]
        core.submit(request("a", [3] * 10, max_tokens=30))
        core.submit(request("b", [4] * 12, max_tokens=30))
        core.step()
        core.submit(request("c", [4] * 20, max_tokens=30))
        core.step()
        assert core.costs.model.steps == len(calls)
    # 16 tokens a step: 6 of each together, 4 of the longer one alone, then the rest beside a decode.
    assert calls[0][0] + calls[1][0] == 16
    assert all(context == 0 for _, context, _ in calls[:2])
    assert (1, 10, 0) in calls[2:]


# Cuts


@pytest.fixture
def asked_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation of a pass asks, however quick they follow."""
    monkeypatch.setattr(interrupt, "ASK_INTERVAL_S", 0.0)


@pytest.mark.usefixtures("asked_always")
@pytest.mark.parametrize("at", [1, 2, 40])
def test_a_cut_pass_leaves_everything_as_it_was_and_is_computed_next(
    tiny: Model, expected: dict[str, Result], at: int
) -> None:
    """Before it begins, at its first operation, in its midst: the decodes of the step are done, the chunk's sequence
    keeps its earlier KV, the next step computes the chunk without being asked, and all say what they say alone."""
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS) as core:
        core.submit(submits(tiny, 1)[0])
        results = Results()
        results.take(core.step())
        core.submit(submits(tiny, 8)[7])
        results.take(core.step())
        state = core.residents.running["r7"].state
        before = state.computed_tokens
        assert 0 < before < state.prompt_tokens
        cut = core.cut = CutAt(at)
        output = core.step()
        results.take(output)
        assert [o.request_id for o in output.outputs] == ["r0"]
        assert cut.asked == at and core.load().cut_steps == 1
        assert state.computed_tokens == before and core.check_integrity() is None
        results.take(core.step())
        assert cut.asked == at and state.computed_tokens > before
        results.take(core.step())
        assert cut.asked > at, "the next chunk may be cut again"
        while core.has_work:
            results.take(core.step())
    assert_all_same_or_near_tie(results, expected)


@pytest.mark.usefixtures("asked_always")
def test_whoever_always_cuts_delays_each_chunk_by_one_step_at_most(tiny: Model, expected: dict[str, Result]) -> None:
    """The bound: every chunk is computed by the second pass that holds it."""
    steps = {}
    for cutting in (False, True):
        with engine_core(tiny, BAND, limits=SMALL_CHUNKS) as core:
            core.cut = (lambda: True) if cutting else None
            steps[cutting] = 0

            def count(_number: int, _output: StepOutput, cutting: bool = cutting) -> None:
                steps[cutting] += 1
                assert core.check_integrity() is None

            results = run(core, submits(tiny, 8)[7:], each_step=count)
            assert said(results["r7"]) == said(expected["r7"])
            assert (core.load().cut_steps > 0) == cutting
    assert steps[False] < steps[True] <= 2 * steps[False]


@pytest.mark.usefixtures("asked_always")
def test_decodes_are_never_asked_about(tiny: Model) -> None:
    """A cut would gain nothing there."""
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS) as core:
        core.submit(submits(tiny, 1)[0])
        core.step()
        cut = core.cut = CutAt(1)
        for _ in range(5):
            core.step()
        assert cut.asked == 0


@pytest.mark.usefixtures("asked_always")
def test_what_the_question_raises_comes_out_of_the_step(tiny: Model) -> None:
    """Through libllama nothing can be raised: the pass ends, then it is."""
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS) as core:
        asked = itertools.count()

        def cut() -> bool:
            if next(asked) == 3:
                raise RuntimeError("the gateway spoke nonsense")
            return False

        core.cut = cut
        core.submit(submits(tiny, 8)[7])
        with pytest.raises(RuntimeError, match="nonsense"):
            core.step()
        assert core.check_integrity() is None


def test_the_question_is_asked_at_intervals(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each of libllama's operations: once before the pass, then by the clock."""
    monkeypatch.setattr(interrupt, "ASK_INTERVAL_S", 1e9)
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS) as core:
        cut = core.cut = CutAt(0)
        core.submit(request("r", [5] * 10, max_tokens=1))
        core.step()
        assert cut.asked == 1


def test_an_arrival_that_only_a_cut_can_save_is_recognised(tiny: Model) -> None:
    """From the core's own predictions: due within the running pass plus its own time; not without a deadline, not
    when nothing is under way."""
    verdicts: list[list[bool]] = []
    with engine_core(tiny, BAND, limits=SchedulingKnobs(step_tokens=128, max_prefill_tokens=128)) as core:
        core._clock = lambda: 100.0

        def arrival(deadline_s: float | None, priority: int = 0) -> Submit:
            return msgspec.structs.replace(request("new", [5] * 20, priority=priority), deadline_s=deadline_s)

        chunk_s = core.costs.model.call_s(128, 0, 128 * 129 // 2)
        own_s = core.costs.model.call_s(20, 0, 210)

        def cut() -> bool:
            verdicts.append(
                [
                    core.cut_saves(arrival(deadline), 100.0)
                    for deadline in (100 + own_s * 0.9, 100 + own_s * 1.1, 100 + chunk_s + own_s * 1.1, None)
                ]
            )
            return False

        core.cut = cut
        core.submit(request("cold", [5] * 200, priority=9, max_tokens=1))
        core.step()
        assert not core.cut_saves(arrival(100 + own_s * 1.1), 100.0)
    assert verdicts[0] == [False, True, False, False]


def test_what_the_engine_holds_of_an_arrival_counts_for_it(tiny: Model) -> None:
    """Of 200 tokens 128 are there from an earlier request: due within the time of the rest, it is worth a cut; another
    tenant's same prompt, which must be computed whole, is too late either way."""
    verdicts: list[tuple[bool, bool]] = []
    with engine_core(tiny, BAND, limits=SchedulingKnobs(step_tokens=128, max_prefill_tokens=128)) as core:
        prompt = [index % 50 + 3 for index in range(200)]
        run(core, [request("before", prompt, max_tokens=1)])
        core._clock = lambda: 100.0

        def cut() -> bool:
            own_s = core.forward.decode_s + core.costs.model.call_s(72, 0, prefill_pairs(128, 72))
            arrival = msgspec.structs.replace(request("new", prompt), deadline_s=100 + own_s * 1.01)
            stranger = msgspec.structs.replace(arrival, tenant="other")
            verdicts.append((core.cut_saves(arrival, 100.0), core.cut_saves(stranger, 100.0)))
            return False

        core.cut = cut
        core.submit(request("cold", [5] * 200, priority=9, max_tokens=1))
        core.step()
    assert verdicts[0] == (True, False)
