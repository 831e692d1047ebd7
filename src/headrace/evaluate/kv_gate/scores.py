"""What a precision did to a model's answers, in figures, and whether that will do. Pure.

Compared with F16, token by token on the same text:

- *greedy agreement*: how often the likeliest token is the same;
- *divergence*: Kullback-Leibler, sum over the vocabulary of p log(p / q) with F16's p, in nats; its mean and its 99th
  percentile over all positions;
- *exact-match drop*: the share of marked answers that F16 gets right less the share that the precision gets right, in
  points of a hundred. The bound is one-sided at 95 %: matched pairs, one half added to each kind of disagreement
  (A. Agresti and Y. Min, Statistics in Medicine 24, 2005), so that no disagreement at all still leaves a doubt that
  shrinks with the number of answers. It takes answers as independent of each other, also those of one text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Z_95: Final = 1.6449
"""The normal distribution's 95 % quantile."""


class GateLimits(msgspec.Struct, frozen=True):
    """What a precision must keep to. The drop must be *shown* to be under ``most_drop_points``: its upper bound at 95 %
    is what counts, so a precision does not pass by luck or by being asked little. Agreement and divergence catch what
    answers cannot: a model whose other words change."""

    least_agreement: float = 0.95
    most_mean_kl: float = 0.02
    most_p99_kl: float = 0.3
    most_drop_points: float = 1.0


DEFAULT_LIMITS: Final = GateLimits()


class PrecisionScores(msgspec.Struct, frozen=True):
    """The figures of one precision. ``lost`` and ``won`` are answers that only F16, and only this precision, gets
    right; ``greedy_same`` of ``greedy_total`` free-running greedy answers are F16's to the last token."""

    positions: int
    agreement: float
    mean_kl: float
    p99_kl: float
    answers: int
    reference_right: int
    lost: int
    won: int
    greedy_same: int
    greedy_total: int

    @property
    def drop_points(self) -> float:
        """Exact-match drop in points."""
        return 100 * (self.lost - self.won) / self.answers if self.answers else 0.0

    @property
    def drop_bound_points(self) -> float:
        """What the drop is below, at 95 %; 100 when nothing was asked."""
        if not self.answers:
            return 100.0
        total, lost, won = self.answers + 2, self.lost + 0.5, self.won + 0.5
        drop = (lost - won) / total
        error = math.sqrt(max(0.0, lost + won - (lost - won) ** 2 / total)) / total
        return 100 * (drop + Z_95 * error)

    def shortcomings(self, limits: GateLimits = DEFAULT_LIMITS) -> list[str]:
        """What fails, in words with the numbers; empty when the precision passes."""
        found: list[str] = []
        if not self.positions or not self.answers:
            return ["nothing was measured"]
        # Not "value < limit": a NaN must not pass.
        if not self.agreement >= limits.least_agreement:
            found.append(f"greedy agreement {self.agreement:.2%} is below {limits.least_agreement:.0%}")
        if not self.mean_kl <= limits.most_mean_kl:
            found.append(f"mean divergence {self.mean_kl:.4f} nats is above {limits.most_mean_kl:g}")
        if not self.p99_kl <= limits.most_p99_kl:
            found.append(f"99th percentile of divergence {self.p99_kl:.3f} nats is above {limits.most_p99_kl:g}")
        if not self.drop_bound_points < limits.most_drop_points:
            found.append(
                f"exact-match drop {self.drop_points:.2f} points is known to be under {self.drop_bound_points:.2f} at"
                f" 95 %, not under {limits.most_drop_points:g}"
            )
        return found


@dataclass(slots=True)
class Tally:
    """Counts while prompts go by."""

    same: int = 0
    kl: list[float] = field(default_factory=list)
    answers: int = 0
    reference_right: int = 0
    lost: int = 0
    won: int = 0
    greedy_same: int = 0
    greedy_total: int = 0

    def position(self, reference: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> None:
        """One position's log-probabilities."""
        self.kl.append(divergence(reference, other))
        self.same += int(reference.argmax() == other.argmax())

    def answer(self, *, reference_right: bool, right: bool) -> None:
        """One marked answer."""
        self.answers += 1
        self.reference_right += reference_right
        self.lost += reference_right and not right
        self.won += right and not reference_right

    def scores(self) -> PrecisionScores:
        """The figures of everything so far."""
        positions = len(self.kl)
        return PrecisionScores(
            positions=positions,
            agreement=self.same / positions if positions else 0.0,
            mean_kl=float(np.mean(self.kl)) if positions else 0.0,
            p99_kl=float(np.quantile(self.kl, 0.99)) if positions else 0.0,
            answers=self.answers,
            reference_right=self.reference_right,
            lost=self.lost,
            won=self.won,
            greedy_same=self.greedy_same,
            greedy_total=self.greedy_total,
        )


def log_probabilities(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Natural logs of the softmax, in double precision."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)


def divergence(reference: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Kullback-Leibler divergence in nats of log-probabilities; never below 0, where rounding would put it."""
    return max(0.0, float(np.sum(np.exp(reference) * (reference - other))))
