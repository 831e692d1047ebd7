"""Tests of a sample against the distribution that it claims to be from.

Every sampler test has a fixed seed, so it passes or fails for good; ``ALPHA`` is the chance that a right sampler
would have failed it with the seed that happened to be chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

ALPHA = 1e-4
Z = 3.8906
"""The normal quantile of ``1 - ALPHA / 2``: an estimate lies within Z standard errors but for a chance of ALPHA."""

Floats = NDArray[np.float64]
Cdf = Callable[[Floats], Floats]


def ks_critical(count: int) -> float:
    """The Kolmogorov-Smirnov distance that ``count`` draws exceed with a chance of ALPHA: from
    P(D > d) ~ 2 exp(-2 n d^2). Exact for continuous distributions (as n grows), safe for discrete ones."""
    return sqrt(log(2 / ALPHA) / (2 * count))


def ks_distance(sample: NDArray[np.int64] | Floats, cdf: Cdf) -> float:
    """The largest distance between the sample's cumulative distribution and a continuous one."""
    ordered = np.sort(np.asarray(sample, dtype=np.float64))
    expected = cdf(ordered)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max(np.max(steps[1:] - expected), np.max(expected - steps[:-1])))


def ks_distance_whole(sample: NDArray[np.int64], cdf: Cdf) -> float:
    """The same for whole numbers: ``cdf(n)`` is the chance of at most n; compared at every value from one below
    the smallest draw to the largest."""
    values = np.arange(int(sample.min()) - 1, int(sample.max()) + 1)
    got = np.searchsorted(np.sort(sample), values, side="right") / len(sample)
    return float(np.max(np.abs(got - cdf(values.astype(np.float64)))))


def assert_drawn_from(sample: Floats, cdf: Cdf) -> None:
    """The sample fits the continuous distribution."""
    assert ks_distance(sample, cdf) < ks_critical(len(sample))


def assert_whole_drawn_from(sample: NDArray[np.int64], cdf: Cdf) -> None:
    """The sample fits the distribution of whole numbers."""
    assert ks_distance_whole(sample, cdf) < ks_critical(len(sample))


def assert_mean(sample: NDArray[np.int64] | Floats, mean: float) -> None:
    """The sample's mean lies within Z of its own standard errors."""
    assert abs(float(np.mean(sample)) - mean) < Z * float(np.std(sample)) / sqrt(len(sample))


def assert_variance(sample: NDArray[np.int64] | Floats, variance: float) -> None:
    """The sample's variance lies within Z standard errors, sqrt((m4 - m2^2) / n) with its own central moments."""
    centred = np.asarray(sample, dtype=np.float64) - np.mean(sample)
    second, fourth = float(np.mean(centred**2)), float(np.mean(centred**4))
    assert abs(second - variance) < Z * sqrt((fourth - second**2) / len(sample))


def assert_count(count: int, expected: float) -> None:
    """A Poisson count lies within Z of its standard deviation, the root of its mean."""
    assert abs(count - expected) < Z * sqrt(expected)
