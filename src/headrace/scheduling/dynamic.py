"""``dynamic``: requests that arrive close to each other are merged into one batch."""

from __future__ import annotations

from headrace.scheduling.admissible import Room, admissible
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState, StepPlan
from headrace.scheduling.token_budget import by_urgency, step_within_budget


class Dynamic:
    """When nothing runs, requests gather until ``merge_window_s`` after the oldest one arrived, or until as many wait
    as a batch holds (``merge_max``, or fewer where streams and caps end before). The most urgent of them are the
    batch; it runs until all of them have ended, and nobody enters meanwhile.

    Within a batch sequences go by length, shortest first: that is how they get their streams, so that neighbours are
    padded little, and how they are prefilled, so that nobody's first token waits for a longer prompt.
    """

    def plan(self, state: SchedulerState) -> StepPlan:
        entrants: list[SequenceState] = []
        if not state.running and state.waiting:
            room = Room(state)
            room.sequences = min(room.sequences, state.knobs.merge_max)
            gathering_s = _gathering_s(state, room.left)
            if gathering_s > 0:
                return StepPlan(wait_s=gathering_s, strategy="dynamic")
            entrants = [sequence for sequence, _ in admissible(by_urgency(state, room), room, state)]
            entrants.sort(key=_length)
        return step_within_budget(state, Room(state), entrants, strategy="dynamic", prefill_order=_length)


def _gathering_s(state: SchedulerState, most: int) -> float:
    """How long to wait for company still; at most 0 when there is enough of it, or it has been waited for."""
    if len(state.waiting) >= most:
        return 0.0
    return min([sequence.arrived_s for sequence in state.waiting]) + state.knobs.merge_window_s - state.now_s


def _length(sequence: SequenceState) -> tuple[int, str]:
    return (sequence.known_tokens, sequence.request_id)
