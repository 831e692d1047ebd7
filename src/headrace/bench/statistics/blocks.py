"""Bootstrap over blocks of time.

Requests near one another met the same queue, so a run of n requests knows less than n independent ones do.
Resampling whole blocks of neighbours keeps that dependence inside the blocks (moving-block bootstrap, Künsch
1989; here circular, so that every request is drawn equally often, Politis and Romano 1992).

**Block length.** The automatic choice of Politis and White (2004, corrected by Patton, Politis and White 2009):
the flat-top spectral estimate of how a series correlates with itself gives the length that minimises the error
of its mean's variance. The series is what the statistic averages; for a percentile, "above it or not". The
longest length that any statistic of a lane asks for is used for all of them; at least the cube root of n, so
that a dependence too weak to be seen in one run is not cut entirely, at most 3 sqrt(n).

Blocks of finite length lose the dependence across their ends, and variances come out too small by a part that the
same estimate gives: ``Dependence.missed_share``. Stationary load is assumed: in a ramp, a block is not like
its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.bench.statistics.quantiles import FloatArray, nearest_rank

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Dependence:
    """How a series depends on its own past.

    ``length``: the block length, in entries. ``inflation``: how many times the variance of the series' mean is
    that of independent entries; never below 1. ``reach``: the mean lag of its correlation, so that blocks of
    length b miss the part ``reach / b`` of that variance.
    """

    length: int
    inflation: float
    reach: float

    def missed_share(self, length: int) -> float:
        """The part of the variance that blocks of ``length`` miss; at most 3/4, where the estimate ends."""
        return min(0.75, self.reach / length)


def dependence(series: FloatArray) -> Dependence:
    """The dependence of ``series``, whose entries are in order of time."""
    count = len(series)
    least = max(1, math.ceil(count ** (1 / 3)))
    if count < 10 or series.min() == series.max():
        return Dependence(min(least, max(1, count)), 1.0, 0.0)
    run = max(5, math.ceil(math.sqrt(math.log10(count))))
    most_lags = math.ceil(math.sqrt(count)) + run
    covariance = _autocovariance(series, min(count - 1, 2 * most_lags))
    band = 2 * math.sqrt(math.log10(count) / count)
    small = np.abs(covariance[1:] / covariance[0]) < band
    lags = min(2 * _last_large_lag(small, run, most_lags), most_lags, len(covariance) - 1)
    if lags == 0:
        return Dependence(least, 1.0, 0.0)
    k = np.arange(1, lags + 1)
    window = np.minimum(1.0, 2 * (1 - k / lags))  # the flat-top window: 1 up to half way, then down to 0
    weighted = window * covariance[1 : lags + 1]
    variance = max(float(covariance[0]), float(covariance[0] + 2 * weighted.sum()))
    slope = 2 * float((k * weighted).sum())
    length = (2 * slope**2 / (4 / 3 * variance**2)) ** (1 / 3) * count ** (1 / 3)
    longest = max(least, math.ceil(min(3 * math.sqrt(count), count / 3)))
    return Dependence(
        length=min(max(least, math.ceil(length)), longest),
        inflation=variance / float(covariance[0]),
        reach=max(0.0, slope) / variance,
    )


def block_weights(rng: np.random.Generator, count: int, length: int, resamples: int) -> Iterator[IntArray]:
    """``resamples`` times: how often each of ``count`` requests is drawn when whole blocks are."""
    blocks = -(-count // length)
    for _ in range(resamples):
        begun = np.bincount(rng.integers(count, size=blocks), minlength=count)
        # Request i is in the blocks that began at i - length + 1 ... i, around the end.
        total = np.cumsum(np.concatenate((begun[count - length + 1 :], begun))) if length > 1 else np.cumsum(begun)
        yield total[length - 1 :] - np.concatenate(([0], total[: count - 1]))


@dataclass(frozen=True)
class Pool:
    """Values of one metric, ascending, each with the number of the request it belongs to (of ``requests``)."""

    ordered: FloatArray
    owners: IntArray
    requests: int

    @staticmethod
    def of(values: FloatArray, owners: IntArray, requests: int) -> Pool:
        """A pool of values in any order."""
        order = np.argsort(values, kind="stable")
        return Pool(values[order], owners[order], requests)


class WeightedPercentile:
    """The nearest-rank percentile of a pool when request i counts ``weights[i]`` times.

    In nearly every resample it lies within ``reach`` ranks of the sample's own; only the values there are walked
    through, the ones below are counted by request. That makes a resample cost what the requests cost, not
    what their gaps do. A resample that falls outside walks through everything: the result is always exact.
    """

    def __init__(self, pool: Pool, permille: int, reach: int) -> None:
        self._pool = pool
        self._permille = permille
        middle = nearest_rank(len(pool.ordered), permille) - 1
        self._start, end = max(0, middle - reach), min(len(pool.ordered), middle + reach + 1)
        self._near = pool.owners[self._start : end]
        self._under = np.bincount(pool.owners[: self._start], minlength=pool.requests)
        self._members = np.bincount(pool.owners, minlength=pool.requests)

    def __call__(self, weights: IntArray) -> float:
        """NaN when no value's request was drawn."""
        total = int(weights @ self._members)
        if total == 0:
            return math.nan
        rank = nearest_rank(total, self._permille)
        passed = int(weights @ self._under) + np.cumsum(weights[self._near])
        if int(passed[0]) < rank <= int(passed[-1]) or (self._start == 0 and rank <= int(passed[-1])):
            return float(self._pool.ordered[self._start + int(np.searchsorted(passed, rank, side="left"))])
        everything = np.cumsum(weights[self._pool.owners])
        return float(self._pool.ordered[np.searchsorted(everything, rank, side="left")])


def _autocovariance(series: FloatArray, lags: int) -> FloatArray:
    """Autocovariances at lags 0 to ``lags``, by Fourier transform."""
    centred = series - series.mean()
    size = 1 << (2 * len(series) - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    covariance: FloatArray = np.fft.irfft(spectrum * np.conj(spectrum), size)[: lags + 1] / len(series)
    return covariance


def _last_large_lag(small: NDArray[np.bool_], run: int, most_lags: int) -> int:
    """The smallest m after which ``run`` correlations in a row are negligible."""
    in_a_row = 0
    for lag, negligible in enumerate(small[: most_lags + run], 1):
        in_a_row = in_a_row + 1 if negligible else 0
        if in_a_row == run:
            return lag - run
    large = np.flatnonzero(~small[:most_lags])
    return int(large[-1]) + 1 if len(large) else 0
