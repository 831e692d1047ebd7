"""The core carries out whatever a plan says, and tells the policy the truth: victims, moves, pauses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import pytest

from headrace.engines.llama.context import Context
from headrace.engines.llama.core import EMPTY_PAUSE_S
from headrace.messages.engine import EngineLoad, StepOutput
from headrace.scheduling.bands import Band
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import Move, SchedulerState, StepPlan
from tests.engines.harness import (
    BAND,
    SMALL_CHUNKS,
    Amended,
    Model,
    Result,
    Results,
    assert_all_same_or_near_tie,
    engine_core,
    request,
    run,
    said,
    sound,
    submits,
)

# Victims


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_parked_sequence_goes_on_as_if_it_had_never_stopped(
    tiny: Model, expected: dict[str, Result], every: int
) -> None:
    """Again and again one of them, in prefill or decoding, gives up its stream for another: its text is that of an
    undisturbed run, and no token of a prompt is computed twice."""
    turn = itertools.count()
    computed = 0

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        number = next(turn)
        if number % every or not state.running or not state.waiting:
            return plan
        victim = state.running[number % len(state.running)]
        # A plan of the policy for the state before: without the victim, its stream is free for a later step.
        return msgspec.structs.replace(
            plan,
            victims=(victim.request_id,),
            decode=tuple(name for name in plan.decode if name != victim.request_id),
            prefill=tuple(chunk for chunk in plan.prefill if chunk.request_id != victim.request_id),
        )

    with engine_core(tiny, Band(256, 3), limits=SMALL_CHUNKS, policy=Amended(change)) as core:

        def check(_number: int, _output: StepOutput) -> None:
            nonlocal computed
            assert core.check_integrity() is None
            computed += core.forward.prefill_tokens

        results = run(core, submits(tiny, 6), each_step=check)
        load = core.load()
    assert_all_same_or_near_tie(results, expected)
    assert load.victims > 3 and load.parked == 0
    # One that was decoding comes back with a chunk of one token, its last: nothing else is computed again.
    again = computed + load.prefix_hit_tokens - sum(len(submit.prompt_tokens) for submit in submits(tiny, 6))
    assert 0 <= again <= load.victims


def test_a_parked_sequence_comes_back_into_another_band(tiny: Model, expected: dict[str, Result]) -> None:
    """Saved in a band of three streams, loaded into one of two: nothing is computed again."""
    parked: list[int] = []

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        old = next((s for s in state.running if s.slot and s.slot.band == 0 and s.generated_tokens == 5), None)
        if old is not None and not parked:
            parked.append(old.computed_tokens)
            return StepPlan(victims=(old.request_id,))
        if plan.admissions and parked:
            return msgspec.structs.replace(plan, admissions=tuple(replace(a, band=1) for a in plan.admissions))
        return plan

    bands = (Band(128, 3), Band(256, 2))
    limits = msgspec.structs.replace(SMALL_CHUNKS, band_margin_tokens=8)
    with engine_core(tiny, *bands, limits=limits, policy=Amended(change)) as core:
        prefilled: list[int] = []

        def check(_number: int, _output: StepOutput) -> None:
            assert core.check_integrity() is None
            prefilled.append(core.forward.prefill_tokens)

        submit = submits(tiny, 4)[3]
        results = run(core, [submit], each_step=check)
    assert parked and sum(prefilled) == len(submit.prompt_tokens) + 1, "it comes back with its last token to compute"
    assert said(results["r3"]) == said(expected["r3"]), "alone before and after, so the same to the bit"


def test_what_libllama_refuses_is_computed_again(
    tiny: Model, expected: dict[str, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parked state cannot be loaded: prompt and output are computed anew, and the text goes on."""
    monkeypatch.setattr(Context, "load_stream", lambda *_: False)
    done: list[str] = []

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        old = next((s for s in state.running if s.generated_tokens == 7), None)
        if old is None or done:
            return plan
        done.append(old.request_id)
        return StepPlan(victims=(old.request_id,))

    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        results = run(core, submits(tiny, 2), each_step=sound(core))
    assert done
    assert_all_same_or_near_tie(results, expected)


