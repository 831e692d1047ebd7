"""How large a batch is worth its step time, and how large it is when most of that is reached."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.scheduling.step import StepTimes

SIZES_INTERVAL_S = 0.5
"""How often an engine looks for both: they move with the contexts that run."""
CROWD_SHARE = 0.8
"""Of the best tokens per second of any batch size: where a smaller batch is nearly as good."""
_CROWDS = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SMALLEST = 8
"""No knee is looked for below: so few sequences hardly wait for each other, and a cap would make requests queue."""


def knee(times: StepTimes, most: int, gain: float, *, context_tokens: float = 0.0, overhead_s: float = 0.0) -> int:
    """The largest batch size up to ``most`` that is still worth it.

    Sizes are tried by doubling from ``SMALLEST``: a size is worth it when its tokens per second exceed those of the
    last one that was by ``gain`` for every doubling between them (0.25: by a quarter). A machine whose kernels are poor
    at a few rows and good at many is not fooled by the dip: the search looks at every doubling up to ``most``.
    ``context_tokens`` is the KV that one sequence reads, ``overhead_s`` what a step takes besides its forward passes.
    When the machine gets slower at large batches, as it does when contexts grow, the result goes down.
    """

    def rate(size: int) -> float:
        return size / max(1e-9, overhead_s + times.call_s(size, int(size * context_tokens)))

    size = best_size = min(SMALLEST, most)
    best_rate = rate(size)
    while size < most:
        size = min(2 * size, most)
        tried_rate = rate(size)
        if tried_rate >= best_rate * (1 + gain) ** math.log2(size / best_size):
            best_size, best_rate = size, tried_rate
    return best_size


def crowd(times: StepTimes, most: int, *, context_tokens: float = 0.0, overhead_s: float = 0.0) -> int:
    """The smallest batch size up to ``most`` that decodes at ``CROWD_SHARE`` of the best tokens per second of any: who
    joins it adds little, and makes everybody slower. Parameters as of ``knee``."""
    sizes = [size for size in _CROWDS if size < most] + [most]
    rates = [size / max(1e-9, overhead_s + times.call_s(size, int(size * context_tokens))) for size in sizes]
    enough = CROWD_SHARE * max(rates)
    return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= enough)


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """``knee`` and ``crowd``; 0 while nothing is known of the machine."""

    knee: int = 0
    crowd: int = 0


def batch_sizes(
    times: StepTimes, most: int, gain: float, *, context_tokens: float = 0.0, overhead_s: float = 0.0
) -> BatchSizes:
    """Both sizes for one machine as it is now."""
    return BatchSizes(
        knee(times, most, gain, context_tokens=context_tokens, overhead_s=overhead_s),
        crowd(times, most, context_tokens=context_tokens, overhead_s=overhead_s),
    )
