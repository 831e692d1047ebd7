"""``auto``: which strategy for which traffic, why, and without changing its mind at every edge."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.auto import (
    ENOUGH_REQUESTS,
    LENGTH_SPREAD,
    LENGTH_SPREAD_MARGIN,
    STREAMING,
    STREAMING_MARGIN,
    choose,
)
from headrace.scheduling.bands import Band
from headrace.scheduling.dynamic import Dynamic
from headrace.scheduling.knobs import SchedulingKnobs, Strategy
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState
from headrace.scheduling.strategies import policy_for
from headrace.scheduling.traffic import Traffic, TrafficWindow

SHARES = st.floats(0, 1)
TRAFFIC = st.builds(
    Traffic,
    requests=st.integers(0, 256),
    with_targets=SHARES,
    streaming=SHARES,
    length_spread=st.floats(0, 4),
    lanes=st.integers(1, 6),
)
CURRENT = st.sampled_from(["static", "dynamic", "continuous", "hybrid", None])


@pytest.mark.parametrize(
    ("traffic", "strategy", "words"),
    [
        (Traffic(256, 0.0, 0.0, 0.1, 1), "static", ["offline", "256 requests"]),
        (Traffic(256, 0.0, 0.0, 2.0, 3), "static", ["offline", "none of 256"]),
        (Traffic(256, 1.0, 0.0, 0.1, 1), "dynamic", ["online and uniform", "1 lane", "length spread 0.10", "0%"]),
        (Traffic(256, 0.0, 1.0, 0.1, 1), "continuous", ["streaming", "100% stream"]),
        (Traffic(256, 1.0, 0.5, 0.2, 1), "continuous", ["streaming", "50% stream", "length spread 0.20"]),
        (Traffic(256, 1.0, 0.0, 0.1, 3), "hybrid", ["heterogeneous", "3 lanes", "100% of requests with targets"]),
        (Traffic(256, 0.4, 1.0, 1.4, 3), "hybrid", ["heterogeneous", "3 lanes", "40%", "length spread 1.40"]),
        (Traffic(256, 0.0, 1.0, 1.4, 1), "hybrid", ["heterogeneous", "length spread 1.40"]),
        (Traffic(256, 0.0, 1.0, 0.1, 3), "continuous", ["streaming", "3 lanes"]),
    ],
)
def test_each_kind_of_traffic_has_its_strategy_and_the_reason_its_figures(
    traffic: Traffic, strategy: Strategy, words: list[str]
) -> None:
    """The decision tree, one leaf after the other."""
    choice = choose(traffic, None)
    assert choice.strategy == strategy
    for word in words:
        assert word in choice.reason


@given(TRAFFIC, CURRENT)
def test_too_few_requests_are_taken_for_any_kind(traffic: Traffic, current: Strategy | None) -> None:
    """Until there are enough to tell, the strategy that copes with all; the reason says how many there were."""
    choice = choose(traffic, current)
    if traffic.requests < ENOUGH_REQUESTS:
        assert choice.strategy == "hybrid" and f"too few requests: {traffic.requests} seen" in choice.reason


@given(TRAFFIC, CURRENT)
def test_reasons_begin_with_one_of_five_kinds(traffic: Traffic, current: Strategy | None) -> None:
    """What is before the colon can be a metric's label; the figures after it are different all the time."""
    kinds = {"too few requests", "offline", "heterogeneous", "streaming", "online and uniform"}
    assert choose(traffic, current).reason.split(":")[0] in kinds


@given(TRAFFIC, CURRENT)
def test_a_choice_is_kept_while_the_traffic_stays_as_it_is(traffic: Traffic, current: Strategy | None) -> None:
    """What is chosen for a traffic is chosen again for the same: no two strategies take turns. (The reason may name
    another of two figures that both say so.)"""
    first = choose(traffic, current)
    assert choose(traffic, first.strategy).strategy == first.strategy


