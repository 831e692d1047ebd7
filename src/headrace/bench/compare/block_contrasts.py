"""One run against one run, from their records: bootstrap over blocks of time.

A percentile is compared only where both sides are worth at least 10 *independent* values beyond it (1,000
independent requests for a p99; ``_Statistic.worth``). This is stricter than the rule for printing one: in
simulation, with fewer, standard errors of correlated tails come out too small, and A against A "differs" in 10 %
of the cases instead of 5 %. Intervals use Student's t with as many degrees of freedom as there are blocks, less one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.bench.compare.contrasts import LATENCY_FIGURES, WHOLE, Contrast, ratio_contrast, shares_contrast
from headrace.bench.results.columns import BoolArray, Columns, chunk_weights, gaps_s
from headrace.bench.results.figures import METRIC_NAMES
from headrace.bench.results.summary import measured_window
from headrace.bench.statistics.blocks import Dependence, IntArray, Pool, WeightedPercentile, block_weights, dependence
from headrace.bench.statistics.intervals import Share
from headrace.bench.statistics.quantiles import PERCENTILES, FloatArray, percentile

_BEYOND = 10
_THROUGHPUT_BINS = 60
_REACH = 6
"""Standard errors within which a resample's percentile is looked for first."""


@dataclass(frozen=True)
class _Statistic:
    """A percentile of one metric in one run's lane, with what the bootstrap needs to know of it.

    ``redrawn`` gives it for a resample; ``worth``: how many independent values its tail is worth.
    """

    redrawn: WeightedPercentile
    permille: int
    value: float
    behaviour: Dependence
    worth: int

    @property
    def comparable(self) -> bool:
        return self.worth * (1000 - self.permille) >= _BEYOND * 1000 and self.value > 0


@dataclass(frozen=True)
class _LaneSeries:
    """One run's offered requests of a lane, in order of time."""

    index: IntArray
    good: BoolArray
    statistics: dict[tuple[str, str], _Statistic]

    @property
    def length(self) -> int:
        return max([1] + [statistic.behaviour.length for statistic in self.statistics.values()])


def by_blocks(
    a: Columns, b: Columns, lanes: Sequence[str], rng: np.random.Generator, *, confidence: float, resamples: int
) -> list[Contrast]:
    """One run a side. Where both offered the same requests (one schedule), the same blocks are drawn from both:
    what the load did to both then cancels."""
    found = [_throughput(a, b, rng, confidence, resamples)]
    if len(lanes) > 1:
        found.insert(0, _attainment(WHOLE, _lane_series(a, None), _lane_series(b, None), confidence))
    same_schedule = bool(a.info.schedule_sha256) and a.info.schedule_sha256 == b.info.schedule_sha256
    for lane in lanes:
        of_a, of_b = _lane_series(a, lane), _lane_series(b, lane)
        found.append(_attainment(lane, of_a, of_b, confidence))
        paired = same_schedule and np.array_equal(of_a.index, of_b.index)
        found += _latencies(lane, of_a, of_b, rng, paired=paired, confidence=confidence, resamples=resamples)
    return found


def _lane_series(columns: Columns, lane: str | None) -> _LaneSeries:
    offered = columns.measured & columns.offered
    if lane is not None:
        offered &= columns.lane(lane)
    statistics = {}
    if lane is not None:
        answered = offered & columns.answered
        position = np.cumsum(offered) - 1
        for metric in dict.fromkeys([metric for metric, _ in LATENCY_FIGURES]):
            values, owners = _values(columns, metric, answered, position)
            for name in [name for of_metric, name in LATENCY_FIGURES if of_metric == metric]:
                if len(values):
                    statistics[metric, name] = _statistic(values, owners, int(offered.sum()), PERCENTILES[name])
    return _LaneSeries(columns.index[offered], columns.good[offered], statistics)


