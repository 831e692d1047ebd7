"""The virtual engine carries out plans as the embedded engine does, and keeps the same accounts."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from headrace.scheduling.bands import Band
from headrace.scheduling.cost import Call, CostModel
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import Slot
from headrace.scheduling.step import Admission, Move, PrefillChunk, Promotion, StepPlan
from headrace.simulate.arrivals import RequestStream, feed, requests_of
from headrace.simulate.requests import Targets
from headrace.simulate.simulation import SimulationError
from headrace.simulate.step_times import SMOLLM2_2_THREADS, MeasuredTimes
from tests.simulate.rig import Rig, Scripted


def admit(request_id: str, tokens: int, band: int = 0) -> StepPlan:
    """A plan that takes one in and computes its first tokens."""
    return StepPlan(admissions=(Admission(request_id, band),), prefill=(PrefillChunk(request_id, tokens),))


def test_a_request_gets_its_times() -> None:
    """10 prompt tokens take 10 ms, each of the four further tokens 1 ms."""
    rig = Rig()
    rig.run(until_s=1.0)
    rig.submit("a", 10, 5)
    rig.run()
    record = rig.record("a")
    assert (record.outcome, record.output_tokens) == ("stop", 5)
    assert [record.admitted_s, record.started_s] == [1.0, 1.0]
    assert [record.ttft_s, record.tpot_s, record.e2e_s] == pytest.approx([0.010, 0.001, 0.014])
    assert record.longest_gap_s == pytest.approx(0.001)
    assert rig.engine.busy_s == pytest.approx(0.014) and rig.engine.steps == 5


def test_a_request_is_good_when_it_met_every_target() -> None:
    """A missed one, an abort or no end at all is a miss; a request without targets only has to end."""
    rig = Rig()
    for name, targets in (
        ("met", Targets(ttft_s=0.1, tpot_s=0.1, e2e_s=0.3)),
        ("ttft", Targets(ttft_s=0.01)),
        ("tpot", Targets(tpot_s=0.0001)),
        ("e2e", Targets(e2e_s=0.02)),
    ):
        rig.submit(name, 10, 5, targets=targets)
    rig.run()
    assert [rig.record(name).good for name in ("met", "ttft", "tpot", "e2e")] == [True, False, False, False]
    rig.submit("left", 10, 5)
    assert not rig.record("left").good
    rig.simulation.add(*rig.engine.abort("left", rig.simulation.now_s))
    rig.run()
    assert rig.record("left").outcome == "abort" and not rig.record("left").good


def test_a_request_ends_at_its_limit() -> None:
    """``length`` at max_tokens, at once when only the prompt is wanted, and at the end of the longest band."""
    rig = Rig([Band(64, 2)])
    rig.submit("short", 10, 50, max_tokens=3)
    rig.submit("none", 10, 50, max_tokens=0)
    rig.submit("long", 10, 500)
    rig.run()
    ended = {name: (record.outcome, record.output_tokens) for name, record in rig.engine.records.items()}
    assert ended == {"short": ("length", 3), "none": ("length", 0), "long": ("length", 54)}


def test_what_arrives_during_a_step_is_seen_at_its_end() -> None:
    """An arrival in the middle of a prefill of 100 ms waits for the rest of it."""
    rig = Rig()
    rig.submit("long", 100, 1)
    rig.run(until_s=0.04)
    rig.submit("short", 10, 1)
    rig.run()
    assert rig.record("short").started_s == pytest.approx(0.1)
    assert rig.record("short").ttft_s == pytest.approx(0.07)


def test_decodes_come_before_the_chunk_unless_they_share_its_pass() -> None:
    """Apart, a decoding sequence has its token before a chunk of 200 ms is computed; fused, at the end of both."""
    for layout, second_s in (("apart", 0.002), ("libllama", 0.002), ("fused", 0.202)):
        rig = Rig(shape={"layout": layout})
        rig.submit("chat", 1, 2)
        rig.run(until_s=0.0005)
        rig.submit("document", 200, 1)
        rig.run()
        assert rig.record("chat").first_token_s == pytest.approx(0.001)
        assert rig.record("chat").last_token_s == pytest.approx(second_s)
        assert rig.record("document").first_token_s == pytest.approx(0.202)


def test_holes_between_streams_cost_a_pass_or_a_row() -> None:
    """libllama computes consecutive streams together: streams 0 and 2 take two rows in two passes, or three rows in one
    where the stream between them is computed along. Which one is a question of what a pass and a row cost."""
    heavy = MeasuredTimes([(1, 10.0), (30, 40.0)], context_s=1e-6, pair_s=0.0, copy_s_per_token=0.0, source="a test")
    for times, takes_s in ((None, 0.002), (heavy, heavy.call_s(3, 22))):
        plans = [admit(name, 10) for name in "abc"]
        plans += [StepPlan(decode=("a", "b", "c")), StepPlan(decode=("a", "c"))]
        rig = Rig(policy=Scripted(plans), shape={"layout": "libllama"}, times=times, checked=False)
        for name in "abc":
            rig.submit(name, 10, 2 if name == "b" else 9)
        rig.run()
        assert [s.slot for s in rig.engine.running] == [Slot(0, 0), Slot(0, 2)]
        before_s, after_s = rig.record("b").ended_s, rig.record("c").last_token_s
        assert before_s is not None and after_s is not None
        assert after_s - before_s == pytest.approx(takes_s)  # 11 tokens of context each, none in b's place


def test_a_victim_keeps_its_kv_where_that_travels() -> None:
    """It waits again with what is computed, and goes on from there; copying takes its time, out and in. Where KV does
    not travel, it is computed again."""
    for travels, decoded_at_once in ((True, True), (False, False)):
        back = StepPlan(admissions=(Admission("a", 0),), decode=("a",) if travels else (), prefill=())
        plans = [admit("a", 100), StepPlan(decode=("a",)), StepPlan(victims=("a",)), back]
        policy = Scripted(plans)
        rig = Rig(policy=policy, shape={"kv_travels": travels, "copy_s_per_token": 1e-4}, checked=False)
        rig.submit("a", 100, 20)
        rig.run()
        parked = policy.states[3]
        assert rig.record("a").preempted == 1 and rig.engine.victims == 1
        # 100 ms of prefill, 1 ms of decode; reading 101 tokens takes 10.1 ms.
        assert parked.now_s == pytest.approx(0.101 + (0.0101 if travels else 0.0))
        assert rig.sequence("a").computed_tokens == (102 if travels else 0)
        gap = rig.record("a").longest_gap_s
        assert gap == pytest.approx(2 * 0.0101 + 0.001) if decoded_at_once else gap == pytest.approx(0.001)


def test_what_is_cached_of_a_prompt_is_copied_and_not_computed() -> None:
    """400 of 500 tokens take 4 ms to copy, the rest 100 ms to compute; while it waits, the policy knows. The last token
    is computed even of a prompt that is cached whole."""
    rig = Rig(shape={"copy_s_per_token": 1e-5})
    rig.submit("part", 500, 1, cached_tokens=400)
    assert rig.sequence("part").uncached_tokens == 100
    rig.run()
    assert rig.record("part").ttft_s == pytest.approx(0.004 + 0.100)
    rig.submit("whole", 500, 1, cached_tokens=500)
    rig.run()
    assert rig.record("whole").ttft_s == pytest.approx(0.00499 + 0.001)


def test_moves_and_promotions_take_their_time() -> None:
    """A copy within the band by the model of times; out of one band and into the next at the price of KV."""
    plans = [
        StepPlan(
            admissions=(Admission("a", 0), Admission("b", 0)), prefill=(PrefillChunk("a", 4), PrefillChunk("b", 16))
        ),
        StepPlan(moves=(Move("b", 0),), promotions=(Promotion("b", 1),), decode=("b",)),
    ]
    rig = Rig([Band(16, 2), Band(64, 1)], policy=Scripted(plans), shape={"copy_s_per_token": 1e-4}, checked=False)
    rig.submit("a", 4, 1)
    rig.submit("b", 16, 9)
    rig.run()
    assert rig.sequence("b").slot == Slot(1, 0) and rig.engine.moves == 1
    assert rig.record("b").longest_gap_s == pytest.approx(16e-5 + 2 * 16 * 1e-4 + 0.001)


def test_a_plan_that_waits_is_asked_again_after_so_long_or_at_an_arrival() -> None:
    """``dynamic`` gathers for its window; a batch that is full before does not wait for its end."""
    knobs = SchedulingKnobs(strategy="dynamic", merge_window_s=0.5, merge_max=2)
    rig = Rig(knobs=knobs)
    rig.submit("a", 10, 1)
    rig.run()
    assert rig.record("a").started_s == pytest.approx(0.5)
    rig.submit("b", 10, 1)
    rig.run(until_s=rig.simulation.now_s + 0.1)
    began_s = rig.simulation.now_s
    rig.submit("c", 10, 1)
    rig.run()
    assert rig.record("b").started_s == rig.record("c").started_s == pytest.approx(began_s)


def test_an_abort_takes_effect_between_steps() -> None:
    """The step under way still counts for whom it computes; then the stream is free."""
    rig = Rig([Band(512, 1)])
    rig.submit("a", 100, 50)
    rig.submit("b", 10, 1)
    rig.run(until_s=0.05)
    rig.simulation.add(*rig.engine.abort("a", 0.05))
    assert rig.record("a").outcome == "unfinished"
    rig.run()
    assert rig.record("a").outcome == "abort" and rig.record("a").ended_s == pytest.approx(0.1)
    assert rig.record("a").output_tokens == 1 and rig.record("b").started_s == pytest.approx(0.1)
    assert tuple(rig.engine.abort("a", 1.0)) == () and rig.record("a").ended_s == pytest.approx(0.1)


def test_knobs_apply_from_the_next_step_on_and_may_change_the_strategy() -> None:
    """Nothing running is lost: a batch of ``static`` goes on under ``continuous``, which lets the next one in."""
    rig = Rig(knobs=SchedulingKnobs(strategy="static"))
    rig.submit("a", 10, 100)
    rig.run(until_s=0.02)
    rig.submit("b", 10, 1)
    rig.run(until_s=0.05)
    assert rig.record("b").admitted_s is None
    rig.simulation.add(*rig.engine.set_knobs(SchedulingKnobs(strategy="continuous"), 0.05))
    rig.run()
    admitted_s = rig.record("b").admitted_s
    assert admitted_s is not None and 0.05 <= admitted_s < 0.052
    assert rig.record("a").outcome == "stop"


def test_a_restart_ends_what_was_there_and_serves_what_comes() -> None:
    """Everything ends with ``error``, the step under way comes to nothing, and streams are free again."""
    rig = Rig([Band(512, 1)])
    rig.submit("a", 100, 5)
    rig.submit("b", 100, 5)
    rig.run(until_s=0.05)
    rig.simulation.add(*rig.engine.restart(0.05, down_s=1.0))
    rig.submit("c", 10, 2)
    rig.run()
    assert [rig.record(name).outcome for name in "abc"] == ["error", "error", "stop"]
    assert rig.record("a").output_tokens == 0
    assert rig.record("c").started_s == pytest.approx(1.05)
    assert not rig.engine.running and not rig.engine.waiting


def test_a_prefill_pass_is_cut_for_an_arrival_that_this_saves() -> None:
    """The arrival's first token is due before the pass would end. What was cut is not cut again."""
    for cuts in (False, True):
        rig = Rig(shape={"cuts": cuts}, knobs=SchedulingKnobs(strategy="continuous", step_tokens=512))
        rig.submit("document", 500, 1, priority=9)
        rig.run(until_s=0.1)
        rig.submit("chat", 10, 1, targets=Targets(ttft_s=0.1))
        rig.run(until_s=0.2)
        rig.submit("next", 10, 1, targets=Targets(ttft_s=0.1))  # the document's pass was cut before: not again
        rig.run()
        assert rig.record("chat").good is cuts and not rig.record("next").good
        assert rig.engine.cut_steps == int(cuts)
        assert rig.record("document").outcome == "stop"


