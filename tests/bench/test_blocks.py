"""Dependence in time, blocks, resampled percentiles; Student's t."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.statistics.blocks import Pool, WeightedPercentile, block_weights, dependence
from headrace.bench.statistics.quantiles import nearest_rank
from headrace.bench.statistics.student import t_quantile, t_two_sided_p


def _autoregression(rng: np.random.Generator, count: int, coefficient: float) -> np.ndarray:
    series = rng.normal(size=count)
    for i in range(1, count):
        series[i] = coefficient * series[i - 1] + np.sqrt(1 - coefficient**2) * series[i]
    return series


def test_independent_entries_are_seen_as_such() -> None:
    rng = np.random.default_rng(1)
    found = [dependence(rng.normal(size=2000)) for _ in range(50)]
    assert np.median([behaviour.inflation for behaviour in found]) == 1.0
    assert {behaviour.length for behaviour in found} >= {13}, "the cube root of 2,000, rounded up"


@pytest.mark.parametrize("coefficient", [0.5, 0.8])
def test_the_variance_of_a_dependent_series_mean_is_estimated(coefficient: float) -> None:
    rng = np.random.default_rng(2)
    found = [dependence(_autoregression(rng, 4000, coefficient)) for _ in range(40)]
    truth = (1 + coefficient) / (1 - coefficient)
    # A spectral estimate at frequency 0 from 4,000 entries: 40 of them average to within 10 %.
    assert np.mean([behaviour.inflation for behaviour in found]) == pytest.approx(truth, rel=0.1)
    # Politis and White's optimal length for this series is (2 G^2 / D)^(1/3) n^(1/3), G / g = 2 c / (1 - c^2).
    optimal = (1.5 * (2 * coefficient / (1 - coefficient**2)) ** 2 * 4000) ** (1 / 3)
    assert np.mean([behaviour.length for behaviour in found]) == pytest.approx(optimal, rel=0.15)


def test_what_blocks_miss_is_known() -> None:
    rng = np.random.default_rng(3)
    behaviour = dependence(_autoregression(rng, 20_000, 0.8))
    # The mean lag of an autoregression's correlation: 2 c / (1 - c^2) = 4.44.
    assert behaviour.reach == pytest.approx(4.44, rel=0.15)
    assert behaviour.missed_share(44) == pytest.approx(0.1, rel=0.15)
    assert behaviour.missed_share(1) == 0.75


@pytest.mark.parametrize("series", [np.zeros(500), np.arange(3.0), np.empty(0)])
def test_a_series_that_says_nothing_is_taken_as_independent(series: np.ndarray) -> None:
    behaviour = dependence(series)
    assert behaviour.inflation == 1.0
    assert behaviour.length >= 1


@given(st.integers(1, 60), st.data())
def test_blocks_draw_whole_neighbourhoods_around_the_end(count: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, count))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for weights in block_weights(rng, count, length, 3):
        assert len(weights) == count
        blocks = -(-count // length)
        assert weights.sum() == blocks * length
        assert weights.min() >= 0 and weights.max() <= blocks


def test_a_block_is_a_run_of_neighbours() -> None:
    rng = np.random.default_rng(4)
    (weights,) = block_weights(rng, 12, 6, 1)
    doubled = np.concatenate((weights, weights))
    steps = np.flatnonzero(np.diff(doubled) > 0)
    falls = np.flatnonzero(np.diff(doubled) < 0)
    # Two blocks of six: every rise is followed by a fall six places later.
    assert {int(step + 6) % 12 for step in steps} == {int(fall) % 12 for fall in falls}


def test_every_request_is_drawn_equally_often() -> None:
    rng = np.random.default_rng(5)
    total = sum(block_weights(rng, 50, 7, 4000))
    # 8 blocks of 7 in each resample: 1.12 a request; the standard deviation of 4,000 of them is about 0.0165.
    assert np.asarray(total) / 4000 == pytest.approx(1.12, abs=5 * 0.0165)


@given(st.integers(1, 40), st.integers(0, 30), st.data())
def test_a_weighted_percentile_is_that_of_the_repeated_values(requests: int, reach: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    owners = rng.integers(requests, size=data.draw(st.integers(1, 120)))
    values = rng.integers(0, 20, size=len(owners)).astype(float)
    permille = data.draw(st.sampled_from([500, 900, 990]))
    weighted = WeightedPercentile(Pool.of(values, owners, requests), permille, reach)
    weights = rng.integers(0, 4, size=requests)
    repeated = np.sort(np.repeat(values, weights[owners]))
    if not len(repeated):
        assert np.isnan(weighted(weights))
    else:
        assert weighted(weights) == repeated[nearest_rank(len(repeated), permille) - 1]


@pytest.mark.parametrize(("freedom", "reach"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (30, 2.0423)])
def test_students_t_as_in_the_tables(freedom: int, reach: float) -> None:
    assert t_quantile(0.95, freedom) == pytest.approx(reach, abs=5e-5)
    assert t_two_sided_p(reach, freedom) == pytest.approx(0.05, abs=1e-5)
    assert t_two_sided_p(-reach, freedom) == t_two_sided_p(reach, freedom)


def test_t_without_freedom_is_refused() -> None:
    with pytest.raises(ValueError, match="degrees of freedom"):
        t_two_sided_p(1.0, 0)
