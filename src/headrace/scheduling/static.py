"""``static``: one batch after the other."""

from __future__ import annotations

from headrace.scheduling.admissible import Room
from headrace.scheduling.step import SchedulerState, StepPlan
from headrace.scheduling.token_budget import by_urgency, step_within_budget


class Static:
    """When nothing runs, as many waiting sequences as streams and caps allow make a batch, most urgent first. It
    runs until all of them have ended; nobody enters meanwhile. The batch is what is running: nothing is remembered.
    """

    def plan(self, state: SchedulerState) -> StepPlan:
        room = Room(state)
        entrants = [] if state.running else by_urgency(state, room)
        return step_within_budget(state, room, entrants, strategy="static")
