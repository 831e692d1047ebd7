"""The step policies of other engines do what those engines do by default, and keep every promise of a plan."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.step import StepPlan
from headrace.simulate.baselines.policies import Baseline, baseline_policy, knobs_for
from tests.simulate.rig import Rig


def rig_of(name: Baseline, *, step_tokens: int = 100, sequences: int = 8, kv_tokens: int | None = None) -> Rig:
    """An engine under a baseline whose plans are kept in ``rig.plans``; a row takes a millisecond."""
    plans: list[StepPlan] = []
    own: dict[str, Any] = {"watch": lambda state, plan: plans.append(plan)}
    rig = Rig(
        [Band(1024, sequences)],
        policy=baseline_policy(name),
        knobs=knobs_for(name, SchedulingKnobs(step_tokens=step_tokens), told=True),
        shape={"layout": "fused", "kv_travels": False, "watermarks": False, "kv_tokens": kv_tokens},
        **own,
    )
    rig.plans = plans  # type: ignore[attr-defined]
    return rig


def plans_of(rig: Rig) -> list[StepPlan]:
    return rig.plans  # type: ignore[attr-defined, no-any-return]


def chunks(plan: StepPlan) -> list[tuple[str, int]]:
    return [(chunk.request_id, chunk.tokens) for chunk in plan.prefill]


def test_vllm_fills_a_step_first_come_first_served() -> None:
    """100 tokens a step: what decodes, then the rest of the prompt under way, then the next one's beginning."""
    rig = rig_of("vllm")
    for name, tokens in (("a", 30), ("b", 130), ("c", 60)):
        rig.submit(name, tokens, 4)
    rig.run()
    first, second, third = plans_of(rig)[:3]
    assert chunks(first) == [("a", 30), ("b", 70)]
    assert second.decode == ("a",) and chunks(second) == [("b", 60), ("c", 39)]
    assert set(third.decode) == {"a", "b"} and chunks(third) == [("c", 21)]


def test_vllm_lets_nobody_overtake_one_that_does_not_fit() -> None:
    """Memory for 160 tokens: the second does not fit beside the first, and the short third waits behind it."""
    rig = rig_of("vllm", kv_tokens=160)
    for name, tokens in (("a", 100), ("b", 90), ("c", 5)):
        rig.submit(name, tokens, 8)
    rig.run()
    assert [admission.request_id for plan in plans_of(rig) for admission in plan.admissions][:3] == ["a", "b", "c"]
    b, c = rig.record("b"), rig.record("c")
    assert b.started_s is not None and c.started_s is not None and b.started_s <= c.started_s
    assert b.started_s >= (rig.record("a").first_token_s or 0.0)


def test_vllm_computes_the_last_one_again_when_blocks_run_out() -> None:
    """Two grow beyond 128 tokens together: the one that entered last loses its KV, the other goes on."""
    rig = rig_of("vllm", kv_tokens=128)
    rig.submit("a", 40, 60)
    rig.submit("b", 40, 60)
    rig.run()
    assert (rig.record("a").preempted, rig.record("b").preempted > 0) == (0, True)
    assert [rig.record(name).output_tokens for name in "ab"] == [60, 60]


def test_sglang_computes_prompts_before_it_decodes() -> None:
    """While a prompt waits, nobody who decodes gets a token."""
    rig = rig_of("sglang")
    rig.submit("a", 20, 10)
    rig.run(until_s=0.0205)
    rig.submit("b", 250, 2)
    rig.run()
    after = plans_of(rig)[2:]
    assert [chunks(plan) for plan in after[:3]] == [[("b", 100)], [("b", 100)], [("b", 50)]]
    assert all(not (plan.decode and plan.prefill) for plan in plans_of(rig))
    assert set(after[3].decode) == {"a", "b"}


def test_sglang_keeps_room_for_what_may_be_generated() -> None:
    """Memory for 200 tokens: beside one that may generate 100 more, 0.7 of them are reserved; a prompt of 60 with 50
    of its own does not fit although it would now."""
    rig = rig_of("sglang", kv_tokens=200)
    rig.submit("a", 40, 100, max_tokens=100)
    rig.submit("b", 60, 50, max_tokens=50)
    rig.run()
    a, b = rig.record("a"), rig.record("b")
    assert b.started_s is not None and a.first_token_s is not None and b.started_s > a.first_token_s
    assert a.output_tokens == 100 and b.output_tokens == 50


def test_llama_server_gives_slots_in_order_and_fills_its_batch() -> None:
    """Two slots: the third waits for one; prompt tokens go slot by slot after the decodes."""
    rig = rig_of("llama-server", sequences=2)
    for name, tokens in (("a", 70), ("b", 70), ("c", 10)):
        rig.submit(name, tokens, 3)
    rig.run()
    assert chunks(plans_of(rig)[0]) == [("a", 70), ("b", 30)]
    assert plans_of(rig)[1].decode == ("a",) and chunks(plans_of(rig)[1]) == [("b", 40)]
    ended = [rig.record(name).ended_s for name in "ab"]
    assert rig.record("c").admitted_s == pytest.approx(min(one for one in ended if one is not None))


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(get_args(Baseline)),
    requests=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 80)), min_size=1, max_size=20),
    kv_tokens=st.sampled_from([None, 500, 900]),
)
def test_everybody_ends_with_all_tokens(name: Baseline, requests: list[tuple[int, int]], kv_tokens: int | None) -> None:
    """Whatever comes, every plan keeps its promises (the engine checks each) and nobody is left."""
    rig = rig_of(name, kv_tokens=kv_tokens)
    for number, (prompt, output) in enumerate(requests):
        rig.submit(f"r{number:02}", prompt, output)
    rig.run()
    made = [rig.record(f"r{number:02}").output_tokens for number in range(len(requests))]
    assert made == [output for _, output in requests]
