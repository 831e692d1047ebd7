"""Student's t distribution for a whole number of degrees of freedom, in closed form."""

from __future__ import annotations

import math


def t_two_sided_p(t: float, freedom: int) -> float:
    """The probability that a t variable with ``freedom`` >= 1 degrees of freedom is at least as far from 0 as ``t``.

    Abramowitz and Stegun, 26.7.3 and 26.7.4, with theta = atan(t / sqrt(freedom)).
    """
    if freedom < 1:
        raise ValueError("degrees of freedom begin at 1")
    theta = math.atan(abs(t) / math.sqrt(freedom))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    inside = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1 - inside))


def t_quantile(confidence: float, freedom: int) -> float:
    """The t that a two-sided interval of level ``confidence`` reaches to: 4.303 for 0.95 and 2."""
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence}")
    low, high = 0.0, 1.0
    while t_two_sided_p(high, freedom) > 1 - confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if t_two_sided_p(middle, freedom) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high
