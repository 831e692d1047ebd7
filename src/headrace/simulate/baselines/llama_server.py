"""llama-server's slots: as many sequences as there are slots, each with a fixed part of the context.

A request takes the first free slot, first come first served. Every step is one batch of at most ``step_tokens``
(``-b``, 2,048 by default) tokens: one for each slot that generates, then prompt tokens, slot by slot in the order of
their numbers, until the batch is full. Nothing is ever preempted.
"""

from __future__ import annotations

from headrace.scheduling.admissible import Room
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState, StepPlan
from headrace.scheduling.token_budget import by_urgency, step_within_budget

_LAST = 1 << 30


class LlamaServer:
    """The policy. Stateless. Whoever runs it gives all requests the same priority."""

    def plan(self, state: SchedulerState) -> StepPlan:
        room = Room(state)
        return step_within_budget(
            state, room, by_urgency(state, room), strategy="llama-server", prefill_order=_slot_order
        )


def _slot_order(sequence: SequenceState) -> tuple[int, float, str]:
    """By slot; whoever enters in this step comes after those that have one."""
    stream = _LAST if sequence.slot is None else sequence.slot.stream
    return (stream, sequence.arrived_s, sequence.request_id)
