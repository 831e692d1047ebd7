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
    Forecast,
    LaneLoad,
    Outlook,
    decide,
)
from headrace.admission.predict import Prediction
from headrace.lanes.lane import Overload

OPEN = AdmissionLimits(max_queue=4, lane_max_queue=None, lane_max_running=None)


def state(
    waiting: int = 0,
    tokens: int = 0,
    lane: LaneLoad | None = None,
    drain: DrainRate | None = None,
    running: int = 0,
) -> AdmissionState:
    return AdmissionState(waiting, running, tokens, lane or LaneLoad(), drain or DrainRate())


def forecast(ttft_s: float, decode_s: float = 0.0, idle_ttft_s: float = 0.0, idle_decode_s: float = 0.0) -> Forecast:
    now = Prediction(ttft_s, decode_s)
    return Forecast(now, now, Prediction(idle_ttft_s, idle_decode_s))


def outlook(
    full: Forecast,
    degraded: Forecast | None = None,
    *,
    ttft_s: float | None = 1.0,
    e2e_s: float | None = None,
    spent_s: float = 0.0,
    patience: float = 10.0,
    overload: Overload = "shed",
) -> Outlook:
    return Outlook(ttft_s, e2e_s, spent_s, patience, overload, full, degraded)


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


def test_what_is_predicted_late_within_patience_is_accepted_and_beyond_it_shed() -> None:
    assert decide(state(1), OPEN, 1, outlook(forecast(9.9))).action == "accept"
    shed = decide(state(1), OPEN, 1, outlook(forecast(10.5)))
    assert (shed.action, shed.reason) == ("shed", "predicted_late")


def test_retry_after_is_when_the_request_would_be_in_time() -> None:
    """A wait of 25 s drains to the target of 1 s in 24; what is over already will not be in the next try."""
    assert decide(state(1), OPEN, 1, outlook(forecast(25.0))).retry_after_s == pytest.approx(24)
    assert decide(state(1), OPEN, 1, outlook(forecast(25.0), spent_s=3.0)).retry_after_s == pytest.approx(24)


def test_the_finish_counts_against_the_e2e_target() -> None:
    late = outlook(forecast(0.1, 21.0), ttft_s=1.0, e2e_s=2.0)
    assert decide(state(running=1), OPEN, 1, late).reason == "predicted_late"
    assert decide(state(running=1), OPEN, 1, late).retry_after_s == pytest.approx(19.1)


@pytest.mark.parametrize("patience", [1.0, 10.0])
def test_a_target_that_cannot_be_met_at_all_sheds_nothing_only_waiting_does(patience: float) -> None:
    """A prompt of 100 s and a target of 1 s: the wait may take it to 1,000 s, however little patience there is."""
    assert decide(state(1), OPEN, 1, outlook(forecast(999, idle_ttft_s=100), patience=patience)).action == "accept"
    shed = decide(state(1), OPEN, 1, outlook(forecast(1001, idle_ttft_s=100), patience=patience))
    assert (shed.action, shed.retry_after_s) == ("shed", MAX_RETRY_AFTER_S)


def test_a_lane_without_targets_is_never_late() -> None:
    assert decide(state(1), OPEN, 1, outlook(forecast(1e6), ttft_s=None)).action == "accept"


def test_a_lane_that_queues_takes_what_is_late() -> None:
    assert decide(state(1), OPEN, 1, outlook(forecast(1e6), overload="queue")).action == "accept"


def test_a_shorter_answer_is_given_when_that_is_in_time() -> None:
    full, short = forecast(1.0, 30.0), forecast(1.0, 5.0)
    decision = decide(state(1), OPEN, 1, outlook(full, short, e2e_s=2.0, overload="degrade"))
    assert (decision.action, decision.degraded) == ("accept", True)


def test_a_shorter_answer_does_not_help_against_a_wait() -> None:
    full, short = forecast(30.0, 30.0), forecast(30.0, 5.0)
    decision = decide(state(1), OPEN, 1, outlook(full, short, e2e_s=2.0, overload="degrade"))
    assert (decision.action, decision.degraded) == ("shed", False)
    assert decide(state(1), OPEN, 1, outlook(full, None, overload="degrade")).action == "shed"


def test_a_request_that_is_in_time_is_not_degraded() -> None:
    decision = decide(state(1), OPEN, 1, outlook(forecast(1.0), forecast(0.5), overload="degrade"))
    assert (decision.action, decision.degraded) == ("accept", False)


def test_a_degraded_request_waits_at_the_door_like_any_other() -> None:
    limits = AdmissionLimits(max_queue=100, lane_max_queue=None, lane_max_running=1)
    ahead = state(lane=LaneLoad(running=1), running=1)
    decision = decide(ahead, limits, 1, outlook(forecast(1, 30), forecast(1, 2), e2e_s=2.0, overload="degrade"))
    assert (decision.action, decision.degraded) == ("hold", True)


seconds = st.floats(0, 1e6)
forecasts = st.builds(forecast, seconds, seconds, seconds, seconds)
outlooks = st.builds(
    outlook,
    forecasts,
    st.none() | forecasts,
    ttft_s=st.none() | st.floats(1e-6, 1e4),
    e2e_s=st.none() | st.floats(1e-6, 1e4),
    spent_s=seconds,
    patience=st.floats(1, 1000),
    overload=st.sampled_from(["shed", "degrade", "queue"]),
)


@given(outlooks, st.integers(1, 200), st.none() | st.integers(1, 50))
def test_an_idle_engine_sheds_and_degrades_nothing_whatever_the_targets(
    expected: Outlook, sequences: int, cap: int | None
) -> None:
    limits = AdmissionLimits(max_queue=50, lane_max_queue=cap, lane_max_running=cap)
    decision = decide(state(), limits, sequences, expected)
    assert (decision.action, decision.degraded) == ("accept", False)


@given(outlooks, counts, st.integers(1, 200))
def test_a_shed_by_prediction_says_when_to_come_back(expected: Outlook, running: int, sequences: int) -> None:
    limits = AdmissionLimits(max_queue=2000, lane_max_queue=None, lane_max_running=None)
    decision = decide(state(1, running=running), limits, sequences, expected)
    if decision.action == "shed":
        assert decision.reason == "predicted_late"
        assert MIN_RETRY_AFTER_S <= decision.retry_after_s <= MAX_RETRY_AFTER_S
    else:
        assert decision.action == "accept"
    assert not decision.degraded or expected.overload == "degrade"
