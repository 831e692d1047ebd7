"""The closed loop on a replica's places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.concurrency import LimitBounds, ReplicaTargets, ReplicaWindow, next_limit

seconds = st.none() | st.floats(0, 10)


@given(
    st.integers(1, 500),
    st.builds(ReplicaWindow, st.integers(0, 500), seconds, seconds, st.none() | st.integers(0, 500)),
    st.builds(ReplicaTargets, seconds, seconds),
    st.integers(1, 20),
    st.integers(20, 500),
)
def test_the_limit_stays_in_its_bounds(
    limit: int, window: ReplicaWindow, targets: ReplicaTargets, least: int, most: int
) -> None:
    decision = next_limit(limit, window, targets, LimitBounds(least, most))
    assert least <= decision.limit <= most


@pytest.mark.parametrize("start", [1, 16, 64])
def test_it_comes_to_what_the_target_allows(start: int) -> None:
    """An engine whose tokens take 10 ms and 2 ms more for each request: 50 ms allow 20. From above and from below it
    comes there within a minute of one-second windows and stays near: it never grows beyond 90 % of the target, and
    falls by 15 % when that is passed."""
    bounds, targets, limit = LimitBounds(1, 64), ReplicaTargets(itl_s=0.05), start
    history = []
    for _ in range(120):
        limit = next_limit(limit, ReplicaWindow(limit, 0.01 + 0.002 * limit), targets, bounds).limit
        history.append(limit)
    assert all(15 <= seen <= 20 for seen in history[60:])


def test_nothing_waits_inside_the_engine() -> None:
    """What waits there has lost its urgency: the limit becomes what runs."""
    decision = next_limit(32, ReplicaWindow(32, engine_waiting=12), ReplicaTargets(), LimitBounds(1, 64))
    assert (decision.limit, decision.reason) == (20, "engine_queue")


def test_it_does_not_grow_while_it_is_not_used_up() -> None:
    """A quiet night must not end in a limit that the morning's burst finds far too high."""
    limit = 8
    for _ in range(100):
        limit = next_limit(limit, ReplicaWindow(3, 0.01), ReplicaTargets(itl_s=1.0), LimitBounds(1, 64)).limit
    assert limit == 8


def test_a_target_out_of_reach_does_not_starve_the_engine() -> None:
    """Tokens take 100 ms at best and 50 are asked for: the limit is where they take 150, not 1."""
    bounds, targets, limit, least_s = LimitBounds(1, 64), ReplicaTargets(itl_s=0.05), 16, 1.0
    for _ in range(120):
        itl_s = 0.1 + 0.002 * limit
        least_s = min(least_s, itl_s)
        limit = next_limit(limit, ReplicaWindow(limit, itl_s, least_itl_s=least_s), targets, bounds).limit
    assert 16 <= limit <= 40


def test_without_targets_it_grows_to_what_the_engine_takes() -> None:
    limit = 1
    for _ in range(200):
        limit = next_limit(limit, ReplicaWindow(limit, 5.0, 5.0), ReplicaTargets(), LimitBounds(1, 64)).limit
    assert limit == 64
