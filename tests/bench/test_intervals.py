"""Intervals of shares and of their differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.statistics.intervals import Share, newcombe, newcombe_p, two_sided_p, two_sided_z, wilson

Z = two_sided_z(0.95)


def test_wilson_as_in_the_textbook() -> None:
    # Newcombe (1998), table I: 81 of 263 and 15 of 148, score method without continuity correction.
    of_81 = wilson(81, 263, Z)
    assert (round(of_81.low, 4), round(of_81.high, 4)) == (0.2553, 0.3662)
    of_15 = wilson(15, 148, Z)
    assert (round(of_15.low, 4), round(of_15.high, 4)) == (0.0624, 0.1605)
    none = wilson(0, 20, Z)
    assert (none.low, round(none.high, 4)) == (0.0, 0.1611)


def test_all_good_is_not_certainty() -> None:
    interval = wilson(300, 300, Z)
    assert interval.high == 1.0
    assert interval.low == pytest.approx(300 / (300 + Z * Z))


@given(st.integers(1, 10_000), st.data())
def test_wilson_holds_the_point_and_stays_within_0_and_1(count: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, count))
    interval = wilson(hits, count, Z)
    assert 0 <= interval.low <= hits / count <= interval.high <= 1


@given(st.integers(1, 500), st.data())
def test_wilson_ends_are_where_the_score_test_turns(count: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, count))
    interval = wilson(hits, count, Z)
    for end in (interval.low, interval.high):
        if 0 < end < 1:
            distance = abs(hits / count - end)
            # Rounding of two square roots near 1.
            assert distance == pytest.approx(Z * math.sqrt(end * (1 - end) / count), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("hits", "count"), [(1, 0), (3, 2), (-1, 2)])
def test_shares_that_are_none_are_refused(hits: int, count: int) -> None:
    with pytest.raises(ValueError, match=r"share of nothing|between"):
        wilson(hits, count, Z)


@pytest.mark.parametrize(("truth", "level"), [(0.5, 0.9490), (0.9, 0.9454), (0.97, 0.9459), (0.99, 0.9318)])
def test_wilson_holds_the_true_share_as_often_as_it_should(truth: float, level: float) -> None:
    """``level``: the interval's exact one at this share and 400 trials (the binomial sum); it swings about 0.95."""
    rng = np.random.default_rng(3)
    trials, count = 4000, 400
    intervals = [wilson(int(hits), count, Z) for hits in rng.binomial(count, truth, size=trials)]
    missed = sum(not interval.low <= truth <= interval.high for interval in intervals)
    # Four standard deviations of a binomial count.
    assert abs(missed - trials * (1 - level)) <= 4 * math.sqrt(trials * level * (1 - level))


def test_newcombe_as_in_the_paper() -> None:
    # Newcombe (1998, the paper on differences), table II, example (a): 56/70 against 48/80, method 10.
    interval = newcombe(Share(48, 80), Share(56, 70), Z)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.0524, 0.3339)
    # Example (h): 10/10 against 0/10.
    extreme = newcombe(Share(0, 10), Share(10, 10), Z)
    assert (round(extreme.low, 4), extreme.high) == (0.6075, 1.0)


def test_the_p_value_is_the_level_at_which_newcombe_reaches_zero() -> None:
    a, b = Share(48, 80), Share(56, 70)
    p = newcombe_p(a, b)
    assert newcombe(a, b, two_sided_z(1 - p)).low == pytest.approx(0, abs=1e-9)
    assert newcombe_p(a, a) == 1.0
    assert p == pytest.approx(newcombe_p(b, a))


def test_differences_of_equal_shares_are_found_at_the_nominal_rate() -> None:
    rng = np.random.default_rng(4)
    trials, count = 2000, 500
    hits = rng.binomial(count, 0.95, size=(trials, 2))
    false = sum(newcombe_p(Share(int(x), count), Share(int(y), count)) <= 0.05 for x, y in hits)
    assert false <= trials * 0.05 + 4 * math.sqrt(trials * 0.05 * 0.95)


def test_normal_quantiles_and_tails_belong_together() -> None:
    assert two_sided_z(0.95) == pytest.approx(1.959964, abs=1e-6)
    assert two_sided_p(two_sided_z(0.99)) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="between 0 and 1"):
        two_sided_z(95)
