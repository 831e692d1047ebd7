"""A contextual bandit over moves: what each move was worth so far, and which to try next. Pure.

Of each move (a knob, up or down) in each context the belief is a normal distribution over its effect: by how much it
changes the reward of an arriving request. It begins at zero, give or take ``PRIOR_SD``. A trial's result updates it by
its precision; what other contexts learned counts for a quarter. Choice is by Thompson sampling: draw an effect from
each belief, take the best, and nothing at all when even that is not worth a trial. Moves that were seen to do harm are
therefore seldom tried again, and those that are unknown are tried first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from headrace.control.reward import Window

PRIOR_SD: Final = 0.05
WORTH_TRYING: Final = 0.01
_ELSEWHERE: Final = 0.25
_FORGET: Final = 0.97
_LEAST_ERROR: Final = 0.005
"""No trial is more certain than this: traffic changes."""


class Arm(NamedTuple):
    """A move: one step of one knob's grid."""

    knob: str
    direction: Literal[-1, 1]


class Context(NamedTuple):
    """Features, each in two or three ranges: how full the engine is (below half, below all, or beyond its batch cap),
    whether a tenth of the prompts are long, whether step times are predicted with an error of a fifth or more."""

    load: int
    long_prompts: bool
    surprised: bool


class Belief(NamedTuple):
    """Sums over trials: of precisions, and of precision times effect."""

    precision: float = 0.0
    weighted: float = 0.0


@dataclass(frozen=True, slots=True)
class Beliefs:
    """Everything that was learned."""

    by_arm: Mapping[tuple[Context, Arm], Belief] = field(default_factory=dict)

    def learned(self, context: Context, arm: Arm, effect: float, error: float) -> Beliefs:
        """With one more trial's result: an effect and its standard error. Everything older weighs a little less."""
        precision = 1 / max(error, _LEAST_ERROR) ** 2
        fresh = {key: Belief(b.precision * _FORGET, b.weighted * _FORGET) for key, b in self.by_arm.items()}
        old = fresh.get((context, arm), Belief())
        fresh[context, arm] = Belief(old.precision + precision, old.weighted + precision * effect)
        return Beliefs(fresh)

    def without(self, knob: str) -> Beliefs:
        """The knob stands elsewhere now: what was learned of its moves was about another step."""
        return Beliefs({key: belief for key, belief in self.by_arm.items() if key[1].knob != knob})

    def effect(self, context: Context, arm: Arm) -> tuple[float, float]:
        """Mean and standard deviation of what a move is believed to do."""
        precision, weighted = 1 / PRIOR_SD**2, 0.0
        for (where, what), belief in self.by_arm.items():
            if what == arm:
                share = 1.0 if where == context else _ELSEWHERE
                precision += share * belief.precision
                weighted += share * belief.weighted
        return weighted / precision, math.sqrt(1 / precision)

    def choose(self, context: Context, arms: Iterable[Arm], randomness: random.Random) -> Arm | None:
        """The move to try, None for none."""
        best, best_effect = None, WORTH_TRYING
        for arm in arms:
            mean, deviation = self.effect(context, arm)
            drawn = randomness.gauss(mean, deviation)
            if drawn > best_effect:
                best, best_effect = arm, drawn
        return best


def context_of(window: Window) -> Context:
    """The context that a window shows."""
    load = 0 if window.load < 0.5 else 1 if window.load < 1 else 2
    return Context(load, window.long_share >= 0.1, window.prediction_error >= 0.2)
