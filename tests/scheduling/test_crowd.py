"""Prompts of less urgent lanes wait while enough of more urgent ones decode, and never without end."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.bands import Band
from headrace.scheduling.caps import CROWD_SHARE, crowd
from headrace.scheduling.crowd import Crowd
from headrace.scheduling.hybrid import Hybrid
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.order import ServiceRates, WaitingQueue
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState, StepPlan
from headrace.simulate.requests import Targets
from headrace.simulate.step_times import SMOLLM2_2_THREADS
from tests.simulate.rig import Rig, RowTimes

KNOBS = SchedulingKnobs()
BANDS = (Band(4096, 32),)
ENOUGH = 4


class WithoutCrowd:
    """``Hybrid`` on a machine of which it does not know when a batch is large enough."""

    def __init__(self, policy: Hybrid) -> None:
        self._policy = policy

    def plan(self, state: SchedulerState) -> StepPlan:
        return self._policy.plan(msgspec.structs.replace(state, crowd=0))


class OnePaysForAll(RowTimes):
    """A call takes 10 ms whatever its rows: a larger batch is always better."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return 0.01


def sequence(name: str, *, arrived_s: float = 0.0, **more: object) -> SequenceState:
    """One that the queue has ranked."""
    made = SequenceState(name, 100, 200, **{"priority": 50, "arrived_s": arrived_s, "lane": "long", **more})  # type: ignore[arg-type]
    WaitingQueue(BANDS, KNOBS).add(made, ServiceRates())
    return made


def decoders(count: int) -> list[SequenceState]:
    return [sequence(f"d{number}", lane="chat", priority=10, deadline_s=1.0) for number in range(count)]


def holds(decoding: list[SequenceState], prompt: SequenceState, *, now_s: float = 0.0, late: bool = False) -> bool:
    state = SchedulerState(now_s, BANDS, (0,), [], decoding, KNOBS, crowd=ENOUGH)
    group = Crowd(decoding, state, WaitingQueue(BANDS, KNOBS), presses_until_s=now_s + 0.5)
    assert prompt.rank_s is not None
    return group.holds_back(prompt, prompt.rank_s, late)


def test_a_prompt_waits_for_a_crowd_of_more_urgent_lanes_and_for_nothing_smaller() -> None:
    prompt = sequence("document")
    assert holds(decoders(ENOUGH), prompt)
    assert not holds(decoders(ENOUGH - 1), prompt)


def test_its_own_lane_and_less_urgent_ones_are_no_crowd() -> None:
    """They would have come after it, or with it: waiting for them would turn the order around."""
    assert not holds([sequence(f"d{n}") for n in range(ENOUGH)], sequence("document"))
    assert not holds([sequence(f"d{n}", priority=60) for n in range(ENOUGH)], sequence("document"))


def test_a_prompt_whose_deadline_presses_does_not_wait_and_one_that_has_lost_it_does() -> None:
    prompt = sequence("document", deadline_s=0.3)
    assert not holds(decoders(ENOUGH), prompt)
    assert holds(decoders(ENOUGH), prompt, late=True)


def test_a_prompt_does_not_wait_for_lanes_that_it_comes_before_by_age() -> None:
    """Fifty points are fifty seconds; a chat that came now would be due a second after that and has ten points."""
    prompt = sequence("document")
    assert holds(decoders(ENOUGH), prompt, now_s=38.9)
    assert not holds(decoders(ENOUGH), prompt, now_s=39.1)


def test_where_nothing_is_known_of_the_machine_nobody_waits() -> None:
    decoding, prompt = decoders(30), sequence("document")
    state = SchedulerState(0.0, BANDS, (0,), [], decoding, KNOBS)
    group = Crowd(decoding, state, WaitingQueue(BANDS, KNOBS), presses_until_s=0.5)
    assert not group.holds_back(prompt, prompt.rank_s or 0.0, False)


@given(fixed_s=st.floats(0, 0.05), row_s=st.floats(1e-4, 0.01), overhead_s=st.floats(0, 0.01), most=st.integers(1, 256))
def test_a_crowd_decodes_nearly_as_well_as_any_batch(
    fixed_s: float, row_s: float, overhead_s: float, most: int
) -> None:
    class Line(RowTimes):
        def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
            return fixed_s + rows * row_s

    def rate(size: int) -> float:
        return size / (overhead_s + Line().call_s(size))

    size = crowd(Line(), most, overhead_s=overhead_s)
    assert 1 <= size <= most
    # On such a line larger batches are never slower per token. The last digits of a float are the allowance.
    assert rate(size) >= CROWD_SHARE * rate(most) * (1 - 1e-12)


def test_a_crowd_is_small_where_rows_cost_their_own_time_and_all_where_they_cost_nothing() -> None:
    assert crowd(RowTimes(), 32) == 4
    assert crowd(OnePaysForAll(), 32) == 32
    assert crowd(SMOLLM2_2_THREADS, 32) == 16


def served(*, crowd_known: bool) -> tuple[float, float]:
    """Mean time to the end of chats, and of documents that are due in half a minute, of a load that an engine whose
    rows cost their own time can just serve."""
    policy = Hybrid() if crowd_known else WithoutCrowd(Hybrid())
    rig = Rig([Band(2048, 32)], times=RowTimes(), policy=policy, knobs=SchedulingKnobs(strategy="hybrid"))
    for number in range(120):
        rig.run(0.11 * number)
        rig.submit(f"c{number}", 20, 60, lane="chat", priority=10, targets=Targets(ttft_s=1.0, tpot_s=0.1))
        if number % 16 == 0:
            rig.submit(f"d{number}", 600, 30, lane="long", priority=50, targets=Targets(ttft_s=30.0, tpot_s=0.2))
    rig.run()
    ends = {name: record.e2e_s or math.inf for name, record in rig.engine.records.items()}
    chats, documents = ([e2e_s for name, e2e_s in ends.items() if name.startswith(kind)] for kind in "cd")
    return sum(chats) / len(chats), sum(documents) / len(documents)


def test_chats_end_sooner_at_a_cost_that_the_targets_of_documents_allow() -> None:
    """Without a crowd every prompt is worth its time at once, and chats are stretched to the pace that they may have.
    When this was written: chats 1.0 s instead of 1.6, documents 2.6 s instead of 1.5, of the 30 s that they have."""
    chat_s, document_s = served(crowd_known=True)
    stretched_s, _ = served(crowd_known=False)
    assert chat_s < 0.75 * stretched_s
    assert document_s < 5.0
