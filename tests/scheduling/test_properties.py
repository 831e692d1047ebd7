"""What every strategy promises, whatever comes: random traffic on the virtual clock, every plan checked.

The engine checks each plan (``simulate.check_plan``: caps, streams, budgets, work conservation), ``Watched`` that
policies are pure, the machine what becomes of requests: each ends exactly once, nothing leaks, nobody starves.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs, Strategy
from headrace.scheduling.order import LATE_S
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState, StepPlan
from headrace.scheduling.strategies import policy_for
from headrace.simulate.requests import Targets, VirtualRequest
from headrace.simulate.simulation import Event
from headrace.simulate.step_times import SMOLLM2_2_THREADS
from tests.simulate.rig import Rig, RowTimes

STRATEGIES: tuple[Strategy, ...] = ("static", "dynamic", "continuous", "hybrid", "auto")
LANES = ("x", "y")

BANDS = st.lists(
    st.tuples(st.integers(4, 60), st.integers(1, 4)), min_size=1, max_size=3, unique_by=lambda band: band[0]
).map(lambda bands: tuple(Band(tokens, sequences) for tokens, sequences in sorted(bands)))

KNOBS = st.builds(
    SchedulingKnobs,
    strategy=st.sampled_from(STRATEGIES),
    step_tokens=st.integers(1, 24),
    max_prefill_tokens=st.integers(1, 16),
    min_prefill_tokens=st.integers(1, 8),
    band_margin_tokens=st.integers(0, 16),
    max_num_seqs=st.none() | st.integers(1, 6),
    band_caps=st.none() | st.lists(st.integers(1, 4), max_size=3).map(tuple),
    lane_caps=st.dictionaries(st.sampled_from(LANES), st.integers(1, 3)),
    lane_weights=st.dictionaries(st.sampled_from(LANES), st.sampled_from([0.5, 4.0])),
    merge_window_s=st.sampled_from([0.0, 0.005, 0.5]),
    merge_max=st.integers(1, 6),
    urgent_step_s=st.sampled_from([0.001, 0.05]),
    idle_step_s=st.sampled_from([0.001, 0.3]),
    ageing_s=st.sampled_from([0.01, 10.0]),
    linger_s=st.sampled_from([0.0, 1.0]),
)

TARGETS = st.builds(
    Targets,
    ttft_s=st.none() | st.sampled_from([0.001, 0.1, 5.0]),
    tpot_s=st.none() | st.sampled_from([0.0005, 0.02, 1.0]),
    e2e_s=st.none() | st.sampled_from([0.01, 1.0, 20.0]),
)


def counts(sequence: SequenceState) -> tuple[object, ...]:
    """Every field, comparable."""
    return tuple(getattr(sequence, name) for name in SequenceState.__slots__)


class Watched:
    """The policy that the live knobs name, each plan made sure to depend on nothing but the state, and to leave it as
    it was."""

    def plan(self, state: SchedulerState) -> StepPlan:
        policy = policy_for(state.knobs.strategy)
        before = [counts(sequence) for sequence in (*state.waiting, *state.running)]
        twin = copy.deepcopy(state, {id(state.times): state.times})
        plan = policy.plan(state)
        assert [counts(sequence) for sequence in (*state.waiting, *state.running)] == before, "the state was changed"
        assert policy.plan(state) == plan, "asked twice, another plan"
        assert policy_for(state.knobs.strategy).plan(twin) == plan, "an equal state, another plan"
        return plan


class LoadMachine(RuleBasedStateMachine):
    """Arrivals, cancels, knob changes, restarts and time, in any order."""

    rig: Rig

    @initialize(
        bands=BANDS,
        knobs=KNOBS,
        layout=st.sampled_from(["fused", "apart", "libllama"]),
        kv_travels=st.booleans(),
        cuts=st.booleans(),
        measured=st.booleans(),
    )
    def begin(
        self, bands: tuple[Band, ...], knobs: SchedulingKnobs, layout: str, kv_travels: bool, cuts: bool, measured: bool
    ) -> None:
        shape = {"layout": layout, "kv_travels": kv_travels, "cuts": cuts, "copy_s_per_token": 1e-6}
        times = SMOLLM2_2_THREADS if measured else RowTimes()
        self.rig = Rig(bands, times=times, shape=shape, knobs=knobs, policy=Watched())
        self.submitted: list[str] = []

    @rule(
        together=st.integers(1, 6),
        prompt_share=st.floats(0, 1),
        output_tokens=st.integers(1, 60),
        max_tokens=st.none() | st.integers(0, 60),
        lane=st.sampled_from(LANES),
        tenant=st.sampled_from([None, "a"]),
        priority=st.sampled_from([0, 10, 100]),
        due=TARGETS,
        expected_tokens=st.none() | st.integers(1, 60),
        chunk_limit_tokens=st.none() | st.integers(1, 4),
    )
    def arrive(self, together: int, prompt_share: float, output_tokens: int, due: Targets, **more: object) -> None:
        for number in range(together):
            request_id = f"r{len(self.submitted)}"
            self.submitted.append(request_id)
            prompt_tokens = 1 + int(prompt_share * (self.rig.engine.longest_tokens - 2))
            self.rig.submit(request_id, max(1, prompt_tokens - number), output_tokens, targets=due, **more)

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.submitted))
        self.rig.simulation.add(*self.rig.engine.abort(request_id, self.rig.simulation.now_s))

    @rule(knobs=KNOBS)
    def turn_knobs(self, knobs: SchedulingKnobs) -> None:
        self.rig.simulation.add(*self.rig.engine.set_knobs(knobs, self.rig.simulation.now_s))

    @rule(down_s=st.sampled_from([0.0, 0.1]))
    def restart(self, down_s: float) -> None:
        self.rig.simulation.add(*self.rig.engine.restart(self.rig.simulation.now_s, down_s))

    @rule(seconds=st.sampled_from([0.0005, 0.02, 0.3, 4.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.rig.run(until_s=self.rig.simulation.now_s + seconds)

    @invariant()
    def everyone_is_in_one_place(self) -> None:
        problem = self.rig.engine.check_integrity()
        assert problem is None, problem
        assert list(self.rig.engine.records) == self.submitted

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return  # the run ended before it began
        # A step computes at least one token and takes three events. A sequence's tokens are computed once, and again
        # for each longer band and each time that it is parked, of which its rank allows few.
        alive = [*self.rig.engine.running, *self.rig.engine.waiting]
        most = 100 + 3 * sum([8 * self.rig.engine.longest_tokens for _ in alive])
        self.rig.simulation.run(most=most)
        assert math.isinf(self.rig.simulation.next_s), "something turns in circles"
        outcomes = {name: record.outcome for name, record in self.rig.engine.records.items()}
        assert list(outcomes) == self.submitted and "unfinished" not in outcomes.values(), outcomes
        assert not self.rig.engine.running and not self.rig.engine.waiting
        assert self.rig.engine.check_integrity() is None


TestLoad = LoadMachine.TestCase
TestLoad.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def every(interval_s: float, until_s: float, happen: Callable[[int, float], Iterable[Event]]) -> Event:
    """The first of a row of events, ``interval_s`` apart, numbered."""
    numbers = itertools.count()

    def tick(now_s: float) -> Iterable[Event]:
        again = (Event(now_s + interval_s, tick),) if now_s + interval_s < until_s else ()
        return (*happen(next(numbers), now_s), *again)

    return Event(0.0, tick)


def inversions(state: SchedulerState, plan: StepPlan) -> list[tuple[str, str]]:
    """Pairs of which the first gets its first prefill in this plan and the second, due earlier, does not: same lane,
    tenant, priority and prompt length, and the second one's deadline can still be met (without a ``start_by_s`` it
    never could)."""
    chunks = {chunk.request_id for chunk in plan.prefill}
    fresh = [s for s in (*state.waiting, *state.running) if not s.computed_tokens and s.deadline_s is not None]
    return [
        (first.request_id, second.request_id)
        for first in fresh
        for second in fresh
        if first.request_id in chunks
        and second.request_id not in chunks
        and (first.lane, first.tenant, first.priority, first.prompt_tokens)
        == (second.lane, second.tenant, second.priority, second.prompt_tokens)
        and (second.deadline_s or 0.0) < (first.deadline_s or 0.0)
        and state.now_s <= second.start_by_s < math.inf
    ]


Arrival = tuple[float, str, int, float, int]
"""When, lane, prompt tokens, time to the deadline, output tokens."""


def inversions_of(arrivals: Iterable[Arrival], streams: int, layout: str) -> list[tuple[str, str]]:
    """Under ``hybrid``, over a whole run."""
    found: list[tuple[str, str]] = []
    rig = Rig(
        [Band(1024, streams)],
        times=SMOLLM2_2_THREADS,
        shape={"layout": layout},
        knobs=SchedulingKnobs(strategy="hybrid"),
        watch=lambda state, plan: found.extend(inversions(state, plan)),
    )
    for number, (at_s, lane, prompt_tokens, due_s, output_tokens) in enumerate(sorted(arrivals)):
        rig.run(until_s=at_s)
        rig.submit(str(number), prompt_tokens, output_tokens, lane=lane, targets=Targets(ttft_s=due_s))
    rig.run()
    return found


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.1, 0.5, 0.55, 2.0]),
            st.sampled_from([("x", 1.0), ("y", 6.0)]),
            st.sampled_from([40, 400]),
            st.integers(1, 40),
        ),
        max_size=40,
    ),
    streams=st.integers(1, 4),
    layout=st.sampled_from(["fused", "apart"]),
)
def test_within_a_lane_whoever_is_due_earlier_begins_earlier(
    arrivals: list[tuple[float, tuple[str, float], int, int]], streams: int, layout: str
) -> None:
    """Unless its deadline is lost already: with the lane's own target, deadlines are as far apart as arrivals."""
    flat = [(at_s, lane, prompt, due_s, output) for at_s, (lane, due_s), prompt, output in arrivals]
    assert inversions_of(flat, streams, layout) == []


