"""One trial of a move: windows with and without it, and what they say. Pure.

Windows come in the order A B B A (A: the last good setting, B: with the move), block after block. Each block has two
pairs of neighbours; whatever drifts steadily meanwhile (load over the day) is in A and B alike. A pair's difference is
B less A of the reward, corrected for arrivals (``reward.arrival_slope``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from headrace.control.bandit import Arm, Context
from headrace.control.reward import Window, fallen_lanes

Verdict = Literal["better", "no better", "open"]

BLOCK: Final = 4
LEAST_PAIRS: Final = 4
MOST_PAIRS: Final = 8
_T_975: Final = {3: 3.182, 5: 2.571, 7: 2.365}
"""Student's t by degrees of freedom: a move that does nothing passes one look in 40 times, and there are three."""


@dataclass(frozen=True, slots=True)
class Trial:
    """``windows`` with their rewards, in the order A B B A A B B A ..."""

    arm: Arm
    context: Context
    windows: tuple[tuple[Window, float], ...]

    @property
    def next_is_tried(self) -> bool:
        """Whether the next window is one with the move."""
        return is_tried(len(self.windows))

    def plus(self, window: Window, reward: float) -> Trial:
        """With the next window."""
        return replace(self, windows=(*self.windows, (window, reward)))

    @property
    def with_move(self) -> list[Window]:
        return [window for place, (window, _) in enumerate(self.windows) if is_tried(place)]

    @property
    def without_move(self) -> list[Window]:
        return [window for place, (window, _) in enumerate(self.windows) if not is_tried(place)]


def is_tried(place: int) -> bool:
    """Whether the window at a place of the order has the move."""
    return place % BLOCK in (1, 2)


def differences(trial: Trial, slope: float) -> list[float]:
    """B less A of each pair, in good requests per second."""
    levels = [reward - slope * window.arrivals_per_s for window, reward in trial.windows]
    found = []
    for first in range(0, len(levels) - 1, 2):
        pair = levels[first : first + 2]
        found.append(pair[1] - pair[0] if is_tried(first + 1) else pair[0] - pair[1])
    return found


def effect(pairs: Sequence[float]) -> tuple[float, float]:
    """Mean difference and its standard error; with fewer than two pairs the error is infinite."""
    mean = statistics.fmean(pairs) if pairs else 0.0
    return mean, statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf


def verdict(trial: Trial, slope: float) -> Verdict:
    """What a trial says after whole blocks. Better: the mean difference is above zero by a t-test, and no lane's
    attainment is lower. No better: it had all its windows, or began so badly that it will not become better."""
    if len(trial.windows) % BLOCK:
        return "open"
    pairs = differences(trial, slope)
    mean, error = effect(pairs)
    if mean <= 0:
        return "no better"
    if len(pairs) < LEAST_PAIRS:
        return "open"
    if mean > _T_975[len(pairs) - 1] * error and not _lanes_fell(trial):
        return "better"
    return "open" if len(pairs) < MOST_PAIRS else "no better"


def _lanes_fell(trial: Trial) -> bool:
    """Whether a lane's attainment is lower with the move; a little and a small doubt are enough not to keep it."""
    return bool(fallen_lanes(trial.without_move, trial.with_move, least_fall=0.01, sigmas=1.0))