def test_the_state_tells_the_policy_what_it_decides_by() -> None:
    """Shares of engine time, recent traffic, when somebody urgent was last there, the knee, the last strategy."""
    policy = Scripted(
        [msgspec.structs.replace(admit("a", 90), strategy="mine"), admit("b", 30), StepPlan(decode=("b",))]
    )
    rig = Rig([Band(512, 16)], policy=policy, checked=False, times=SMOLLM2_2_THREADS)
    rig.submit("a", 90, 1, lane="long", targets=Targets(e2e_s=9.0))
    rig.submit("b", 30, 5, lane="chat", expected_tokens=50)
    rig.run()
    first, second, third = policy.states[:3]
    assert (first.strategy, second.strategy) == ("", "mine") and first.urgent_seen_s == first.now_s
    assert third.urgent_seen_s == rig.record("a").ended_s and third.now_s > second.now_s == third.urgent_seen_s
    assert first.lane_shares == {} and second.lane_shares["long"] > 0
    assert third.lane_shares["long"] > third.lane_shares["chat"] > 0
    assert (first.traffic.requests, first.traffic.with_targets, first.traffic.lanes) == (2, 0.5, 2)
    assert first.batch_cap == 16 and not first.fused


def test_a_model_may_learn_what_steps_really_take() -> None:
    """The policy plans with the model; the truth is another, and the model comes to know it."""
    model = CostModel()
    calls: list[Sequence[Call]] = []

    def learn(step: Sequence[Call], took_s: float) -> None:
        calls.append(step)
        model.learn(step, took_s)

    rig = Rig([Band(512, 8)], times=SMOLLM2_2_THREADS, believed=model, learn=learn)
    for number in range(8):
        rig.submit(str(number), 20, 200)
    rig.run()
    assert len(calls) == rig.engine.steps
    wrong = abs(model.call_s(8, 8 * 200) / SMOLLM2_2_THREADS.call_s(8, 8 * 200) - 1)
    assert wrong < 0.1  # the target for the real engine


