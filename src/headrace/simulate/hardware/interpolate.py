"""Between measured points: straight lines, and beyond them on in the last direction."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence


class Curve:
    """Values over one axis. Points of the same place count by their mean; one point alone is a constant. Beyond the
    ends the curve goes on in the last direction, but not below 0."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """Raises ValueError without a point."""
        found: dict[float, list[float]] = {}
        for place, value in points:
            found.setdefault(place, []).append(value)
        if not found:
            raise ValueError("a curve needs a point")
        self.places: Sequence[float] = sorted(found)
        self.values: Sequence[float] = [sum(found[place]) / len(found[place]) for place in self.places]

    def __call__(self, place: float) -> float:
        low, high, share = bracket(self.places, place)
        return max(0.0, self.values[low] + share * (self.values[high] - self.values[low]))


class Surface:
    """Curves over a second axis: each of its places may have points of its own along the first."""

    def __init__(self, curves: Mapping[float, Curve]) -> None:
        """Raises ValueError without a curve."""
        if not curves:
            raise ValueError("a surface needs a curve")
        self._places = sorted(curves)
        self._curves = [curves[place] for place in self._places]

    def __call__(self, second: float, first: float) -> float:
        low, high, share = bracket(self._places, second)
        below = self._curves[low](first)
        return below if low == high else max(0.0, below + share * (self._curves[high](first) - below))


def bracket(places: Sequence[float], place: float) -> tuple[int, int, float]:
    """The two places around, or the last two on that side, and how far from the one to the other."""
    if len(places) == 1:
        return 0, 0, 0.0
    high = min(max(1, bisect_right(places, place)), len(places) - 1)
    low = high - 1
    return low, high, (place - places[low]) / (places[high] - places[low])
