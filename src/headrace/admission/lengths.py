"""How long a lane's answers are: learned from those that ended, one lane at a time.

The mean is recency-weighted: the k-th answer counts ``max(1 / (k + 1), RECENCY)``, so the first ones quickly
replace the lane's ``typical_output_tokens`` (which counts like one answer) and later half of the memory is the last
14. The high quantile is exact over the last ``WINDOW`` answers. Per lane that is at most ``WINDOW`` numbers, twice.

An answer that was cut by its limit would have been at least so long. It is taken in when it is longer than the mean;
a shorter one says nothing about how long answers get.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Final

RECENCY: Final = 0.05
WINDOW: Final = 128
LIKELY_SHARE: Final = 0.9
"""The share of answers that are no longer than ``OutputLength.likely_tokens``."""


@dataclass(frozen=True, slots=True)
class OutputLength:
    """What to expect of one answer: its ``expected_tokens``, and ``likely_tokens``, which nine of ten do not
    exceed (never below the expectation)."""

    expected_tokens: int
    likely_tokens: int

    def within(self, max_tokens: int | None) -> OutputLength:
        """The same, of an answer that ends at ``max_tokens``."""
        if max_tokens is None:
            return self
        return OutputLength(min(self.expected_tokens, max_tokens), min(self.likely_tokens, max_tokens))


@dataclass(slots=True)
class _Learned:
    mean: float
    answers: int = 0
    latest: deque[int] = field(default_factory=deque)
    ordered: list[int] = field(default_factory=list)

    def learn(self, tokens: int) -> None:
        self.answers += 1
        self.mean += (tokens - self.mean) * max(1 / (self.answers + 1), RECENCY)
        if len(self.latest) == WINDOW:
            del self.ordered[bisect_left(self.ordered, self.latest.popleft())]
        self.latest.append(tokens)
        insort(self.ordered, tokens)

    def likely(self) -> int:
        return self.ordered[int(LIKELY_SHARE * (len(self.ordered) - 1) + 0.5)] if self.ordered else 0


@dataclass(slots=True)
class OutputLengths:
    """Every lane's output length."""

    _lanes: dict[str, _Learned] = field(default_factory=dict)

    def expect(self, lane: str, typical_tokens: int) -> OutputLength:
        """What to expect of the lane's next answer; ``typical_tokens`` until some were seen."""
        learned = self._lanes.get(lane)
        if learned is None:
            return OutputLength(typical_tokens, typical_tokens)
        expected = max(1, round(learned.mean))
        return OutputLength(expected, max(expected, learned.likely()))

    def learn(self, lane: str, tokens: int, typical_tokens: int, *, cut: bool) -> None:
        """Take in an answer of ``tokens``; ``cut`` when its limit ended it. Empty answers are ignored."""
        learned = self._lanes.get(lane)
        if learned is None:
            learned = self._lanes[lane] = _Learned(float(typical_tokens))
        if tokens < 1 or (cut and tokens < learned.mean):
            return
        learned.learn(tokens)

    def learned(self) -> dict[str, OutputLength]:
        """What was learned, for lanes of which at least one answer was."""
        return {name: self.expect(name, 0) for name, lane in self._lanes.items() if lane.answers}
