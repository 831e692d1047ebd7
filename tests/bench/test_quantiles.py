"""Percentiles: their definition, their intervals, and when there are none."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.statistics.quantiles import (
    PERCENTILES,
    effective_count,
    estimate,
    interval_ranks,
    nearest_rank,
    percentile,
)


def _exact_cdf(count: int, permille: int, k: int) -> Fraction:
    q = Fraction(permille, 1000)
    return sum((math.comb(count, j) * q**j * (1 - q) ** (count - j) for j in range(k + 1)), Fraction(0))


def _binomial_most(trials: int, probability: float) -> int:
    """What a binomial count exceeds with a probability below 1 in 30,000: mean plus four standard deviations."""
    return math.floor(trials * probability + 4 * math.sqrt(trials * probability * (1 - probability)))


@pytest.mark.parametrize(
    ("count", "permille", "rank"),
    [(1, 500, 1), (2, 500, 1), (3, 500, 2), (100, 990, 99), (300, 990, 297), (301, 990, 298), (1000, 999, 999)],
)
def test_the_percentile_is_the_value_at_the_rounded_up_rank(count: int, permille: int, rank: int) -> None:
    assert nearest_rank(count, permille) == rank
    assert percentile(np.arange(1.0, count + 1), permille) == rank


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300), st.floats(0, 1e3), st.sampled_from([500, 900, 990, 999]))
def test_the_percentile_is_within_a_bound_exactly_when_that_share_of_the_values_is(
    values: list[float], bound: float, permille: int
) -> None:
    within = sum(value <= bound for value in values)
    assert (percentile(np.sort(values), permille) <= bound) == (within * 1000 >= permille * len(values))


@given(st.lists(st.floats(0, 1e6), min_size=6, max_size=2000))
def test_percentiles_never_fall_and_lie_within_their_intervals(values: list[float]) -> None:
    ordered = np.sort(values)
    found = [estimate(ordered, permille) for permille in PERCENTILES.values()]
    printed = [figure for figure in found if figure is not None]
    assert printed, "six values support a median"
    for figure in printed:
        assert ordered[0] <= figure.low <= figure.value <= figure.high <= ordered[-1]
    assert [figure.value for figure in printed] == sorted(figure.value for figure in printed)


def test_the_median_of_a_hundred_lies_between_the_40th_and_the_61st() -> None:
    # The interval that textbooks give: its exact level is 0.9648.
    assert interval_ranks(100, 500) == (40, 61)


@given(st.integers(1, 400), st.sampled_from([500, 900, 990]))
def test_interval_ranks_are_the_tightest_that_keep_each_tail_within_a_fortieth(count: int, permille: int) -> None:
    ranks = interval_ranks(count, permille)
    tail = Fraction(25, 1000)
    if ranks is None:
        # The sample's largest value lies below the percentile too often, or its smallest above it.
        assert 1 - _exact_cdf(count, permille, count - 1) > tail or _exact_cdf(count, permille, 0) > tail
        return
    lower, upper = ranks
    assert _exact_cdf(count, permille, lower - 1) <= tail < _exact_cdf(count, permille, lower)
    assert _exact_cdf(count, permille, upper - 1) >= 1 - tail > _exact_cdf(count, permille, upper - 2)


@pytest.mark.parametrize(("name", "fewest"), [("p50", 6), ("p90", 36), ("p95", 72), ("p99", 368), ("p99.9", 3688)])
def test_a_percentile_is_printed_from_the_count_that_can_bound_it(name: str, fewest: int) -> None:
    permille = PERCENTILES[name]
    values = np.arange(float(fewest))
    assert estimate(values[:-1], permille) is None
    figure = estimate(values, permille)
    assert figure is not None
    assert figure.high == fewest - 1, "the upper end is the sample's largest value"


def test_nothing_has_no_percentile() -> None:
    assert estimate(np.empty(0), 500) is None


@pytest.mark.parametrize(("count", "permille"), [(60, 500), (400, 990), (2000, 990)])
def test_intervals_hold_the_true_percentile_as_often_as_they_say(count: int, permille: int) -> None:
    rng = np.random.default_rng(11)
    truth = -math.log(1 - permille / 1000)  # of the exponential distribution
    trials = 2000
    missed = 0
    for sample in rng.exponential(size=(trials, count)):
        figure = estimate(np.sort(sample), permille)
        assert figure is not None
        missed += not figure.low <= truth <= figure.high
    assert missed <= _binomial_most(trials, 0.05)
    # It is no idle promise either: these counts make the interval's level at most 0.98.
    assert missed >= trials * 0.01


def test_intervals_of_a_hundred_million_values_take_no_time_and_are_narrow() -> None:
    ranks = interval_ranks(100_000_000, 990)
    assert ranks is not None
    # Two normal standard errors of the rank, sqrt(n q (1 - q)) = 995, to either side.
    assert ranks[0] == pytest.approx(99_000_000 - 1950, abs=3)
    assert ranks[1] == pytest.approx(99_000_000 + 1950, abs=3)


def test_gaps_of_a_stream_that_are_all_alike_count_once() -> None:
    # 40 streams; the gaps of each are all short or all long: knowing one gap is knowing the stream.
    streams = np.repeat(np.array([0.01] * 30 + [0.05] * 10), 100)
    starts = np.arange(40) * 100
    # The ratio estimator's variance has 39 in its denominator where the binomial has 40.
    assert effective_count(streams, starts, 0.02) == 39


def test_independent_gaps_count_each() -> None:
    rng = np.random.default_rng(5)
    gaps = rng.exponential(size=20_000)
    # The design effect of independent values is 1 within its own sampling error, sqrt(2 / 400 clusters) = 7 %.
    assert effective_count(gaps, np.arange(400) * 50, 1.0) >= 20_000 / 1.3


def test_gaps_of_one_stream_alone_support_nothing() -> None:
    assert effective_count(np.arange(1000.0), np.array([0]), 500.0) == 1


def test_intervals_of_pooled_gaps_hold_the_truth_although_streams_differ() -> None:
    """Each stream has a pace of its own; taken as independent, the gaps' intervals are far too narrow."""
    rng = np.random.default_rng(9)
    trials, streams, gaps = 400, 100, 40
    log_sd = math.hypot(0.5, 0.3)
    truth = math.exp(log_sd * 1.2815515655446004)  # the p90 of the log-normal mixture
    missed = naive = 0
    for _ in range(trials):
        paces = rng.normal(scale=0.5, size=(streams, 1))
        values = np.exp(paces + rng.normal(scale=0.3, size=(streams, gaps))).ravel()
        ordered = np.sort(values)
        worth = effective_count(values, np.arange(streams) * gaps, percentile(ordered, 900))
        with_streams, without = estimate(ordered, 900, worth=worth), estimate(ordered, 900)
        assert with_streams is not None and without is not None
        missed += not with_streams.low <= truth <= with_streams.high
        naive += not without.low <= truth <= without.high
    assert missed <= _binomial_most(trials, 0.05)
    assert naive > trials * 0.3