def _values(columns: Columns, metric: str, answered: BoolArray, position: IntArray) -> tuple[FloatArray, IntArray]:
    """A metric's values and, of each, the place of its request among the lane's offered ones."""
    if metric != "itl_s":
        has = answered & ~np.isnan(columns.times[metric])
        return columns.times[metric][has], position[has]
    sizes = np.diff(columns.chunk_starts)
    values, starts = gaps_s(columns, answered)
    counts = np.diff(np.append(starts, len(values)))
    if columns.chunk_tokens is None:
        tokens = sizes
    else:
        owner = np.repeat(np.arange(len(columns)), sizes)
        tokens = np.bincount(owner, weights=columns.chunk_tokens, minlength=len(columns)).astype(np.int64)
    return values, np.repeat(position[answered & (tokens > 1)], counts)


def _statistic(values: FloatArray, owners: IntArray, requests: int, permille: int) -> _Statistic:
    pool = Pool.of(values, owners, requests)
    value = percentile(pool.ordered, permille)
    above = np.bincount(owners, weights=values > value, minlength=requests)
    members = np.bincount(owners, minlength=requests)
    share = float(above.sum()) / len(values)
    # What each request adds to the error of the share above: the linearised ratio estimator.
    influence = above - share * members
    behaviour = dependence(influence)
    variance = float(influence @ influence) * behaviour.inflation / len(values) ** 2
    worth = len(values) if variance == 0 else min(len(values), math.floor(share * (1 - share) / variance))
    reach = math.ceil(_REACH * math.sqrt(variance) * len(values)) + 1
    return _Statistic(WeightedPercentile(pool, permille, reach), permille, value, behaviour, worth)


