"""What a window was worth, and when a lane's attainment fell."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.reward import Attained, LaneCounts, Window, arrival_slope, fallen_lanes, fell, reward


def window(arrived: int = 0, duration_s: float = 10.0, **lanes: tuple[int, int]) -> Window:
    return Window(duration_s, {name: LaneCounts(*counts) for name, counts in lanes.items()}, arrived)


def test_a_reward_is_good_requests_per_second_less_the_penalty_of_violations() -> None:
    """Over all lanes together."""
    assert reward(window(a=(30, 4), b=(10, 1)), penalty=2.0, min_requests=1) == pytest.approx((40 - 2 * 5) / 10)


def test_a_window_with_too_little_traffic_has_none() -> None:
    assert reward(window(a=(10, 9)), penalty=1.0, min_requests=20) is None
    assert reward(window(a=(10, 10)), penalty=1.0, min_requests=20) == 0


def test_the_slope_says_how_reward_follows_arrivals() -> None:
    """One for one while all are good, not at all when throughput is the limit; never beyond one, and 0 when there is
    nothing to learn from."""
    assert arrival_slope([(x, x) for x in (1.0, 2.0, 3.0, 4.0)]) == pytest.approx(1)
    assert arrival_slope([(x, 5.0) for x in (1.0, 2.0, 3.0, 4.0)]) == pytest.approx(0)
    assert arrival_slope([(x, -9 * x) for x in (1.0, 2.0, 3.0, 4.0)]) == -1
    assert arrival_slope([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]) == 0
    assert arrival_slope([(2.0, x) for x in (1.0, 2.0, 3.0, 4.0)]) == 0


def test_a_fall_beyond_noise_is_seen_and_one_within_it_is_not() -> None:
    steady = [window(a=(95, 5)) for _ in range(8)]
    assert fallen_lanes(steady, [window(a=(70, 30))], least_fall=0.02, sigmas=2.33) == ["a"]
    assert fallen_lanes(steady, [window(a=(92, 8))], least_fall=0.02, sigmas=2.33) == []
    assert fallen_lanes(steady, [window(a=(1, 8))], least_fall=0.02, sigmas=2.33) == []  # too few to say
    assert fallen_lanes(steady, [window(b=(0, 80))], least_fall=0.02, sigmas=2.33) == []  # another lane


def test_a_lane_whose_windows_differ_much_needs_a_deeper_fall() -> None:
    """Bursts make windows differ beyond chance, and the test knows that from the windows themselves."""
    steady = [window(a=(80, 20)) for _ in range(8)]
    bursty = [window(a=counts) for counts in ((100, 0), (60, 40)) * 4]
    drop = [window(a=(62, 38))]
    assert fallen_lanes(steady, drop, least_fall=0.02, sigmas=2.0) == ["a"]
    assert fallen_lanes(bursty, drop, least_fall=0.02, sigmas=2.0) == []


@given(st.integers(0, 2**32))
def test_equal_lanes_seldom_seem_to_fall(seed: int) -> None:
    """At 4 sigmas practically never: 1 in 30,000 by the normal distribution, less by the drawn-up dispersion."""
    chance = random.Random(seed)

    def one() -> Window:
        good = sum(chance.random() < 0.8 for _ in range(50))
        return window(a=(good, 50 - good))

    before, after = [one().lanes for _ in range(6)], [one().lanes for _ in range(2)]
    assert not fell(Attained.over(before, "a"), Attained.over(after, "a"), least_fall=0.02, sigmas=4.0)
