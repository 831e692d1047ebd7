"""How large a batch is worth its step time."""

from __future__ import annotations

from headrace.scheduling.step import StepTimes


def knee(times: StepTimes, most: int, gain: float, *, context_tokens: int = 0) -> int:
    """The largest batch size up to ``most`` that is still worth it.

    Sizes are tried by doubling from 1: doubling is worth it while tokens per second rise by at least ``gain`` (0.1:
    by a tenth). A machine whose kernels are poor at a few rows and good at many is not fooled by the dip: the search
    looks at every doubling up to ``most`` and takes the last that beat the best before it. ``context_tokens`` is the
    KV that one sequence reads. When the machine gets slower at large batches, as it does when they no longer fit its
    caches, the result goes down.
    """
    best_size, best_rate = 1, 1 / max(1e-9, times.call_s(1, context_tokens))
    size = 2
    while True:
        tried = min(size, most)
        if tried <= best_size:
            return best_size
        rate = tried / max(1e-9, times.call_s(tried, tried * context_tokens))
        # A last step that is less than a doubling needs only its part of the gain.
        wanted = 1 + gain * (tried / best_size - 1 if tried < 2 * best_size else 1.0)
        if rate >= best_rate * wanted:
            best_size, best_rate = tried, rate
        if tried == most:
            return best_size
        size *= 2