def test_a_request_that_brings_a_tighter_deadline_passes_its_lane() -> None:
    """Five requests due in 6 s wait; one of the same lane and tenant comes that is due in 2 s, and can be met."""
    arrivals = [(0.0, "x", 400, 6.0, 40)] * 5 + [(0.1, "x", 400, 2.0, 40)]
    assert inversions_of(arrivals, 2, "apart") == []


@pytest.mark.parametrize(
    ("strategy", "urgent"), [*((strategy, False) for strategy in STRATEGIES), ("hybrid", True), ("auto", True)]
)
def test_an_endless_stream_of_others_starves_nobody(strategy: Strategy, urgent: bool) -> None:
    """Offered twice what the engine can do, for ever: a document is served within the bound that ``order`` states,
    and the work that came before it. Under ``hybrid`` all others may be more urgent; the other strategies go by
    priority first, without ageing, so there the others have its own."""
    hybrid = strategy == "hybrid" or (strategy == "auto" and urgent)
    knobs = SchedulingKnobs(strategy=strategy, ageing_s=10.0)
    bound_s = LATE_S + (100 - 0) * knobs.ageing_s / 10
    rig = Rig([Band(1024, 8)], times=SMOLLM2_2_THREADS, knobs=knobs)
    priority, targets = (0 if hybrid else 100), Targets(ttft_s=1.0, tpot_s=0.1) if urgent else Targets()

    def arrive(number: int, now_s: float) -> Iterable[Event]:
        request = VirtualRequest(f"r{number}", now_s, 100, 30, lane="x", priority=priority, targets=targets)
        return rig.engine.submit(request, now_s)

    # What arrives until the bound is past takes twice that time.
    until_s = 5.0 + 2 * bound_s
    rig.simulation.add(every(0.1, until_s, arrive))
    rig.run(until_s=5.0)
    rig.submit("document", 600, 60, lane="y", priority=100)
    rig.run(until_s=until_s)
    assert len(rig.engine.waiting) > 200, "the engine keeps up: nothing could starve"
    record = rig.record("document")
    assert record.started_s is not None and record.outcome in ("stop", "length")
