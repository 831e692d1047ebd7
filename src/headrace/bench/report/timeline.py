"""How load, queue and output went over the run's time, in equal bins."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headrace.bench.results.columns import OUTCOMES, Columns, chunk_weights
from headrace.bench.statistics.quantiles import FloatArray

_BINS = 150
"""About as many as a page-wide plot can show apart."""


@dataclass(frozen=True)
class Timeline:
    """Per bin; all requests that are legal, the warm-up's too. Bin i reaches from ``edges_s[i]`` to the next edge.

    ``in_flight`` and ``queued`` are means over the bin: requests sent and not ended, and of these the ones
    without their first token. ``failed_rps`` counts requests by when they ended, per outcome.
    """

    edges_s: FloatArray
    offered_rps: FloatArray
    completed_rps: FloatArray
    in_flight: FloatArray
    queued: FloatArray
    output_tokens_per_s: FloatArray
    failed_rps: dict[str, FloatArray]

    @property
    def step_s(self) -> float:
        return float(self.edges_s[1] - self.edges_s[0])


def timeline(columns: Columns) -> Timeline:
    """The run from its start to the last thing that happened in it."""
    times = columns.times
    moments = np.concatenate((times["due_s"], times["sent_s"], times["end_s"]))
    moments = moments[~np.isnan(moments)]
    last_s = max(float(moments.max()) if len(moments) else 0.0, columns.info.duration_s)
    step_s = _round_step(last_s / _BINS)
    edges: FloatArray = np.arange(math.floor(last_s / step_s) + 2, dtype=np.float64) * step_s
    sent = ~np.isnan(times["sent_s"])
    ended_s = np.where(np.isnan(times["end_s"]), edges[-1], times["end_s"])
    first_s = np.where(np.isnan(times["first_s"]), ended_s, times["first_s"])
    failed = {
        name: _per_second(times["end_s"][columns.outcome(name)], edges)
        for name in OUTCOMES
        if name != "ok" and columns.outcome(name).any()
    }
    return Timeline(
        edges_s=edges,
        offered_rps=_per_second(times["due_s"], edges),
        completed_rps=_per_second(times["end_s"][columns.answered], edges),
        in_flight=_mean_occupancy(times["sent_s"][sent], ended_s[sent], edges),
        queued=_mean_occupancy(times["sent_s"][sent], first_s[sent], edges),
        output_tokens_per_s=_per_second(columns.chunk_ns / 1e9, edges, chunk_weights(columns)),
        failed_rps=failed,
    )


def _per_second(moments_s: FloatArray, edges: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    counted = np.histogram(moments_s[~np.isnan(moments_s)], bins=edges, weights=weights)[0]
    rates: FloatArray = counted / (edges[1] - edges[0])
    return rates


def _mean_occupancy(starts_s: FloatArray, ends_s: FloatArray, edges: FloatArray) -> FloatArray:
    """The mean number of intervals that are open, per bin: the integral over the bin, by its length."""
    area = _area_since(starts_s, edges) - _area_since(ends_s, edges)
    occupancy: FloatArray = np.diff(area) / (edges[1] - edges[0])
    return np.maximum(occupancy, 0.0)  # rounding leaves -1e-13 where nothing is open


def _area_since(moments_s: FloatArray, edges: FloatArray) -> FloatArray:
    """At each edge: the time since each moment before it, summed."""
    ordered = np.sort(moments_s)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    passed = np.searchsorted(ordered, edges, side="right")
    area: FloatArray = passed * edges - sums[passed]
    return area


def _round_step(step_s: float) -> float:
    """The next larger of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step_s))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step_s * (1 - 1e-9))
