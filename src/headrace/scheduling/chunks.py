"""How many prompt tokens fit into a time."""

from __future__ import annotations

from headrace.scheduling.cost import prefill_pairs
from headrace.scheduling.step import StepTimes

EFFICIENT_SHARE = 0.85
"""Chunks below this share of the best rate are worth waiting for, when waiting is free."""
_SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)


def fitting_tokens(
    times: StepTimes, budget_s: float, *, most: int, rows: int = 0, pairs: int = 0, computed_tokens: int = 0
) -> int:
    """The most tokens, up to ``most``, that can be added to a call of ``rows`` rows and ``pairs`` pairs so that it is
    predicted to take at most ``budget_s``. ``computed_tokens`` is what the sequence has already. 0 when none fit.

    Binary search: predicted times rise with the number of tokens (where a kernel's tiles make them dip, a little less
    than the most is found, never more than fits).
    """

    def fits(tokens: int) -> bool:
        return times.call_s(rows + tokens, 0, pairs + prefill_pairs(computed_tokens, tokens)) <= budget_s

    if most <= 0 or budget_s <= 0:
        return 0
    if fits(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def efficient_tokens(times: StepTimes, most: int) -> int:
    """The smallest usual chunk size, up to ``most``, that is computed at ``EFFICIENT_SHARE`` of the best rate of all
    of them."""
    sizes = [size for size in _SIZES if size < most] + [most]
    rates = [size / max(1e-9, times.call_s(size)) for size in sizes]
    enough = EFFICIENT_SHARE * max(rates)
    return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= enough)
