"""The admission decision and its prediction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.admission.decide import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    AdmissionLimits,
    AdmissionState,
    DrainRate,
    LaneLoad,
    decide,
)

OPEN = AdmissionLimits(max_queue=4, lane_max_queue=None, lane_max_running=None)


def state(
    waiting: int = 0, tokens: int = 0, lane: LaneLoad | None = None, drain: DrainRate | None = None
) -> AdmissionState:
    return AdmissionState(waiting, tokens, lane or LaneLoad(), drain or DrainRate())


def test_room_accepts_and_a_full_queue_sheds() -> None:
    assert decide(state(3), OPEN, 1).action == "accept"
    shed = decide(state(4), OPEN, 1)
    assert (shed.action, shed.reason) == ("shed", "queue_full")


def test_more_sequences_than_the_queue_holds_are_accepted_when_it_is_empty() -> None:
    assert decide(state(0), OPEN, 10).action == "accept"
    assert decide(state(1), OPEN, 10).action == "shed"


def test_a_lane_has_a_queue_of_its_own() -> None:
    limits = AdmissionLimits(max_queue=100, lane_max_queue=2, lane_max_running=None)
    assert decide(state(5, lane=LaneLoad(waiting=1)), limits, 1).action == "accept"
    assert decide(state(5, lane=LaneLoad(held=1, waiting=1)), limits, 1).reason == "lane_queue_full"


def test_a_lane_cap_holds_and_keeps_the_order() -> None:
    limits = AdmissionLimits(max_queue=100, lane_max_queue=None, lane_max_running=2)
    assert decide(state(lane=LaneLoad(running=1)), limits, 1).action == "accept"
    assert decide(state(lane=LaneLoad(running=2)), limits, 1).action == "hold"
    assert decide(state(1, lane=LaneLoad(held=1, running=1)), limits, 1).action == "hold"
    assert decide(state(), limits, 5).action == "accept"


def test_retry_after_is_the_slower_of_starts_and_prompt_tokens() -> None:
    by_count = decide(state(4, 100, drain=DrainRate(0.1, 1000)), OPEN, 1)
    by_tokens = decide(state(4, 40_000, drain=DrainRate(100, 1000)), OPEN, 1)
    assert by_count.retry_after_s == pytest.approx(10)
    assert by_tokens.retry_after_s == pytest.approx(10)
    assert decide(state(4), OPEN, 1).retry_after_s == MIN_RETRY_AFTER_S


counts = st.integers(0, 1000)
rates = st.none() | st.floats(0, 1e6)


@given(counts, counts, counts, counts, counts, rates, rates, st.integers(1, 200), st.none() | st.integers(1, 50))
def test_a_shed_always_says_when_to_come_back(
    waiting: int, tokens: int, held: int, lane_waiting: int, running: int,
    starts: float | None, prefill: float | None, sequences: int, cap: int | None,
) -> None:  # fmt: skip
    limits = AdmissionLimits(max_queue=50, lane_max_queue=cap, lane_max_running=cap)
    load = LaneLoad(held, lane_waiting, running)
    decision = decide(state(waiting, tokens, load, DrainRate(starts, prefill)), limits, sequences)
    if decision.action == "shed":
        assert decision.reason
        assert MIN_RETRY_AFTER_S <= decision.retry_after_s <= MAX_RETRY_AFTER_S
    if waiting == 0 and held == lane_waiting == running == 0:
        assert decision.action == "accept"