def test_parked_memory_is_given_back_on_abort(tiny: Model) -> None:
    """And at the end of the engine."""

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        ready = len(state.running) == 4 and all(s.decoding for s in state.running)
        return StepPlan(victims=tuple(s.request_id for s in state.running)) if ready else plan

    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        for submit in submits(tiny, 4):
            core.submit(submit)
        while not core.load().victims:
            core.step()
        assert core.load().parked == 4 and core.residents.parking.bytes > 0
        assert core.check_integrity() is None
        core.abort("r1")
        assert core.load().parked == 3 and core.check_integrity() is None
        core.abort_all()
        assert core.load().parked == 0 and core.residents.parking.bytes == 0
        assert core.check_integrity() is None


def test_the_self_check_notices_damage_to_what_is_parked(tiny: Model) -> None:
    """A state lost, and a state of nobody."""

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        return StepPlan(victims=tuple(s.request_id for s in state.running)) if state.running else plan

    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        core.submit(submits(tiny, 1)[0])
        core.step()
        core.step()
        state = core.residents.parking.get("r0")
        core.residents.parking.drop("r0")
        assert state is not None and "0 are parked" in (core.check_integrity() or "")
        core.residents.parking.park("r0", state)
        core.residents.parking.park("ghost", state)
        assert "ghost is parked but does not wait" in (core.check_integrity() or "")
        core.residents.parking.drop("ghost")


# Moves


def test_moved_sequences_go_on_unchanged_and_the_band_is_dense(tiny: Model, expected: dict[str, Result]) -> None:
    """Every hole is filled from the top, one copy a step: same texts, no fragmentation at the end, and the cost of a
    copy is learned."""

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        used = {s.slot.stream: s for s in state.running if s.slot is not None}
        holes = [stream for stream in range(max(used, default=0)) if stream not in used]
        if not holes or plan.admissions:
            return plan
        return msgspec.structs.replace(plan, moves=(Move(used[max(used)].request_id, holes[0]),))

    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        fragmentation: list[float] = []

        def check(number: int, _output: StepOutput) -> None:
            assert core.check_integrity() is None
            if number == 6:
                for name in ("r0", "r2", "r4"):
                    core.abort(name)
            fragmentation.append(core.load().fragmentation)

        results = run(core, submits(tiny, 8), each_step=check)
        load = core.load()
        assert core.costs.model.move_s(1000, 0) != core.costs.model.prior.move_s_per_token * 1000
        assert core.costs.model.move_s(1000, 0) == pytest.approx(10 * core.costs.model.move_s(100, 0))
    stayed = {"r1", "r3", "r5", "r6", "r7"}
    assert_all_same_or_near_tie({n: results[n] for n in stayed}, expected)
    assert load.moves >= 3 and max(fragmentation) > 0.2 and fragmentation[12] == 0.0


def test_a_moved_sequence_has_the_same_kv_to_the_bit(tiny: Model, expected: dict[str, Result]) -> None:
    """Alone, so that the shapes of all passes are the same: moved before every step, it says the same bits."""
    number = itertools.count(1)

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        moves = tuple(Move(s.request_id, next(number) % 8) for s in state.running)
        return msgspec.structs.replace(plan, moves=moves)

    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        results = run(core, submits(tiny, 8)[5:6], each_step=sound(core))
        assert core.load().moves > 20
    assert said(results["r5"]) == said(expected["r5"])


def test_a_move_to_a_stream_that_is_not_free_is_refused(tiny: Model) -> None:
    """A policy that says so is wrong; nothing is overwritten."""

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        return StepPlan(moves=(Move("r1", 0),)) if len(state.running) == 2 else plan

    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        for submit in submits(tiny, 2):
            core.submit(submit)
        core.step()
        with pytest.raises(ValueError, match="stream 0 of band 0 is not free for r1"):
            core.step()
        assert core.check_integrity() is None


# Pauses


@pytest.mark.parametrize(("wait_s", "pause_s"), [(0.25, 0.25), (None, EMPTY_PAUSE_S)])
def test_an_empty_plan_says_how_long_to_wait(tiny: Model, wait_s: float | None, pause_s: float) -> None:
    """What it asks for, else 50 ms; a plan that computes something never waits."""
    idle = True

    def change(_state: SchedulerState, plan: StepPlan) -> StepPlan:
        return StepPlan(wait_s=wait_s) if idle else plan

    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        core.submit(submits(tiny, 1)[0])
        core.step()
        assert core.pause_s == pause_s and core.has_work
        idle = False
        core.step()
        assert core.pause_s == 0.0


# What a policy is told


