"""One policy for each strategy, any of which may follow any other."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs, Strategy
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState, StepPlan
from headrace.scheduling.strategies import policy_for
from tests.scheduling.dry_engine import DryEngine

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_has_a_policy_whose_plans_say_its_name(strategy: Strategy) -> None:
    """``EngineLoad.strategy`` comes from there; ``auto`` says what it chose, too."""
    waiting = [SequenceState("a", 10, 20, 0, 0.0)]
    state = SchedulerState(1.0, (Band(64, 4),), (4,), waiting, [], SchedulingKnobs())
    plan = policy_for(strategy).plan(state)
    assert plan.strategy.split(":")[0] == strategy
    assert [admission.request_id for admission in plan.admissions] == ["a"]


def any_plan(state: SchedulerState, plan: StepPlan) -> None:
    """What all strategies promise: while anything runs, something is computed."""
    assert not (state.running and plan.empty)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_strategy_may_change_before_any_step_and_nobody_is_lost(data: st.DataObject) -> None:
    """Each takes over what runs and waits as it is, and everybody ends once."""
    engine = DryEngine([Band(16, 3), Band(48, 2)], SchedulingKnobs(24, 16, band_margin_tokens=4), check=any_plan)
    requests = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=10))
    order = data.draw(st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=30))
    for number, (prompt_tokens, output_tokens) in enumerate(requests):
        engine.submit(f"r{number}", prompt_tokens, output_tokens, arrived_s=float(engine.steps))
        engine.policy = policy_for(order[number % len(order)])
        engine.step()
    for number in range(engine.remaining_tokens() + len(requests)):
        engine.policy = policy_for(order[number % len(order)])
        engine.step()
    assert Counter(name for name, _ in engine.ended) == Counter(f"r{number}" for number in range(len(requests)))
