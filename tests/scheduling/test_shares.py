"""Whose engine time it was lately: divided by rows, decayed, never more than there is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.shares import DECAY_S, MOST_LANES, LaneShares, Part

LANES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 512), max_size=4)
STEPS = st.lists(st.tuples(LANES, st.floats(0, 30), st.floats(0, 30)), max_size=30)


@given(STEPS)
def test_shares_are_parts_of_one_whatever_is_charged(steps: list[tuple[dict[str, int], float, float]]) -> None:
    """No lane below 0, all together at most 1, even for steps that claim more time than has passed."""
    shares = LaneShares()
    now_s = 100.0
    for rows, took_s, passed_s in steps:
        now_s += passed_s
        shares.charge(rows, took_s, now_s)
        found = shares.shares(now_s)
        assert all(share > 0 for share in found.values())
        assert sum(found.values()) <= 1 + 1e-9  # the rounding of some 30 additions


def test_a_lane_that_has_the_engine_for_itself_comes_to_have_all_of_it() -> None:
    """After one time constant 1 - 1/e of it, after many all of it, however long the steps are."""
    for step_s in (0.01, 0.5):
        shares = LaneShares()
        steps = round(DECAY_S / step_s)
        for step in range(1, steps + 1):
            shares.charge({"chat": 4}, step_s, step * step_s)
        assert shares.shares(DECAY_S)["chat"] == pytest.approx(1 - math.exp(-1))
        for step in range(steps + 1, 10 * steps + 1):
            shares.charge({"chat": 4}, step_s, step * step_s)
        assert shares.shares(10 * DECAY_S)["chat"] == pytest.approx(1, abs=1e-4)  # exp(-10) is missing


def test_one_pass_is_divided_by_rows() -> None:
    """Three of four rows are three quarters of the time."""
    shares = LaneShares()
    shares.charge({"chat": 1, "batch": 3}, 0.1, 1.0)
    found = shares.shares(1.0)
    assert found["batch"] == pytest.approx(3 * found["chat"])
    assert sum(found.values()) == pytest.approx(1 - math.exp(-0.1 / DECAY_S))


def test_passes_of_their_own_are_charged_their_own_time() -> None:
    """Two decodes that took as long as 200 prefill rows count as much, row for row a hundred times as much."""
    shares = LaneShares()
    shares.charge_parts([Part({"chat": 2}, 0.05), Part({"batch": 200}, 0.05)], 1.0)
    found = shares.shares(1.0)
    assert found["chat"] == pytest.approx(found["batch"])


def test_a_step_in_parts_weighs_what_it_weighs_whole() -> None:
    """Splitting a step changes who had it, never how much of it there was."""
    whole, split = LaneShares(), LaneShares()
    whole.charge({"chat": 2, "batch": 2}, 0.4, 1.0)
    split.charge_parts([Part({"chat": 2}, 0.3), Part({"batch": 2}, 0.1)], 1.0)
    assert sum(split.shares(1.0).values()) == pytest.approx(sum(whole.shares(1.0).values()))


def test_idle_time_is_nobodys() -> None:
    """Every share falls by the same factor while nothing is computed, until the lane is forgotten."""
    shares = LaneShares(decay_s=2.0)
    shares.charge({"chat": 1, "batch": 3}, 1.0, 10.0)
    before, after = shares.shares(10.0), shares.shares(12.0)
    assert after == pytest.approx({lane: share / math.e for lane, share in before.items()})
    assert shares.shares(10.0) == before, "looking changes nothing"
    assert shares.shares(10.0 + 2.0 * 25) == {}


def test_time_is_charged_once() -> None:
    """A second charge for the same second, and a clock that stands still or goes back, add nothing."""
    shares = LaneShares()
    shares.charge({"chat": 1}, 1.0, 10.0)
    before = shares.shares(10.0)
    shares.charge({"batch": 1}, 1.0, 10.0)
    shares.charge({"batch": 1}, 1.0, 9.0)
    assert shares.shares(10.0) == before
    shares.charge({"batch": 1}, 5.0, 10.5)
    assert shares.shares(10.5)["batch"] == pytest.approx(1 - math.exp(-0.5 / DECAY_S))


@pytest.mark.parametrize("took_s", [0.0, -1.0, math.inf, math.nan])
def test_impossible_times_are_ignored(took_s: float) -> None:
    """They say nothing about who used the engine."""
    shares = LaneShares()
    shares.charge({"chat": 1}, took_s, 1.0)
    shares.charge({}, 1.0, 1.0)
    shares.charge({"chat": 0}, 1.0, 1.0)
    assert shares.shares(1.0) == {}


def test_lanes_without_end_take_no_memory_without_end() -> None:
    """The lanes that used the engine least are forgotten, a lane that uses it much is not."""
    shares = LaneShares()
    for number in range(4 * MOST_LANES):
        shares.charge({"busy": 9, f"lane{number}": 1}, 0.01, number * 0.01)
    found = shares.shares(4 * MOST_LANES * 0.01)
    assert len(found) == MOST_LANES and max(found, key=found.__getitem__) == "busy"


@pytest.mark.parametrize("decay_s", [0.0, -1.0, math.inf, math.nan])
def test_a_time_constant_is_above_zero_and_finite(decay_s: float) -> None:
    """Shares would never change, or be of no past at all."""
    with pytest.raises(ValueError, match="above 0"):
        LaneShares(decay_s)
