"""Runs against runs, from their summaries.

- ``by_runs``: several runs on a side: the spread between runs, taken as equal on both sides (same machine), with
  Student's t. What differs from run to run and not within one (caches, page placement, neighbours) is in it.
- ``by_summaries``: one summary a side: from the intervals that it holds, which take requests as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.bench.compare.comparison import Scale
from headrace.bench.compare.contrasts import (
    LATENCY_FIGURES,
    RATIO_EFFECT,
    SHARE_EFFECT,
    WHOLE,
    Contrast,
    needed_count,
    shares_contrast,
    t_p,
)
from headrace.bench.results.figures import METRIC_NAMES, Group, ShareFigure, Summary
from headrace.bench.statistics.intervals import Share, two_sided_p, two_sided_z
from headrace.bench.statistics.student import t_quantile


def by_runs(a: Sequence[Summary], b: Sequence[Summary], lanes: Sequence[str], confidence: float) -> list[Contrast]:
    """Several runs on at least one side (three runs together at least)."""
    return [
        _between_runs(name, figure, scale, [of(s) for s in a], [of(s) for s in b], confidence)
        for name, figure, scale, of in _figures(lanes)
    ]


def by_summaries(a: Summary, b: Summary, lanes: Sequence[str], confidence: float) -> list[Contrast]:
    """One summary a side: attainment by its counts, percentiles by their printed intervals."""
    found = []
    if len(lanes) > 1:
        found.append(_between_shares(WHOLE, a.whole.attainment, b.whole.attainment, confidence))
    for lane in lanes:
        of_a, of_b = _lane(a, lane), _lane(b, lane)
        found.append(_between_shares(lane, of_a.attainment, of_b.attainment, confidence))
        found += [_between_printed(lane, metric, name, of_a, of_b, confidence) for metric, name in LATENCY_FIGURES]
    return found


def _lane(summary: Summary, name: str) -> Group:
    return next(group for group in summary.lanes if group.name == name)


class _Figure:
    """Reads one figure from a summary."""

    def __init__(self, lane: str | None, metric: str, name: str = "") -> None:
        self._lane, self._metric, self._name = lane, metric, name

    def __call__(self, summary: Summary) -> float | None:
        group = summary.whole if self._lane is None else _lane(summary, self._lane)
        if self._metric == "attainment":
            return None if group.attainment is None else group.attainment.value
        if self._metric == "output_tokens_per_s":
            return group.output_tokens_per_s
        figure = group.latencies[self._metric].percentiles[self._name]
        return None if figure is None else figure.value


def _figures(lanes: Sequence[str]) -> list[tuple[str, str, Scale, _Figure]]:
    found: list[tuple[str, str, Scale, _Figure]] = [
        (WHOLE, "output tokens", "rate", _Figure(None, "output_tokens_per_s")),
    ]
    if len(lanes) > 1:
        found.insert(0, (WHOLE, "attainment", "share", _Figure(None, "attainment")))
    for lane in lanes:
        found.append((lane, "attainment", "share", _Figure(lane, "attainment")))
        for metric, name in LATENCY_FIGURES:
            found.append((lane, f"{METRIC_NAMES[metric]} {name}", "latency", _Figure(lane, metric, name)))
    return found


def _between_runs(
    group: str, figure: str, scale: Scale, a: list[float | None], b: list[float | None], confidence: float
) -> Contrast:
    has_a, has_b = [v for v in a if v is not None], [v for v in b if v is not None]
    mean_a = sum(has_a) / len(has_a) if has_a else None
    mean_b = sum(has_b) / len(has_b) if has_b else None
    if mean_a is None or mean_b is None or len(has_a) < len(a) or len(has_b) < len(b):
        return Contrast(group, figure, scale, mean_a, mean_b, why_not="some runs are too short to have this figure")
    if scale != "share":
        if min(has_a + has_b) <= 0:
            return Contrast(group, figure, scale, mean_a, mean_b, why_not="it is 0, which has no ratio")
        has_a, has_b = [math.log(value) for value in has_a], [math.log(value) for value in has_b]
    x, y = np.array(has_a), np.array(has_b)
    freedom = len(x) + len(y) - 2
    pooled = float(((x - x.mean()) ** 2).sum() + ((y - y.mean()) ** 2).sum()) / freedom
    error = math.sqrt(pooled * (1 / len(x) + 1 / len(y)))
    count = 2 / (1 / len(x) + 1 / len(y))  # as many runs on both sides would have the same error
    # Geometric means of ratios' figures, so that A, B and the change agree.
    shown = (float(x.mean()), float(y.mean())) if scale == "share" else (math.exp(x.mean()), math.exp(y.mean()))
    estimate = float(y.mean() - x.mean())
    reach = t_quantile(confidence, freedom) * error
    return Contrast(
        group,
        figure,
        scale,
        *shown,
        estimate=estimate,
        low=estimate - reach,
        high=estimate + reach,
        p=t_p(estimate, error, freedom),
        count=count,
        needed=needed_count(error, count, SHARE_EFFECT if scale == "share" else RATIO_EFFECT, confidence),
    )


def _between_shares(name: str, a: ShareFigure | None, b: ShareFigure | None, confidence: float) -> Contrast:
    of_a = None if a is None else Share(a.hits, a.count)
    of_b = None if b is None else Share(b.hits, b.count)
    return shares_contrast(name, of_a, of_b, 0 if a is None else a.count, 0 if b is None else b.count, confidence)


def _between_printed(lane: str, metric: str, name: str, a: Group, b: Group, confidence: float) -> Contrast:
    figure = f"{METRIC_NAMES[metric]} {name}"
    of_a, of_b = a.latencies[metric].percentiles[name], b.latencies[metric].percentiles[name]
    if of_a is None or of_b is None:
        values = (None if of_a is None else of_a.value, None if of_b is None else of_b.value)
        return Contrast(lane, figure, "latency", *values, why_not="a side is too short to have this figure")
    if min(of_a.low, of_b.low) <= 0:
        why = "it is 0 within its interval, which has no ratio"
        return Contrast(lane, figure, "latency", of_a.value, of_b.value, why_not=why)
    estimate = math.log(of_b.value / of_a.value)
    # Each side's interval says how far it alone could move the difference; the distances add as squares.
    down = math.hypot(math.log(of_b.value / of_b.low), math.log(of_a.high / of_a.value))
    up = math.hypot(math.log(of_b.high / of_b.value), math.log(of_a.value / of_a.low))
    towards_zero = down if estimate > 0 else up
    z = math.inf if towards_zero == 0 else abs(estimate) / towards_zero * two_sided_z(confidence)
    count = (a.latencies[metric].count + b.latencies[metric].count) / 2
    error = (down + up) / 2 / two_sided_z(confidence)
    return Contrast(
        lane,
        figure,
        "latency",
        of_a.value,
        of_b.value,
        estimate=estimate,
        low=estimate - down,
        high=estimate + up,
        p=1.0 if estimate == 0 else two_sided_p(z),
        count=count,
        needed=needed_count(error, count, RATIO_EFFECT, confidence),
    )
