"""How long the next step will take: an online model of step time.

A step is one or more forward passes ("calls", one per band). A call's time is modelled as

    t = pace * (g(rows) + a * context tokens read by decodes + b * token pairs attended to by prefill)

where ``rows`` are all tokens of the call and ``g`` is piecewise linear between fixed knots, because it is not a
line: matrix kernels work in tiles (on one machine 2 rows took 14 ms, 8 took 23, 16 took 28, 32 took 50). Parameters
are multiples of a prior, fitted by recursive least squares on relative errors with forgetting. The prior ties the
knots to one another, near ones more than far ones: a machine that is half as fast as thought at one batch size is
expected to be so at the others until seen otherwise. ``pace`` is one number for the whole machine and follows within
some ten steps when it gets slower or faster as a whole (a neighbour, heat), which the parameters need not relearn.

Recursive least squares with forgetting: S. Haykin, Adaptive Filter Theory, chapter 10. Outliers are clipped
(Huber): a step that was held up says little about the next one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

KNOTS: Final = (
    1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 17, 20, 24, 28, 32, 33, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024,
    2048,
)  # fmt: skip
"""Rows at which ``g`` has a value of its own; beyond the last it goes on in the last direction."""

_DECODE_CONTEXT: Final = len(KNOTS)
_PREFILL_PAIRS: Final = len(KNOTS) + 1
_SIZE: Final = len(KNOTS) + 2

FORGETTING: Final = 0.99
"""Weight of the step before: half of the memory is the last 70 steps."""
_PRIOR_SPREAD: Final = 1.0
_SHARED, _NEAR, _OWN = 0.5, 0.4, 0.1
"""Of a knot's uncertainty: what all have in common, what neighbours have, what is its own."""
_PACE_STEP: Final = 0.15
_SLOWEST_PACE: Final = 1e-3
_MOST_SPREAD: Final = 4.0
_CLIP: Final = 3.0
_ERROR_MEMORY: Final = 0.95
_MOVE_MEMORY: Final = 0.3
_FIRST_ERROR: Final = 0.3


class Call(Struct, frozen=True):
    """One forward pass. ``context_tokens``: KV cells that its decodes read, summed. ``pairs``: pairs of (prefill
    token, earlier token of its sequence or itself), summed."""

    rows: int
    context_tokens: int = 0
    pairs: int = 0


