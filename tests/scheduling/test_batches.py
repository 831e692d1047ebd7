"""``static`` and ``dynamic``: a batch is formed when nothing runs, and runs to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.bands import Band
from headrace.scheduling.dynamic import Dynamic
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import SequenceState, Slot
from headrace.scheduling.static import Static
from headrace.scheduling.step import SchedulerState, StepPlan, StepPolicy
from tests.scheduling.dry_engine import DryEngine

POLICIES: list[Callable[[], StepPolicy]] = [Static, Dynamic]
WINDOW_S = 0.005


def waiting_state(
    arrivals_s: list[float], now_s: float, *, streams: int = 32, knobs: SchedulingKnobs | None = None
) -> SchedulerState:
    """Nothing runs; requests of falling lengths have arrived at these times."""
    waiting = [
        SequenceState(f"r{number:02}", 100 - number, 120, 0, arrived_s) for number, arrived_s in enumerate(arrivals_s)
    ]
    return SchedulerState(now_s, (Band(128, streams),), (streams,), waiting, [], knobs or SchedulingKnobs())


def admitted(plan: StepPlan) -> list[str]:
    return [admission.request_id for admission in plan.admissions]


def check_batch(state: SchedulerState, plan: StepPlan) -> None:
    """Nobody enters while anybody runs; decodes all go, prefill has the rest of the budget, caps hold."""
    knobs = state.knobs
    assert not (state.running and plan.admissions), "somebody entered a batch that had begun"
    tokens = sum(chunk.tokens for chunk in plan.prefill)
    assert tokens <= knobs.max_prefill_tokens and tokens + len(plan.decode) <= knobs.step_tokens
    if state.running or (state.waiting and plan.wait_s is None):
        assert not plan.empty, "work is there and nothing is computed"
    if knobs.max_num_seqs is not None:
        assert len(plan.admissions) <= knobs.max_num_seqs


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_everybody_is_served_once_in_batches_that_nobody_joins(
    policy: Callable[[], StepPolicy], data: st.DataObject
) -> None:
    """Whatever arrives while a batch runs waits for its end; ``DryEngine`` sees that each plan depends on the state
    alone and that a sequence which outgrows its band is promoted within its batch."""
    knobs = SchedulingKnobs(
        step_tokens=data.draw(st.integers(1, 24)),
        max_prefill_tokens=data.draw(st.integers(1, 16)),
        band_margin_tokens=data.draw(st.integers(0, 8)),
        max_num_seqs=data.draw(st.none() | st.integers(1, 5)),
        band_caps=data.draw(st.none() | st.tuples(st.integers(1, 3), st.integers(1, 3))),
        merge_window_s=data.draw(st.floats(0, 5)),
        merge_max=data.draw(st.integers(1, 6)),
    )
    engine = DryEngine([Band(16, 3), Band(48, 2)], knobs, policy(), check=check_batch)
    arrivals = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 6)), max_size=12))
    for number, (prompt_tokens, output_tokens, steps) in enumerate(arrivals):
        engine.submit(f"r{number}", prompt_tokens, output_tokens, arrived_s=float(engine.steps))
        for _ in range(steps):
            engine.step()
    # Every step computes a token, but those in which a batch gathers: at most six (the window is 5 s) a batch.
    for _ in range(engine.remaining_tokens() + 6 * len(arrivals)):
        engine.step()
    assert Counter(name for name, _ in engine.ended) == Counter(f"r{number}" for number in range(len(arrivals)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_ends_when_its_longest_sequence_does(policy: Callable[[], StepPolicy]) -> None:
    """The stream of one that ended early stays empty although others wait: that is what continuous batching saves."""
    engine = DryEngine([Band(64, 2)], SchedulingKnobs(merge_window_s=0), policy(), check=check_batch)
    engine.submit("short", 4, 2, arrived_s=0.0)
    engine.submit("long", 4, 30, arrived_s=0.0)
    engine.submit("next", 4, 2, arrived_s=1.0)
    while "next" not in engine.admitted_at:
        engine.step()
    assert engine.admitted_at == {"short": 0, "long": 0, "next": 30}  # its prefill yields the first of 30 tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_to_do_is_an_empty_plan_that_waits_for_no_time(policy: Callable[[], StepPolicy]) -> None:
    """An idle engine sleeps until something arrives."""
    plan = policy().plan(waiting_state([], 5.0))
    assert plan.empty and plan.wait_s is None and not plan.admissions


def test_static_takes_all_that_fit_at_once_most_urgent_first() -> None:
    """No window and no ``merge_max``: streams and caps alone bound the batch."""
    state = waiting_state([0.0] * 40, 0.0)
    assert admitted(Static().plan(state)) == [f"r{number:02}" for number in range(32)]
    capped = waiting_state([3.0, 2.0, 1.0], 4.0, knobs=SchedulingKnobs(max_num_seqs=2, merge_max=1))
    assert admitted(Static().plan(capped)) == ["r02", "r01"]


def test_static_prefills_within_the_budgets_most_urgent_first() -> None:
    """A batch of long prompts is prefilled over several steps, as in every strategy."""
    engine = DryEngine([Band(512, 4)], SchedulingKnobs(64, 48), Static(), check=check_batch)
    for number in range(3):
        engine.submit(f"r{number}", 100, 4, priority=-number)
    first = engine.step()
    assert admitted(first) == ["r2", "r1", "r0"]
    assert [(chunk.request_id, chunk.tokens) for chunk in first.prefill] == [("r2", 48)]


def test_dynamic_gathers_until_the_window_of_the_oldest_is_over() -> None:
    """The wait is what remains of it, whoever came later; then all that are there go together."""
    plan = Dynamic().plan(waiting_state([1.000, 1.002], 1.003))
    assert plan.empty and not plan.admissions
    assert plan.wait_s == pytest.approx(1.000 + WINDOW_S - 1.003)
    plan = Dynamic().plan(waiting_state([1.000, 1.002, 1.0049], 1.005))
    assert plan.wait_s is None and len(plan.admissions) == 3


def test_dynamic_does_not_wait_for_what_it_could_not_take() -> None:
    """With ``merge_max`` there, or as many as streams or caps allow, waiting longer would serve nobody."""
    assert len(Dynamic().plan(waiting_state([1.0] * 16, 1.0)).admissions) == 16
    assert Dynamic().plan(waiting_state([1.0] * 15, 1.0)).wait_s == pytest.approx(WINDOW_S)
    assert len(Dynamic().plan(waiting_state([1.0] * 3, 1.0, streams=3)).admissions) == 3
    capped = SchedulingKnobs(max_num_seqs=2)
    assert len(Dynamic().plan(waiting_state([1.0] * 3, 1.0, knobs=capped)).admissions) == 2


def test_dynamic_without_a_window_waits_for_nobody() -> None:
    """``merge_window_s`` 0 merges what happens to be there."""
    assert len(Dynamic().plan(waiting_state([1.0], 1.0, knobs=SchedulingKnobs(merge_window_s=0))).admissions) == 1


def test_dynamic_takes_the_most_urgent_and_sorts_them_by_length() -> None:
    """Who is in the batch is a matter of urgency, so that a long request does not wait for ever behind short ones;
    within it the shortest gets the first stream and the first prefill."""
    state = waiting_state([float(number) for number in range(20)], 30.0)
    plan = Dynamic().plan(state)
    oldest_shortest_first = [f"r{number:02}" for number in range(15, -1, -1)]
    assert admitted(plan) == oldest_shortest_first
    assert [chunk.request_id for chunk in plan.prefill] == oldest_shortest_first[: len(plan.prefill)]


def test_dynamic_does_not_wait_while_a_batch_runs() -> None:
    """An arrival within the window does not hold the running batch up."""
    running = SequenceState("a", 4, 20, 0, 0.0, known_tokens=6, computed_tokens=5, slot=Slot(0, 0))
    arrived = SequenceState("b", 4, 20, 0, 1.0)
    plan = Dynamic().plan(SchedulerState(1.0, (Band(64, 2),), (1,), [arrived], [running], SchedulingKnobs()))
    assert plan.decode == ("a",) and plan.wait_s is None and not plan.admissions


@given(arrived_s=st.floats(0, 1e6), window_s=st.floats(50e-6, 0.05), later_s=st.floats(0, 0.06))
def test_an_engine_that_sleeps_as_asked_is_not_asked_again_and_again(
    arrived_s: float, window_s: float, later_s: float
) -> None:
    """Rounding, on a clock that has run for long, costs at most one more sleep; none is longer than the window."""
    knobs = SchedulingKnobs(merge_window_s=window_s)
    now_s = arrived_s + later_s
    sleeps = 0
    while (plan := Dynamic().plan(waiting_state([arrived_s], now_s, knobs=knobs))).wait_s is not None:
        assert 0 < plan.wait_s <= window_s + 2e-10  # doubles near 1e6 lie that far apart
        now_s += plan.wait_s
        sleeps += 1
        assert sleeps <= 2
    assert len(plan.admissions) == 1