def _latencies(
    lane: str,
    a: _LaneSeries,
    b: _LaneSeries,
    rng: np.random.Generator,
    *,
    paired: bool,
    confidence: float,
    resamples: int,
) -> list[Contrast]:
    keys = [key for key in LATENCY_FIGURES if key in a.statistics and key in b.statistics]
    chosen = [key for key in keys if a.statistics[key].comparable and b.statistics[key].comparable]
    length = max(a.length, b.length)
    drawn_a, drawn_b = _resampled(a, b, chosen, length, rng, paired=paired, resamples=resamples)
    freedom = max(1, min(len(a.index), len(b.index)) // length - 1)
    found = []
    for key in LATENCY_FIGURES:
        metric, name = key
        figure = f"{METRIC_NAMES[metric]} {name}"
        of_a, of_b = a.statistics.get(key), b.statistics.get(key)
        values = (None if of_a is None else of_a.value, None if of_b is None else of_b.value)
        if of_a is None or of_b is None or key not in chosen:
            found.append(Contrast(lane, figure, "latency", *values, why_not=_too_few(of_a, of_b, PERCENTILES[name])))
            continue
        column = chosen.index(key)
        error = _standard_error(drawn_a[:, column], drawn_b[:, column], of_a, of_b, length, paired=paired)
        count = (len(a.index) + len(b.index)) / 2
        found.append(ratio_contrast(lane, figure, "latency", of_a.value, of_b.value, error, freedom, count, confidence))
    return found


def _resampled(
    a: _LaneSeries,
    b: _LaneSeries,
    keys: Sequence[tuple[str, str]],
    length: int,
    rng: np.random.Generator,
    *,
    paired: bool,
    resamples: int,
) -> tuple[FloatArray, FloatArray]:
    """Logarithms of the statistics in every resample, one row each."""

    def logs(side: _LaneSeries, weights: IntArray) -> list[float]:
        drawn = [side.statistics[key].redrawn(weights) for key in keys]
        return [math.log(value) if value > 0 else math.nan for value in drawn]

    rows_a, rows_b = [], []
    if keys:
        length_a, length_b = min(length, len(a.index)), min(length, len(b.index))
        weights_b = block_weights(rng, len(b.index), length_b, resamples)
        for weights in block_weights(rng, len(a.index), length_a, resamples):
            rows_a.append(logs(a, weights))
            rows_b.append(logs(b, weights if paired else next(weights_b)))
    # Shaped by both counts: where no figure is comparable there is nothing in them to count rows by.
    shape = (len(rows_a), len(keys))
    return np.array(rows_a).reshape(shape), np.array(rows_b).reshape(shape)


def _standard_error(
    drawn_a: FloatArray, drawn_b: FloatArray, a: _Statistic, b: _Statistic, length: int, *, paired: bool
) -> float:
    """Of log(B / A), with what blocks of this length miss added."""
    missed_a, missed_b = a.behaviour.missed_share(length), b.behaviour.missed_share(length)
    if paired:
        return math.sqrt(float(np.nanvar(drawn_b - drawn_a, ddof=1)) / (1 - max(missed_a, missed_b)))
    of_a = float(np.nanvar(drawn_a, ddof=1)) / (1 - missed_a)
    of_b = float(np.nanvar(drawn_b, ddof=1)) / (1 - missed_b)
    return math.sqrt(of_a + of_b)


def _too_few(a: _Statistic | None, b: _Statistic | None, permille: int) -> str:
    if a is None or b is None:
        return "one side has no such figure"
    if a.value <= 0 or b.value <= 0:
        return "it is 0, which has no ratio"
    needed = _BEYOND * 1000 // (1000 - permille)
    short = " and ".join([side for side, of in (("A", a), ("B", b)) if not of.comparable])
    worth = f"A is worth {a.worth:,} and B {b.worth:,} independent values, {needed:,} are needed"
    return f"cannot be compared, {short} too short: {worth}"


def _attainment(name: str, a: _LaneSeries, b: _LaneSeries, confidence: float) -> Contrast:
    """Newcombe's interval of as many independent requests as each side is worth.

    How misses cluster is taken from the side that shows it more: one without a miss shows nothing of it, and would
    otherwise count as far more certain than the other.
    """
    inflation = max([dependence(side.good.astype(np.float64)).inflation for side in (a, b) if len(side.good)] or [1.0])
    of_a, of_b = [
        Share(float(side.good.sum()) / inflation, len(side.good) / inflation) if len(side.good) else None
        for side in (a, b)
    ]
    return shares_contrast(name, of_a, of_b, len(a.good), len(b.good), confidence)


def _throughput(a: Columns, b: Columns, rng: np.random.Generator, confidence: float, resamples: int) -> Contrast:
    series_a, series_b = _token_bins(a), _token_bins(b)
    mean_a, mean_b = float(series_a.mean()), float(series_b.mean())
    if mean_a <= 0 or mean_b <= 0:
        return Contrast(WHOLE, "output tokens", "rate", mean_a, mean_b, why_not="it is 0, which has no ratio")
    errors, blocks = [], []
    for series, mean in ((series_a, mean_a), (series_b, mean_b)):
        behaviour = dependence(series)
        drawn = [
            float(weights @ series) / weights.sum()
            for weights in block_weights(rng, len(series), behaviour.length, resamples)
        ]
        missed = behaviour.missed_share(behaviour.length)
        errors.append(float(np.var(drawn, ddof=1)) / (1 - missed) / mean**2)
        blocks.append(len(series) // behaviour.length)
    freedom = max(1, min(blocks) - 1)
    return ratio_contrast(
        WHOLE, "output tokens", "rate", mean_a, mean_b, math.sqrt(sum(errors)), freedom, None, confidence
    )


def _token_bins(columns: Columns) -> FloatArray:
    """Output tokens per second in equal bins of the measured window, of about a second."""
    window = measured_window(columns.info)
    bins = max(_THROUGHPUT_BINS, round(window.length_s))
    times_s = columns.chunk_ns / 1e9
    # As in the summary: tokens of answers that failed are no throughput.
    whole = np.repeat(columns.outcome("ok"), np.diff(columns.chunk_starts))
    counted, edges = np.histogram(
        times_s, bins=bins, range=(window.start_s, window.end_s), weights=np.where(whole, chunk_weights(columns), 0.0)
    )
    rates: FloatArray = counted / (edges[1] - edges[0])
    return rates