def changes(spread: float, streaming: float, *, remember: bool) -> int:
    """How often the choice changes over 4,000 requests of one lane whose true spread and share are these."""
    draw = random.Random(5)
    window = TrafficWindow()
    current: Strategy | None = None
    count = 0
    for number in range(4000):
        # A gamma distribution of shape 1/c^2 has the spread c.
        length = round(draw.gammavariate(spread**-2, 1000 * spread**2))
        window.note(length, "chat", True, draw.random() < streaming)
        if number < 256:
            continue
        choice = choose(window.view(), current if remember else None)
        count += current is not None and choice.strategy != current
        current = choice.strategy
    return count


@pytest.mark.parametrize(
    "spread", [LENGTH_SPREAD - LENGTH_SPREAD_MARGIN, LENGTH_SPREAD, LENGTH_SPREAD + LENGTH_SPREAD_MARGIN]
)
def test_lengths_at_the_edge_do_not_flip_the_strategy(spread: float) -> None:
    """At a limit or between both, chance alone changes the choice less than once in three windows of requests."""
    assert changes(spread, 0.0, remember=True) <= 4000 / 256 / 3


@pytest.mark.parametrize("streaming", [STREAMING - STREAMING_MARGIN, STREAMING, STREAMING + STREAMING_MARGIN])
def test_streams_at_the_edge_do_not_flip_the_strategy(streaming: float) -> None:
    """As with lengths."""
    assert changes(0.1, streaming, remember=True) <= 4000 / 256 / 3


def test_without_the_last_choice_they_would() -> None:
    """The same requests, judged by one limit, change the choice every window and more: the tests above can fail."""
    assert changes(LENGTH_SPREAD - LENGTH_SPREAD_MARGIN, 0.0, remember=False) > 4000 / 256
    assert changes(0.1, STREAMING + STREAMING_MARGIN, remember=False) > 4000 / 256


def test_one_request_of_another_kind_counts_at_once_and_is_forgotten_with_the_window() -> None:
    """The first request with a target ends offline batching; 256 others later it is offline again."""
    window = TrafficWindow(256)
    for _ in range(256):
        window.note(500, "night", False, False)
    assert choose(window.view(), "static").strategy == "static"
    window.note(500, "night", True, False)
    assert choose(window.view(), "static").strategy == "dynamic"
    for _ in range(255):
        window.note(500, "night", False, False)
        assert choose(window.view(), "dynamic").strategy == "dynamic"
    window.note(500, "night", False, False)
    assert choose(window.view(), "dynamic").strategy == "static"


def state_of(traffic: Traffic, strategy: str = "") -> SchedulerState:
    waiting = [SequenceState("a", 10, 20, 0, 1.0)]
    return SchedulerState(1.0, (Band(64, 4),), (4,), waiting, [], SchedulingKnobs(), traffic=traffic, strategy=strategy)


def test_auto_plans_as_the_chosen_policy_does_and_says_who_and_why() -> None:
    """Only the name and the reason are its own."""
    state = state_of(Traffic(256, 1.0, 0.0, 0.1, 1))
    plan = policy_for("auto").plan(state)
    assert plan.strategy == "auto:dynamic"
    assert plan.reason == choose(state.traffic, None).reason
    assert plan.wait_s == Dynamic().plan(state).wait_s is not None


def test_auto_keeps_its_own_last_choice_and_no_other() -> None:
    """Between the two limits the last plan decides, if ``auto`` made it: a strategy that an operator had set before
    was not chosen for this traffic."""
    edge = Traffic(256, 1.0, 0.0, LENGTH_SPREAD, 1)
    plan = policy_for("auto").plan
    assert plan(state_of(edge, "auto:dynamic")).strategy == "auto:dynamic"
    assert plan(state_of(edge, "auto:hybrid")).strategy == "auto:hybrid"
    assert plan(state_of(edge, "dynamic")).strategy == plan(state_of(edge)).strategy == "auto:hybrid"
