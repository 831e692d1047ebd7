"""What a stretch of serving was worth: good requests per second less a penalty for each violation. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct


class LaneCounts(Struct, frozen=True):
    """Requests of one lane in a window: those that ended and met their whole SLO (``good``), and those that ended
    and did not, failed, or were shed (``violated``)."""

    good: int = 0
    violated: int = 0

    @property
    def ended(self) -> int:
        return self.good + self.violated

    def plus(self, other: LaneCounts) -> LaneCounts:
        """Both together."""
        return LaneCounts(self.good + other.good, self.violated + other.violated)


class Window(Struct, frozen=True):
    """What was counted while one setting was in force for ``duration_s``. ``arrived`` are requests that came in it.

    ``load`` is sequences in the engine by its batch cap, ``long_share`` the share of ended requests with long
    prompts, ``prediction_error`` the typical relative error of predicted step times.
    """

    duration_s: float
    lanes: Mapping[str, LaneCounts]
    arrived: int = 0
    load: float = 0.0
    long_share: float = 0.0
    prediction_error: float = 0.0

    @property
    def ended(self) -> int:
        return sum(lane.ended for lane in self.lanes.values())

    @property
    def arrivals_per_s(self) -> float:
        return self.arrived / self.duration_s


def lane_reward(lane: LaneCounts, duration_s: float, penalty: float) -> float:
    """``(good - penalty * violated) / duration_s``, in good requests per second."""
    return (lane.good - penalty * lane.violated) / duration_s


def reward(window: Window, penalty: float, min_requests: int) -> float | None:
    """The sum of the lanes' rewards; None when fewer than ``min_requests`` ended: that says nothing."""
    if window.ended < min_requests:
        return None
    return sum(lane_reward(lane, window.duration_s, penalty) for lane in window.lanes.values())


def arrival_slope(points: Sequence[tuple[float, float]]) -> float:
    """How much reward one arrival per second more brings, by least squares over ``(arrivals per second, reward)`` of
    windows of one setting, from -1 to 1; 0 when there are fewer than four.

    Arrivals do not depend on the setting and make most of the noise of a reward. Taking ``slope * (arrivals - their
    mean)`` away (a control variate) leaves the mean as it is. Under overload more arrivals bring nothing, or harm,
    and the slope says so.
    """
    if len(points) < 4:
        return 0.0
    mean_x = math.fsum(x for x, _ in points) / len(points)
    mean_y = math.fsum(y for _, y in points) / len(points)
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    if spread <= 0:
        return 0.0
    return max(-1.0, min(1.0, math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread))


class Attained(Struct, frozen=True):
    """What a lane attained over several windows, which may be weighted: good ones among ended ones, and by how much
    its windows differ beyond chance.

    Requests of a window share its bursts, so a lane's attainment varies more from window to window than that of
    independent requests would. ``dispersion`` is the variance of windows' counts over the binomial one (Pearson's
    chi-square by its degrees of freedom), at least 1, drawn to ``_USUAL_DISPERSION`` while windows are few.
    """

    good: float
    ended: float
    dispersion: float

    @classmethod
    def over(cls, windows: Sequence[Mapping[str, LaneCounts]], lane: str) -> Attained:
        """Of one lane in some windows."""
        counts = [window[lane] for window in windows if lane in window and window[lane].ended]
        good, ended = sum(count.good for count in counts), sum(count.ended for count in counts)
        share = good / ended if ended else 0.0
        spread = 0.0
        if 0 < share < 1:
            spread = sum((c.good - c.ended * share) ** 2 / (c.ended * share * (1 - share)) for c in counts)
        degrees = max(0, len(counts) - 1) + _FEW_WINDOWS
        return cls(good, ended, max(1.0, (spread + _FEW_WINDOWS * _USUAL_DISPERSION) / degrees))


_USUAL_DISPERSION: Final = 3.0
_FEW_WINDOWS: Final = 3
_LEAST_REQUESTS: Final = 10


def fell(before: Attained, after: Attained, *, least_fall: float, sigmas: float) -> bool:
    """Whether a lane's attainment fell by more than ``least_fall`` and by more than noise: a one-sided test of two
    shares with the dispersion of ``before``. Few requests on a side say nothing."""
    if before.ended < _LEAST_REQUESTS or after.ended < _LEAST_REQUESTS:
        return False
    was, is_now = before.good / before.ended, after.good / after.ended
    both = (before.good + after.good) / (before.ended + after.ended)
    error = math.sqrt(before.dispersion * both * (1 - both) * (1 / before.ended + 1 / after.ended))
    return was - is_now > max(least_fall, sigmas * error)


def fallen_lanes(before: Sequence[Window], after: Sequence[Window], *, least_fall: float, sigmas: float) -> list[str]:
    """Lanes whose attainment fell from some windows to others."""
    earlier, later = [window.lanes for window in before], [window.lanes for window in after]
    return [
        name
        for name in sorted({name for window in earlier for name in window})
        if fell(Attained.over(earlier, name), Attained.over(later, name), least_fall=least_fall, sigmas=sigmas)
    ]