def prefill_pairs(computed_tokens: int, chunk_tokens: int) -> int:
    """Pairs that a chunk after ``computed_tokens`` tokens attends to: each of its tokens sees all before it and
    itself."""
    return chunk_tokens * computed_tokens + chunk_tokens * (chunk_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class CostPrior:
    """What is believed before the first step: a decode of one sequence, prefill tokens per second in large calls,
    the fixed time of a call, copying the KV of one token."""

    single_decode_s: float = 0.02
    prefill_tokens_per_s: float = 500.0
    overhead_s: float = 0.005
    move_s_per_token: float = 2e-5

    def call_s(self, rows: int) -> float:
        """Time of a call without its attention."""
        if rows <= 1:
            return self.single_decode_s
        return max(self.single_decode_s, self.overhead_s + rows / self.prefill_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """``seconds`` expected, and ``error``: the typical relative error of the latest predictions."""

    seconds: float
    error: float

    def cautious_s(self, errors: float = 1.0) -> float:
        """The expectation with a margin of so many typical errors."""
        return self.seconds * (1 + errors * self.error)


@dataclass(slots=True)
class CostModel:
    """Learns from every step. ``predict`` never changes it."""

    prior: CostPrior = field(default_factory=CostPrior)
    steps: int = 0
    error: float = _FIRST_ERROR
    pace: float = 1.0
    _base_s: NDArray[np.float64] = field(init=False)
    _theta: NDArray[np.float64] = field(init=False)
    _spread: NDArray[np.float64] = field(init=False)
    _now_s: list[float] = field(init=False)
    _moves_s: dict[int, float] = field(default_factory=dict)
    _move_s_per_token: float | None = None

    def __post_init__(self) -> None:
        per_row_s = 1 / self.prior.prefill_tokens_per_s
        base = [self.prior.call_s(rows) for rows in KNOTS]
        # Attention per token is small beside a row's matrices: a thousandth of them per token of context.
        self._base_s = np.array([*base, per_row_s * 1e-3, per_row_s * 1e-3])
        self._theta = np.ones(_SIZE)
        octaves = np.log2(np.array(KNOTS, np.float64))
        spread = np.full((_SIZE, _SIZE), _SHARED) + np.eye(_SIZE) * _OWN
        spread[: len(KNOTS), : len(KNOTS)] += _NEAR * np.exp(-np.abs(octaves[:, None] - octaves[None, :]))
        self._spread = spread * _PRIOR_SPREAD
        self._now_s = self._base_s.tolist()

    def predict(self, calls: Sequence[Call]) -> Prediction:
        """The time of a step of these calls, seconds; 0 for none."""
        return Prediction(self.pace * sum([self._call_s(call) for call in calls]), self.error)

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """The expected time of one call, seconds: ``predict`` without the wrapping, for searches."""
        return self.pace * self._call_s(Call(rows, context_tokens, pairs))

    def move_s(self, tokens: int, band: int) -> float:
        """The expected time of copying one sequence's KV to another stream of ``band``: what it took lately."""
        if self._move_s_per_token is not None:
            return tokens * self._move_s_per_token
        return self._moves_s.get(band, tokens * self.prior.move_s_per_token)

    def learn_move(self, band: int, took_s: float, tokens: int | None = None) -> None:
        """Take in what copying one sequence's KV within ``band`` took: of ``tokens`` tokens, in whichever band, where
        the copy grows with them; None where whole streams are copied."""
        if tokens is not None:
            rate_s = took_s / max(1, tokens)
            known_s = rate_s if self._move_s_per_token is None else self._move_s_per_token
            self._move_s_per_token = known_s + _MOVE_MEMORY * (rate_s - known_s)
            return
        before_s = self._moves_s.get(band, took_s)
        self._moves_s[band] = before_s + _MOVE_MEMORY * (took_s - before_s)

    def _call_s(self, call: Call) -> float:
        """At a pace of 1."""
        now_s = self._now_s
        low, high, share = _between(call.rows)
        rows_s = now_s[low] * (1 - share) + now_s[high] * share
        return max(1e-9, rows_s) + (
            max(0.0, now_s[_DECODE_CONTEXT]) * call.context_tokens + max(0.0, now_s[_PREFILL_PAIRS]) * call.pairs
        )

    def learn(self, calls: Sequence[Call], took_s: float) -> None:
        """Take in what a step really took. Steps without calls and impossible times are ignored."""
        if not calls or not math.isfinite(took_s) or took_s <= 0:
            return
        shape_s = sum([self._call_s(call) for call in calls])
        relative = took_s / (self.pace * shape_s) - 1
        self.error = _ERROR_MEMORY * self.error + (1 - _ERROR_MEMORY) * min(abs(relative), 1.0)
        self.steps += 1
        # In multiples of what was expected, a step is worth the same whether it took 5 ms or 500.
        bound = _CLIP * max(self.error, 0.02)
        surprise = float(min(max(relative, -bound), bound))
        features = self._features(calls) / shape_s
        direction = self._spread @ features
        gain = direction / (FORGETTING + float(features @ direction))
        self._theta += gain * surprise
        self.pace *= 1 + _PACE_STEP * min(max(surprise, -0.5), 1.0)
        self._spread = (self._spread - np.outer(gain, direction)) / FORGETTING
        # Directions that no step touches would grow without end under forgetting.
        most = float(self._spread.diagonal().max())
        if most > _MOST_SPREAD:
            self._spread *= _MOST_SPREAD / most
        self.pace = min(max(self.pace, _SLOWEST_PACE), 1 / _SLOWEST_PACE)
        self._now_s = (self._theta * self._base_s).tolist()

    def _features(self, calls: Sequence[Call]) -> NDArray[np.float64]:
        """The time is this vector times theta: what each parameter's prior contributes."""
        vector = np.zeros(_SIZE)
        for call in calls:
            low, high, share = _between(call.rows)
            vector[low] += 1 - share
            vector[high] += share
            vector[_DECODE_CONTEXT] += call.context_tokens
            vector[_PREFILL_PAIRS] += call.pairs
        scaled: NDArray[np.float64] = vector * self._base_s
        return scaled


def _between(rows: int) -> tuple[int, int, float]:
    """The knots around ``rows`` and how far it is from the lower to the upper one (beyond 1 past the last)."""
    high = bisect_left(KNOTS, rows)
    if high == 0:
        return 0, 0, 0.0
    high = min(high, len(KNOTS) - 1)
    low = high - 1
    return low, high, (rows - KNOTS[low]) / (KNOTS[high] - KNOTS[low])
