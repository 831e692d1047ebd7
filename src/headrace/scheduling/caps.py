"""How large a batch is worth its step time."""

from __future__ import annotations

import math

from headrace.scheduling.step import StepTimes

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
