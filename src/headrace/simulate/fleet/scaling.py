"""How many replicas a group should have: a pure rule, asked at every interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.simulate.fleet.scenario import Scaling


@dataclass(frozen=True, slots=True)
class ScalingState:
    """``enough_since_s``: since when fewer replicas than there are would have been enough; None: they would not."""

    enough_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """``replicas`` to have from now on, and what to remember."""

    replicas: int
    state: ScalingState


def decide_scale(
    scaling: Scaling, state: ScalingState, *, serving: int, coming: int, busy: float, now_s: float
) -> ScalingDecision:
    """``serving`` replicas were busy for the share ``busy`` of the last interval; ``coming`` are warming up.

    As many as would be busy for ``target_busy`` (the rule of Kubernetes' horizontal autoscaler: what there is, times
    seen over wanted). More are ordered at once; one is given back when fewer were enough for ``calm_s``, and the calm
    then begins anew.
    """
    wanted = math.ceil(serving * busy / scaling.target_busy - 1e-9)
    wanted = min(scaling.most, max(scaling.least, wanted))
    have = serving + coming
    if wanted > have:
        return ScalingDecision(wanted, ScalingState())
    if wanted == have:
        return ScalingDecision(have, ScalingState())
    since_s = now_s if state.enough_since_s is None else state.enough_since_s
    if now_s - since_s >= scaling.calm_s and not coming:
        return ScalingDecision(have - 1, ScalingState())
    return ScalingDecision(have, ScalingState(since_s))
