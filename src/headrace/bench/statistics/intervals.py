"""Intervals for shares: Wilson's for one share, Newcombe's for the difference of two.

Both hold their level at shares near 0 and 1 and at small counts, where "p plus or minus z standard errors"
does not: 300 good of 300 is not "100 % plus or minus 0".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95
"""The level of every interval that headrace prints, unless it says another."""


@dataclass(frozen=True, slots=True)
class Interval:
    """``low`` to ``high``, both included."""

    low: float
    high: float


def normal_quantile(probability: float) -> float:
    """The standard normal quantile of ``probability`` (0 < probability < 1)."""
    return NormalDist().inv_cdf(probability)


def two_sided_z(confidence: float) -> float:
    """How many standard errors a two-sided interval of level ``confidence`` reaches: 1.96 for 0.95."""
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence}")
    return normal_quantile(0.5 + confidence / 2)


def two_sided_p(z: float) -> float:
    """The probability that a standard normal variable is at least as far from 0 as ``z``."""
    return math.erfc(abs(z) / math.sqrt(2))


def wilson(hits: float, count: float, z: float) -> Interval:
    """Wilson's score interval for a share: the p with \\|hits/count - p\\| <= z * sqrt(p(1-p)/count).

    (E. B. Wilson, 1927.) ``count`` must be above 0. Neither needs to be whole: a sample whose members depend
    on one another is worth fewer members, and its interval is that of so many (an effective count).
    """
    if count <= 0:
        raise ValueError("a share of nothing has no interval")
    if not 0 <= hits <= count:
        raise ValueError(f"hits must lie between 0 and {count}, not at {hits}")
    share = hits / count
    denominator = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / denominator
    half = z / denominator * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    # Rounding may put an end a hair inside the point itself at shares of 0 and 1.
    return Interval(max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


@dataclass(frozen=True, slots=True)
class Share:
    """``hits`` of ``count``; ``count`` may be an effective one, with ``hits`` scaled alike."""

    hits: float
    count: float

    @property
    def value(self) -> float:
        return self.hits / self.count


def newcombe(a: Share, b: Share, z: float) -> Interval:
    """The interval of ``b - a``, two independent shares (R. G. Newcombe, 1998, method 10).

    Each side's Wilson interval says how far that side alone could move the difference; the two distances add
    as squares.
    """
    of_a, of_b = wilson(a.hits, a.count, z), wilson(b.hits, b.count, z)
    difference = b.value - a.value
    down = math.hypot(b.value - of_b.low, of_a.high - a.value)
    up = math.hypot(of_b.high - b.value, a.value - of_a.low)
    return Interval(difference - down, difference + up)


def newcombe_p(a: Share, b: Share) -> float:
    """The p-value that belongs to ``newcombe``: 1 minus the level at which its interval just reaches 0."""
    if a.value == b.value:
        return 1.0
    low, high = 0.0, 40.0  # at z = 40 any interval of a share reaches 0: it spans nearly all of [-1, 1]
    for _ in range(60):  # halves to 40 / 2**60, below rounding
        middle = (low + high) / 2
        interval = newcombe(a, b, middle)
        if interval.low <= 0 <= interval.high:
            high = middle
        else:
            low = middle
    return two_sided_p(low)
