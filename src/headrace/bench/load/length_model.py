"""What a length distribution is: whole numbers of tokens, at least 1, within optional bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_LENGTH_TOKENS = 100_000_000
"""No length is above this one, so that the tail of an unbounded distribution stays a number of tokens."""


class Lengths(Protocol):
    """A distribution of lengths. Frozen: sampling changes only the generator that is handed in."""

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """``count`` lengths in tokens, each drawn by itself."""
        ...

    def mean(self) -> float:
        """The expected length in tokens, bounds included. Exact for whole-number distributions; for normal and
        lognormal, whose draws are rounded, right to within half a token."""
        ...

    def describe(self) -> str:
        """The canonical text: ``parse_lengths`` reads it as an equal distribution."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """``min=`` and ``max=`` of a form, in tokens; None where it was not given."""

    low: int | None = None
    high: int | None = None

    @property
    def least(self) -> int:
        return 1 if self.low is None else self.low

    @property
    def most(self) -> int:
        return MAX_LENGTH_TOKENS if self.high is None else self.high

    def clamp(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths outside become the bound they passed."""
        return np.clip(lengths, self.least, self.most)

    def mean_of_uniform(self, first: int, last: int) -> float:
        """The mean of a whole number uniform in ``first..last``, clamped to the bounds."""
        count = last - first + 1
        below = min(max(self.least - first, 0), count)
        above = min(max(last - self.most, 0), count)
        inside = count - below - above
        middle = (max(first, self.least) + min(last, self.most)) / 2
        return (below * self.least + above * self.most + inside * middle) / count


UNBOUNDED = Bounds()
"""Neither ``min=`` nor ``max=``."""