def test_noise_spreads_step_times_and_leaves_the_middle_where_it_was() -> None:
    """Lognormal around the cost function: 400 steps' median within 5 % of it (the standard error of a median at a
    spread of 0.2 is 0.013)."""
    rig = Rig([Band(512, 1)], shape={"noise": 0.2}, seed=5)
    rig.submit("a", 1, 400)
    rig.run()
    record = rig.record("a")
    assert record.tpot_s is not None and record.tpot_s != 0.001
    # The mean of a lognormal is exp(sigma^2 / 2) times its median.
    assert record.tpot_s / math.exp(0.02) == pytest.approx(0.001, rel=0.05)
    assert record.longest_gap_s > 0.0014


def test_a_broken_plan_is_refused_when_plans_are_checked() -> None:
    """The engine names the time and what is wrong with the plan."""
    rig = Rig(policy=Scripted([StepPlan(decode=("nobody",))]))
    rig.submit("a", 1, 1)
    with pytest.raises(SimulationError, match=r"at 0\.0 s: .*nobody"):
        rig.run()


def test_a_policy_that_turns_in_circles_is_found_out() -> None:
    """Parking and admitting without computing anything would never end."""
    policy = Scripted([StepPlan(admissions=(Admission("a", 0),)), StepPlan(victims=("a",))] * 100)
    rig = Rig(policy=policy, checked=False)
    rig.submit("a", 1, 1)
    with pytest.raises(SimulationError, match="nothing is computed"):
        rig.run()


