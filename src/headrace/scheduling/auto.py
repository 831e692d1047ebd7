"""``auto``: the strategy that fits the traffic, and why.

The decision tree::

    nobody has a target and nobody streams     -> static      (offline)
    lengths differ, or lanes do and some have
      targets                                  -> hybrid      (heterogeneous)
    clients read tokens as they come           -> continuous  (streaming)
    else                                       -> dynamic     (online and uniform)

It does not flip at an edge. Counts (anybody with a target, more than one lane) change as soon as one request differs,
and change back only when the whole window is without such a request. Shares have two limits, and between them the
strategy that decided the last step is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from headrace.scheduling.knobs import Strategy
from headrace.scheduling.step import SchedulerState, StepPlan, StepPolicy
from headrace.scheduling.traffic import Traffic

ENOUGH_REQUESTS: Final = 32
"""Fewer say nothing reliable: the standard error of a spread of 0.5 is 0.08 among 32 requests, and a share of 0.1
would be three of them."""

LENGTH_SPREAD: Final = 0.5
"""Above it lengths differ. A batch that runs to its end lasts as long as its longest sequence; of 16 that is 1.8
standard deviations above the mean, so at a spread of 0.5 about half of the streams' time is spent on sequences that
have ended (0.9 / 1.9)."""
LENGTH_SPREAD_MARGIN: Final = 0.05
"""Twice the standard error of a spread of 0.5 in a full window of 256 requests (0.027)."""

STREAMING: Final = 0.1
"""Above it clients read along: with one in ten, a batch of 16 usually has one that would see its tokens come late."""
STREAMING_MARGIN: Final = 0.05
"""More than twice the standard error of a share of 0.1 in a full window of 256 requests (0.019)."""

PREFIX: Final = "auto:"


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy, and why it is the one: the kind of traffic, a colon, the figures."""

    strategy: Strategy
    reason: str


def choose(traffic: Traffic, current: Strategy | None) -> Choice:
    """The strategy for ``traffic``. ``current`` is the one that was chosen for the last step, None at first."""
    if traffic.requests < ENOUGH_REQUESTS:
        return Choice(
            "hybrid", f"too few requests: {traffic.requests} seen, {ENOUGH_REQUESTS} needed to tell their kind"
        )
    if traffic.with_targets == 0 and traffic.streaming == 0:
        return Choice("static", f"offline: none of {traffic.requests} requests has a target or streams")
    lanes = f"{traffic.lanes} {'lane' if traffic.lanes == 1 else 'lanes'}"
    targets = f"{traffic.with_targets:.0%} of requests with targets"
    spread = f"length spread {traffic.length_spread:.2f}"
    streams = f"{traffic.streaming:.0%} stream"
    if traffic.length_spread > _limit(
        LENGTH_SPREAD, LENGTH_SPREAD_MARGIN, above=current not in ("dynamic", "continuous")
    ):
        return Choice("hybrid", f"heterogeneous: {spread}, {lanes}, {targets}")
    if traffic.lanes > 1 and traffic.with_targets > 0:
        return Choice("hybrid", f"heterogeneous: {lanes}, {targets}, {spread}")
    if traffic.streaming > _limit(STREAMING, STREAMING_MARGIN, above=current == "continuous"):
        return Choice("continuous", f"streaming: {streams}, {lanes}, {spread}")
    return Choice("dynamic", f"online and uniform: {lanes}, {spread}, {streams}")


def _limit(middle: float, margin: float, *, above: bool) -> float:
    """The limit to compare with: harder to cross from the side that the last choice was on."""
    return middle - margin if above else middle + margin


class Auto:
    """Plans with the policy that ``choose`` names; its plans say ``auto:hybrid`` or the like, and why.

    Stateless: which strategy was the last is ``SchedulerState.strategy``. A batch of ``static`` or ``dynamic`` that
    is running when the choice changes is taken over as it is.
    """

    def __init__(self, policies: Mapping[Strategy, StepPolicy]) -> None:
        self._policies = policies

    def plan(self, state: SchedulerState) -> StepPlan:
        current = next((strategy for strategy in self._policies if state.strategy == PREFIX + strategy), None)
        choice = choose(state.traffic, current)
        plan = self._policies[choice.strategy].plan(state)
        reason = f"{choice.reason}; {plan.reason}" if plan.reason else choice.reason
        return msgspec.structs.replace(plan, strategy=PREFIX + choice.strategy, reason=reason)
