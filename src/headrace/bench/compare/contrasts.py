"""A figure in A against the same in B: what was estimated and how uncertain it is.

Ratios are estimated as differences of logarithms, which are nearer to normal and the same both ways round; shares
as differences. ``block_contrasts`` makes them of one run's records a side, ``summary_contrasts`` of summaries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.bench.compare.comparison import Scale
from headrace.bench.statistics.intervals import Share, newcombe, newcombe_p, normal_quantile, two_sided_z, wilson
from headrace.bench.statistics.student import t_quantile, t_two_sided_p

WHOLE = "all requests"
LATENCY_FIGURES = (
    ("ttft_s", "p50"),
    ("ttft_s", "p99"),
    ("tpot_s", "p50"),
    ("tpot_s", "p99"),
    ("itl_s", "p99"),
    ("e2e_s", "p50"),
    ("e2e_s", "p99"),
)
"""The metrics and percentiles that are compared in every lane."""

EFFECT = 0.05
RATIO_EFFECT = math.log1p(EFFECT)
SHARE_EFFECT = 0.01
"""The difference for which the needed number of requests is given: 5 %, of a share one point."""
_POWER = 0.8


@dataclass(frozen=True, slots=True)
class Contrast:
    """``estimate``, ``low``, ``high``: of log(B / A), or of B - A for a share. ``p``: of no difference.

    ``count``: requests or runs that a side has; ``needed``: how many would show the effect above. ``why_not``: why
    there is no estimate.
    """

    group: str
    figure: str
    scale: Scale
    a: float | None
    b: float | None
    estimate: float = 0.0
    low: float = 0.0
    high: float = 0.0
    p: float = 1.0
    count: float | None = None
    needed: int | None = None
    why_not: str = ""


def shares_contrast(
    name: str, a: Share | None, b: Share | None, count_a: int, count_b: int, confidence: float
) -> Contrast:
    if a is None or b is None:
        values = (None if a is None else a.value, None if b is None else b.value)
        return Contrast(name, "attainment", "share", *values, why_not="a side offered no request")
    z = two_sided_z(confidence)
    interval = newcombe(a, b, z)
    errors = []
    for share in (a, b):
        of_share = wilson(share.hits, share.count, z)
        errors.append((of_share.high - of_share.low) / 2 / z)
    return Contrast(
        name,
        "attainment",
        "share",
        a.value,
        b.value,
        estimate=b.value - a.value,
        low=interval.low,
        high=interval.high,
        p=newcombe_p(a, b),
        count=(count_a + count_b) / 2,
        needed=needed_count(math.hypot(*errors), (count_a + count_b) / 2, SHARE_EFFECT, confidence),
    )


def ratio_contrast(
    group: str,
    figure: str,
    scale: Scale,
    a: float,
    b: float,
    error: float,
    freedom: int,
    count: float | None,
    confidence: float,
) -> Contrast:
    estimate = math.log(b / a)
    reach = t_quantile(confidence, freedom) * error
    return Contrast(
        group,
        figure,
        scale,
        a,
        b,
        estimate=estimate,
        low=estimate - reach,
        high=estimate + reach,
        p=t_p(estimate, error, freedom),
        count=count,
        needed=None if count is None else needed_count(error, count, RATIO_EFFECT, confidence),
    )


def t_p(estimate: float, error: float, freedom: int) -> float:
    if error == 0:
        return 1.0 if estimate == 0 else 0.0
    return t_two_sided_p(estimate / error, freedom)


def needed_count(error: float, count: float, effect: float, confidence: float) -> int:
    """How many a side would show ``effect`` with a power of 80 %: the error falls with their square root."""
    reach = two_sided_z(confidence) + normal_quantile(_POWER)
    return math.ceil(count * (reach * error / effect) ** 2)