def test_what_no_engine_could_serve_is_refused() -> None:
    """A prompt beyond the bands, and an id that was there before."""
    rig = Rig([Band(64, 1)])
    with pytest.raises(SimulationError, match="cannot be served"):
        rig.submit("long", 64, 1)
    rig.submit("a", 10, 1)
    rig.run()
    with pytest.raises(SimulationError, match="before"):
        rig.submit("a", 10, 1)


MIXED = [
    RequestStream(
        "chat", "interactive", "poisson(3)", "lognormal(median=60, p99=400)", "lognormal(median=30, p99=90)", 10,
        Targets(ttft_s=0.5, tpot_s=0.1), {"a": 1, "b": 2},
    ),
    RequestStream("documents", "long", "poisson(0.3)", "uniform(500, 1900)", "uniform(20, 100)", 50),
]  # fmt: skip


def simulated(strategy: str) -> bytes:
    """All records of a run with everything switched on, as bytes."""
    knobs = msgspec.convert({"strategy": strategy}, SchedulingKnobs)
    shape = {"layout": "libllama", "noise": 0.1, "cuts": True, "copy_s_per_token": 3e-6}
    rig = Rig([Band(512, 6), Band(2048, 2)], times=SMOLLM2_2_THREADS, knobs=knobs, shape=shape, seed=4)
    requests = requests_of(MIXED, seed=4, duration_s=20, longest_tokens=2048)
    rig.simulation.add(*feed(requests, rig.engine.submit))
    rig.run()
    assert all(record.outcome in ("stop", "length") for record in rig.engine.records.values())
    return msgspec.json.encode(list(rig.engine.records.values()))


@pytest.mark.parametrize("strategy", ["hybrid", "dynamic"])
def test_a_run_is_the_same_to_the_byte(strategy: str) -> None:
    """In this process and in others, whatever order their hash seeds give to sets."""
    here = simulated(strategy)
    assert simulated(strategy) == here
    script = f"import sys, tests.simulate.test_virtual_engine as t; sys.stdout.buffer.write(t.simulated({strategy!r}))"
    root = Path(__file__).parents[2]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}"}
        other = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
        assert other.stdout == here
