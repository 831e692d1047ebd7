"""From measured passes to curves: least squares on relative errors, over medians of repetitions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from headrace.errors import ConfigError


class MeasuredPass(Struct, frozen=True):
    """One forward pass: its ``rows``, and what they attend to: ``reach`` is context tokens of decodes, or pairs of
    prompts. ``took_s`` may be the median of ``times`` repetitions."""

    rows: int
    reach: int
    took_s: float
    times: int = 1


@dataclass(frozen=True, slots=True)
class Fitted:
    """``curve``: (rows, seconds) without attention; ``reach_s`` for each token or pair; ``errors`` of every pass
    measured, relative."""

    curve: list[tuple[int, float]]
    reach_s: float
    errors: list[float]

    def of(self, rows: int, reach: int) -> float:
        """Seconds of a pass whose rows were measured."""
        return dict(self.curve)[rows] + self.reach_s * reach


def fit(passes: Sequence[MeasuredPass]) -> Fitted:
    """A value for each number of rows that occurs, and one slope for all. Raises ConfigError without passes."""
    medians = medians_of(passes)
    if not medians:
        raise ConfigError("nothing was measured")
    rows = sorted({one.rows for one in medians})
    places = {count: place for place, count in enumerate(rows)}
    features = np.zeros((len(medians), len(rows) + 1))
    for index, one in enumerate(medians):
        features[index, places[one.rows]] = 1 / one.took_s
        features[index, -1] = one.reach / one.took_s
    values = _not_negative(features, np.ones(len(medians)))
    curve = [(count, float(values[places[count]])) for count in rows]
    found = Fitted(curve, float(values[-1]), [])
    known = dict(curve)
    errors = [one.took_s / max(1e-9, known[one.rows] + found.reach_s * one.reach) - 1 for one in passes]
    return Fitted(curve, found.reach_s, errors)


def medians_of(passes: Sequence[MeasuredPass]) -> list[MeasuredPass]:
    """One for each (rows, reach)."""
    together: dict[tuple[int, int], list[float]] = {}
    for one in passes:
        together.setdefault((one.rows, one.reach), []).append(one.took_s)
    return [
        MeasuredPass(rows, reach, statistics.median(taken), len(taken))
        for (rows, reach), taken in sorted(together.items())
    ]


def spread(errors: Sequence[float]) -> float:
    """The standard deviation of the logarithm, from the middle half of the errors: single stalls do not count."""
    logs = sorted([math.log1p(max(error, -0.99)) for error in errors])
    if len(logs) < 4:
        return 0.0
    quartiles = statistics.quantiles(logs, n=4)
    return (quartiles[2] - quartiles[0]) / 1.349  # of a normal distribution


def _not_negative(features: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with no negative value: what comes out negative is held at 0 and the rest solved again."""
    kept = list(range(features.shape[1]))
    while True:
        values = np.zeros(features.shape[1])
        values[kept] = np.linalg.lstsq(features[:, kept], wanted, rcond=None)[0]
        below = [place for place in kept if values[place] < 0]
        if not below:
            return values
        kept = [place for place in kept if place not in below]
