"""The figures of one group of requests: counts, attainment, rates, latencies."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from headrace.bench.results.columns import OUTCOMES, REASONS, BoolArray, Columns, IntArray, chunk_weights, gaps_s
from headrace.bench.results.figures import METRICS, Distribution, Group, PercentileFigure, ShareFigure, Window
from headrace.bench.statistics.intervals import CONFIDENCE, two_sided_z, wilson
from headrace.bench.statistics.quantiles import PERCENTILES, FloatArray, effective_count, estimate, percentile


class GroupMaker:
    """Makes ``Group`` figures from one run's columns; what all groups share is computed once."""

    def __init__(self, columns: Columns, window: Window) -> None:
        self._columns = columns
        self._window = window
        self._measured = columns.measured
        self._sent_in_window = self._inside(columns.times["sent_s"])
        self._done_in_window = columns.answered & self._inside(columns.times["end_s"])
        self._first_in_window = self._inside(columns.times["first_s"])
        self._ended_after = ~(columns.times["end_s"] <= window.end_s)  # NaN: it never ended
        self._tokens_in_window = self._arrived_tokens()

    def make(self, kind: Literal["whole", "lane", "class"], name: str, members: BoolArray) -> Group:
        """The figures of the requests in ``members``."""
        columns, length_s = self._columns, self._window.length_s
        measured = members & self._measured
        offered = measured & columns.offered
        count = int(offered.sum())
        good = int((offered & columns.good).sum())
        good_from_due = int((offered & columns.good_from_due).sum())
        answered = offered & columns.answered
        whole = members & columns.outcome("ok")
        input_tokens = int(columns.input_tokens[whole & self._first_in_window].sum())
        output_tokens = float(self._tokens_in_window[whole].sum())
        wasted_tokens = float(self._tokens_in_window[members & ~columns.outcome("ok")].sum())
        return Group(
            kind=kind,
            name=name,
            slo=self._slo(members),
            offered=count,
            good=good,
            good_from_due=good_from_due,
            not_offered=int((measured & ~columns.offered).sum()),
            outcomes=_counts(OUTCOMES, columns.outcome_ids[offered]),
            missed_by=_bit_counts(columns.reasons[offered]),
            attainment=share_figure(good, count),
            attainment_from_due=share_figure(good_from_due, count),
            offered_rps=count / length_s,
            sent_rps=int((members & self._sent_in_window).sum()) / length_s,
            completed_rps=int((members & self._done_in_window).sum()) / length_s,
            goodput_rps=int((members & columns.good & self._done_in_window).sum()) / length_s,
            input_tokens_per_s=input_tokens / length_s,
            output_tokens_per_s=output_tokens / length_s,
            total_tokens_per_s=(input_tokens + output_tokens) / length_s,
            without_usage=int((answered & ~columns.usage_seen).sum()),
            served_elsewhere=int((offered & columns.served_elsewhere).sum()),
            latencies={name: self._distribution(name, measured, answered) for name in METRICS},
            wasted_tokens_per_s=wasted_tokens / length_s,
            empty=int((offered & columns.outcome("ok") & ~columns.answered).sum()),
            ended_after=int((offered & self._ended_after).sum()),
        )

    def _distribution(self, metric: str, measured: BoolArray, answered: BoolArray) -> Distribution:
        if metric == "itl_s":
            gaps, starts = gaps_s(self._columns, answered)
            return distribution(gaps, starts)
        members = measured if metric == "send_lag_s" else answered
        values = self._columns.times[metric][members]
        return distribution(values[~np.isnan(values)])

    def _slo(self, members: BoolArray) -> dict[str, float] | None:
        names = [self._columns.classes[i] for i in np.unique(self._columns.class_ids[members])]
        slos = [self._columns.info.slos.get(name) for name in names]
        return slos[0] if slos and all(slo == slos[0] for slo in slos) else None

    def _inside(self, moments_s: FloatArray) -> BoolArray:
        # NaN (it never came) compares false.
        return (moments_s >= self._window.start_s) & (moments_s <= self._window.end_s)

    def _arrived_tokens(self) -> FloatArray:
        """Per request: the output tokens that arrived inside the window."""
        columns = self._columns
        arrived = self._inside(columns.chunk_ns / 1e9)
        owner = np.repeat(np.arange(len(columns)), np.diff(columns.chunk_starts))
        weights = np.where(arrived, chunk_weights(columns), 0.0)
        tokens: FloatArray = np.bincount(owner, weights=weights, minlength=len(columns)).astype(np.float64)
        return tokens


def share_figure(hits: int, count: int) -> ShareFigure | None:
    """``hits`` of ``count`` with Wilson's interval; None of nothing."""
    if count == 0:
        return None
    interval = wilson(hits, count, two_sided_z(CONFIDENCE))
    return ShareFigure(hits / count, interval.low, interval.high, hits, count)


def distribution(values: FloatArray, starts: IntArray | None = None) -> Distribution:
    """The distribution of ``values``. ``starts``: they come in clusters that begin there (gaps by request),
    and the intervals count with the number of independent values that each percentile's tail is worth."""
    count = len(values)
    if count == 0:
        return Distribution(0, 0, None, None, None, None, dict.fromkeys(PERCENTILES))
    ordered = np.sort(values)
    worth = {name: count for name in PERCENTILES}
    if starts is not None:
        worth = {
            name: effective_count(values, starts, percentile(ordered, permille))
            for name, permille in PERCENTILES.items()
        }
    percentiles: dict[str, PercentileFigure | None] = {}
    for name, permille in PERCENTILES.items():
        found = estimate(ordered, permille, worth=worth[name])
        percentiles[name] = None if found is None else PercentileFigure(found.value, found.low, found.high)
    mean = float(values.mean())
    return Distribution(
        count=count,
        independent=min(worth.values()),
        mean=mean,
        std=float(values.std(ddof=1)) if count > 1 else None,
        min=float(ordered[0]),
        max=float(ordered[-1]),
        percentiles=percentiles,
    )


def renamed(group: Group, kind: Literal["lane", "class"], name: str) -> Group:
    """The same figures under another kind and name."""
    return msgspec.structs.replace(group, kind=kind, name=name)


def _counts(names: tuple[str, ...], ids: IntArray) -> dict[str, int]:
    counted = np.bincount(ids, minlength=len(names))
    return {name: int(counted[i]) for i, name in enumerate(names) if counted[i]}


def _bit_counts(reasons: IntArray) -> dict[str, int]:
    counted = {name: int(((reasons >> bit) & 1).sum()) for bit, name in enumerate(REASONS)}
    return {name: count for name, count in counted.items() if count}


def sample_p99(values: FloatArray) -> float | None:
    """The nearest-rank p99 of the sample itself, however small; None of nothing."""
    if not len(values):
        return None
    rank = math.ceil(len(values) * 99 / 100)
    return float(np.partition(values, rank - 1)[rank - 1])
