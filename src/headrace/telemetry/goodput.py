"""Which requests met their SLO: the counts behind goodput and attainment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace.lanes.lane import SLO
from headrace.telemetry.timing import RequestTiming

LONG_PROMPT_TOKENS: Final = 512
"""Prompts from here on take a step of their own or more."""


@dataclass(slots=True)
class Goodput:
    """Counts since the gateway started. By lane: requests that met their whole SLO, and those that did not."""

    arrived: int = 0
    long_prompts: int = 0
    good: dict[str, int] = field(default_factory=dict)
    violated: dict[str, int] = field(default_factory=dict)

    def ended(self, lane: str, *, good: bool, prompt_tokens: int) -> None:
        """One request ended."""
        counts = self.good if good else self.violated
        counts[lane] = counts.get(lane, 0) + 1
        self.long_prompts += prompt_tokens >= LONG_PROMPT_TOKENS


def met_slo(slo: SLO, outcome: str, timing: RequestTiming | None, ended_s: float) -> bool | None:
    """Whether a request met every target that it had; None when it says nothing about the server.

    What failed or was shed did not. What the client did wrong says nothing, nor what it gave up, unless a target
    had been missed by then.
    """
    if outcome == "rejected":
        return None
    if outcome in ("shed", "error"):
        return False
    if timing is None:
        return None
    missed = _missed(slo, timing, ended_s, done=outcome == "ok")
    if outcome == "aborted":
        return False if missed else None
    return not missed


def _missed(slo: SLO, timing: RequestTiming, ended_s: float, *, done: bool) -> bool:
    """Whether a target is missed; while not ``done``, what has not come yet is as late as ``ended_s``."""
    last_s = timing.last_s if done and timing.last_s is not None else ended_s
    first_s = ended_s if timing.first_s is None else timing.first_s
    pairs = (
        (first_s - timing.arrived_s, slo.p99_ttft_s),
        (last_s - timing.arrived_s, slo.p99_e2e_s),
        (timing.tpot_s, slo.p99_tpot_s),
    )
    return any(target_s is not None and seen_s is not None and seen_s > target_s for seen_s, target_s in pairs)