def test_the_policy_sees_the_terms_of_the_request_and_when_its_tokens_came(tiny: Model) -> None:
    """Lane, tenant, targets and expected length from the request; token times from the core's clock."""
    seen: list[SequenceState] = []
    states: list[SchedulerState] = []

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        states.append(state)
        seen[:] = [*state.waiting, *state.running]
        return plan

    now_s = 50.0
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        core._clock = lambda: now_s
        core.submit(
            msgspec.structs.replace(
                request("r", [5] * 8, max_tokens=3, arrived_s=49.0),
                lane="chat",
                tenant="acme",
                deadline_s=51.0,
                tpot_s=0.1,
                finish_by_s=60.0,
                expected_tokens=2,
            )
        )
        core.step()
        (state,) = seen
        assert (state.lane, state.tenant, state.deadline_s) == ("chat", "acme", 51.0)
        assert (state.tpot_s, state.finish_by_s, state.expected_tokens) == (0.1, 60.0, 2)
        assert (state.first_token_s, state.last_token_s) == (50.0, 50.0)
        now_s = 50.5
        core.step()
        assert (state.first_token_s, state.last_token_s) == (50.0, 50.5)
        now_s = 51.0
        core.step()
        core.submit(request("plain", [5] * 8, max_tokens=3))
        now_s = 52.0
        core.step()
    assert not states[0].fused and states[0].times is core.costs.model
    assert (states[0].traffic.requests, states[-1].traffic.requests) == (1, 2)
    assert states[-1].traffic.with_targets == 0.5
    assert states[-1].urgent_seen_s == 51.0, "the last plan that knew an urgent one"
    assert seen[0].rank_s is not None


def test_lanes_are_charged_for_the_engines_time(tiny: Model) -> None:
    """A lane that computes alone has all of it, two share it by their rows."""
    shares: list[dict[str, float]] = []

    def change(state: SchedulerState, plan: StepPlan) -> StepPlan:
        shares.append(dict(state.lane_shares))
        return plan

    ticks = itertools.count()
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        core._clock = lambda: 0.5 * next(ticks)
        core.submit(msgspec.structs.replace(request("a", [5] * 8, max_tokens=12), lane="a"))
        for _ in range(6):
            core.step()
        core.submit(msgspec.structs.replace(request("b", [5] * 8, max_tokens=12), lane="b"))
        for _ in range(6):
            core.step()
        assert core.load().lane_shares.keys() == {"a", "b"}, "and said in the load report"
    assert shares[0] == {} and set(shares[5]) == {"a"} and set(shares[-1]) == {"a", "b"}
    assert shares[5]["a"] > shares[-1]["a"] > shares[-1]["b"] > 0


def test_the_load_says_what_the_engine_can_do(tiny: Model) -> None:
    """Nothing before anything was measured; then what the cost model predicts, and who decided."""

    def change(_state: SchedulerState, plan: StepPlan) -> StepPlan:
        return msgspec.structs.replace(plan, reason="because")

    ticks = itertools.count()
    with engine_core(tiny, BAND, limits=SMALL_CHUNKS, policy=Amended(change)) as core:
        core._clock = lambda: float(next(ticks))
        first = core.load()
        assert (first.prefill_tokens_per_s, first.decode_step_s, first.batch_cap) == (0.0, 0.0, 0)
        for submit in submits(tiny, 3):
            core.submit(submit)
        loads: list[EngineLoad] = [load for _ in range(10) if (load := core.step().load) is not None]
        model, last = core.costs.model, loads[-1]
        assert last.prefill_tokens_per_s == pytest.approx(16 / model.call_s(16, 0, 136))
        cells = sum(s.state.computed_tokens for s in core.residents.running.values())
        assert last.decode_step_s == pytest.approx(model.call_s(4, cells))
    assert 1 <= last.batch_cap <= 8
    assert (last.strategy, last.reason) == ("continuous", "because")


def test_another_policy_takes_over_in_mid_flight(tiny: Model, expected: dict[str, Result]) -> None:
    """Parked, running and waiting sequences are its own from then on; none is lost, none changes."""

    def parker(state: SchedulerState, plan: StepPlan) -> StepPlan:
        return StepPlan(victims=tuple(s.request_id for s in state.running)) if len(state.running) == 3 else plan

    with engine_core(tiny, Band(256, 3), limits=SMALL_CHUNKS, policy=Amended(parker)) as core:
        results = Results()
        for submit in submits(tiny, 8):
            core.submit(submit)
        for _ in range(6):
            results.take(core.step())
        core.set_policy(Amended(lambda _, plan: plan))
        while core.has_work:
            results.take(core.step())
            assert core.check_integrity() is None
    assert_all_same_or_near_tie(results, expected)
