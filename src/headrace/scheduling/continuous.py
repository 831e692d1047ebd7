"""``continuous``: sequences enter and leave between any two steps."""

from __future__ import annotations

from headrace.scheduling.admissible import Room
from headrace.scheduling.step import SchedulerState, StepPlan
from headrace.scheduling.token_budget import by_urgency, step_within_budget


class DecodeFirst:
    """Decode first, then prefill in chunks within a token budget; waiting sequences enter by urgency as
    their band and the caps have room, and one full band or lane never blocks another."""

    def plan(self, state: SchedulerState) -> StepPlan:
        room = Room(state)
        return step_within_budget(state, room, by_urgency(state, room), strategy="continuous")
