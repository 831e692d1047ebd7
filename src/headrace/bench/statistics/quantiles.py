"""Percentiles from raw values, with intervals that assume no distribution, and the rule for printing none.

**Definition: nearest rank.** The q-th percentile of n values is the ceil(q * n)-th smallest. It is a value that
was really observed, it is never between two modes (a cache hit and a miss), and it agrees with the SLO's
sentence exactly: the p99 is within the SLO if and only if at least 99 % of the values are. Interpolating
definitions break that. Ranks are computed in whole numbers (q in thousandths), so 0.99 * 300 is never 298.

**Interval.** The number of values at or below the true percentile is binomial(n, q), whatever the
distribution; so two order statistics enclose it with a known probability. No fit, no normality.

**A percentile that the sample cannot support is not printed.** "Supported" means that the interval's upper
end exists: that the sample contains a value which lies above the true percentile with 97.5 % confidence,
q^n <= 0.025. That takes 6 values for the p50, 36 for the p90, 72 for the p95, 368 for the p99, 3,688 for the
p99.9. Below that the sample's own maximum may well lie under the percentile, and nothing can be said about it.
It was chosen over "ten values beyond it" because it is the weakest rule under which the printed interval has
both ends; how wide it is, the interval itself shows.

**Dependent values.** The binomial needs independent values. The gaps of one stream are not: ``effective_count``
measures, by stream, how many independent values they are worth, and the interval and the rule use that number.
Requests near one another in time are not independent either (they met the same queue); the intervals of one
run treat them as if they were, and ``compare`` does not (it draws blocks of time).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace.bench.statistics.intervals import CONFIDENCE

FloatArray = NDArray[np.float64]

PERCENTILES: dict[str, int] = {"p50": 500, "p90": 900, "p95": 950, "p99": 990, "p99.9": 999}
"""The percentiles reported, by name, in thousandths."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A percentile and the interval that holds the true one, in the values' unit."""

    value: float
    low: float
    high: float


def nearest_rank(count: int, permille: int) -> int:
    """The rank, from 1, of the percentile ``permille`` / 1000 among ``count`` values."""
    if count < 1 or not 0 < permille < 1000:
        raise ValueError(f"no percentile {permille}/1000 of {count} values")
    return -(-count * permille // 1000)


def percentile(ordered: FloatArray, permille: int) -> float:
    """The percentile of values in ascending order, whether or not they support it."""
    return float(ordered[nearest_rank(len(ordered), permille) - 1])


@lru_cache(maxsize=4096)
def interval_ranks(count: int, permille: int, confidence: float = CONFIDENCE) -> tuple[int, int] | None:
    """The ranks, from 1, of the two order statistics that enclose the percentile; None when there are none.

    The largest lower and smallest upper rank that each fail with at most half of ``1 - confidence``:
    P(X < lower) <= a and P(X < upper) >= 1 - a, with X binomial(count, q) the number of values at or below the
    true percentile.
    """
    first, below = _binomial_cdf(count, permille / 1000)
    tail = (1 - confidence) / 2
    # below[i] is P(X <= first + i).
    lower = first + int(np.searchsorted(below, tail, side="right"))
    upper = first + int(np.searchsorted(below, 1 - tail, side="left")) + 1
    if lower < 1 or upper > count:
        return None
    return lower, upper


def estimate(
    ordered: FloatArray, permille: int, confidence: float = CONFIDENCE, worth: int | None = None
) -> Estimate | None:
    """The percentile of values in ascending order with its interval; None when they cannot support it.

    ``worth``: how many independent values they are worth; as many as there are when not given. The interval
    is that of ``worth`` values, its ends moved outwards to the nearest of the real ones.
    """
    count = len(ordered)
    independent = count if worth is None else min(worth, count)
    if independent < 1:
        return None
    ranks = interval_ranks(independent, permille, confidence)
    if ranks is None:
        return None
    lower = (ranks[0] - 1) * count // independent + 1
    upper = -(-ranks[1] * count // independent)
    return Estimate(percentile(ordered, permille), float(ordered[lower - 1]), float(ordered[upper - 1]))


def effective_count(values: FloatArray, starts: NDArray[np.int64], threshold: float) -> int:
    """How many independent values the clustered ``values`` are worth for the share of them above ``threshold``.

    ``values`` lie cluster after cluster (the gaps of one request, then of the next); ``starts`` are the
    clusters' first positions, none of them empty. The variance of the share between clusters (the ratio
    estimator's linearised variance, Cochran, *Sampling Techniques*, ch. 9) over the variance that independent
    values would have is the design effect; the count divided by it is the result, at most the count itself.
    """
    count, clusters = len(values), len(starts)
    if clusters < 2:
        return min(count, clusters)
    above = np.add.reduceat((values > threshold).astype(np.int64), starts)
    sizes = np.diff(np.append(starts, count))
    share = above.sum() / count
    independent = share * (1 - share) / count
    if independent == 0:
        return count
    residuals = above - share * sizes
    between = clusters / (clusters - 1) * float(residuals @ residuals) / count**2
    design_effect = max(1.0, float(between / independent))
    return max(1, math.floor(count / design_effect))


def _binomial_cdf(count: int, share: float) -> tuple[int, FloatArray]:
    """``(first, below)`` with ``below[i]`` = P(X <= first + i), over all k whose probability is not negligible.

    Successive probabilities differ by the factor (n-k)/(k+1) * q/(1-q); the window reaches 12 standard
    deviations and 30 more to either side, and what lies outside is below 1e-30.
    """
    deviation = math.sqrt(count * share * (1 - share))
    reach = 12 * deviation + 30
    first = max(0, math.floor(count * share - reach))
    last = min(count, math.ceil(count * share + reach))
    k = np.arange(first, last, dtype=np.float64)
    steps = np.log((count - k) / (k + 1) * (share / (1 - share)))
    logs = np.concatenate(([0.0], np.cumsum(steps)))
    weights = np.exp(logs - logs.max())
    return first, np.cumsum(weights / weights.sum())
