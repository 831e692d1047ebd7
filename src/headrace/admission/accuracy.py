"""How predictions compare with what happened, one lane at a time.

Two ratios are kept, for the time to the first token and for the decode after it: the sum of what happened over the
sum of what was predicted, both forgetting, so that long waits count for more than short ones. A ratio corrects the
next predictions, between ``1 / MOST_CORRECTION`` and ``MOST_CORRECTION``: beyond it the model is wrong, not biased.

A lane that sheds all it gets learns nothing from it. Each shed therefore takes a little of its correction back, so
that a wrong one cannot keep a lane shut.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace.admission.predict import Prediction

MEMORY: Final = 0.95
"""Weight of the answer before: half of the memory is the last 14."""
MOST_CORRECTION: Final = 3.0
_FIRST_S: Final = 0.05
"""Both sums begin here, as if so much had been predicted rightly."""
_DOUBT: Final = 0.02
_SHORTEST_S: Final = 1e-6
"""Predictions below it have no ratio worth the name."""


@dataclass(slots=True)
class _Ratio:
    happened_s: float = _FIRST_S
    predicted_s: float = _FIRST_S

    @property
    def value(self) -> float:
        return min(MOST_CORRECTION, max(1 / MOST_CORRECTION, self.happened_s / self.predicted_s))

    def learn(self, happened_s: float, predicted_s: float) -> None:
        # One answer may not outweigh all others: a single stall says little about the next prediction.
        bounded_s = min(happened_s, predicted_s * MOST_CORRECTION**2)
        self.happened_s = MEMORY * self.happened_s + (1 - MEMORY) * bounded_s
        self.predicted_s = MEMORY * self.predicted_s + (1 - MEMORY) * predicted_s

    def doubt(self) -> None:
        self.happened_s += _DOUBT * (self.predicted_s - self.happened_s)


@dataclass(slots=True)
class _Lane:
    ttft: _Ratio = field(default_factory=_Ratio)
    decode: _Ratio = field(default_factory=_Ratio)
    error: float | None = None


@dataclass(slots=True)
class Accuracy:
    """Every lane's ratios."""

    _lanes: dict[str, _Lane] = field(default_factory=dict)

    def corrected(self, lane: str, prediction: Prediction) -> Prediction:
        """The prediction times the lane's typical ratios."""
        known = self._lanes.get(lane)
        return prediction if known is None else prediction.scaled(known.ttft.value, known.decode.value)

    def first_token(self, lane: str, predicted_s: float, happened_s: float) -> None:
        """Take in the time to a first token, beside the uncorrected prediction for it."""
        if predicted_s < _SHORTEST_S:
            return
        known = self._lanes.setdefault(lane, _Lane())
        off = min(1.0, abs(happened_s / (predicted_s * known.ttft.value) - 1))
        known.error = off if known.error is None else MEMORY * known.error + (1 - MEMORY) * off
        known.ttft.learn(happened_s, predicted_s)

    def decoded(self, lane: str, predicted_s: float, happened_s: float) -> None:
        """Take in the time from a first to a last token, beside the uncorrected prediction for as many tokens."""
        if predicted_s >= _SHORTEST_S:
            self._lanes.setdefault(lane, _Lane()).decode.learn(happened_s, predicted_s)

    def shed(self, lane: str) -> None:
        """A request was shed by its prediction: nothing will show whether that was right."""
        known = self._lanes.get(lane)
        if known is not None:
            known.ttft.doubt()
            known.decode.doubt()

    def errors(self) -> dict[str, float]:
        """Typical relative error of the latest TTFT predictions by lane, corrected ones, at most 1 each."""
        return {name: lane.error for name, lane in self._lanes.items() if lane.error is not None}
