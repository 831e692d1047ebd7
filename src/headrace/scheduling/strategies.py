"""The policy that carries out a strategy."""

from __future__ import annotations

from typing import assert_never

from headrace.scheduling.auto import Auto
from headrace.scheduling.continuous import DecodeFirst
from headrace.scheduling.dynamic import Dynamic
from headrace.scheduling.hybrid import Hybrid
from headrace.scheduling.knobs import Strategy
from headrace.scheduling.static import Static
from headrace.scheduling.step import StepPolicy


def policy_for(strategy: Strategy) -> StepPolicy:
    """The policy of ``strategy``. Policies keep nothing between steps: one may follow another at any time."""
    match strategy:
        case "static":
            return Static()
        case "dynamic":
            return Dynamic()
        case "continuous":
            return DecodeFirst()
        case "hybrid":
            return Hybrid()
        case "auto":
            return Auto({"static": Static(), "dynamic": Dynamic(), "continuous": DecodeFirst(), "hybrid": Hybrid()})
        case _:
            assert_never(strategy)
