"""Which band a sequence enters, and when it moves up."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.scheduling.admissible import Room, admissible
from headrace.scheduling.sequence import SequenceState, urgency
from headrace.scheduling.step import Admission, Promotion, SchedulerState


def promotions_of(state: SchedulerState, free: list[int]) -> tuple[tuple[Promotion, ...], frozenset[str]]:
    """Moves for sequences whose band is full, and those that must wait for room above. Takes from ``free``."""
    full = [
        s
        for s in state.running
        if s.slot is not None and s.computed_tokens >= state.bands[s.slot.band].max_context_tokens
    ]
    if not full:
        return (), frozenset()
    moves: list[Promotion] = []
    stalled: set[str] = set()
    for sequence in sorted(full, key=urgency):
        assert sequence.slot is not None
        above = next((b for b in range(sequence.slot.band + 1, len(free)) if free[b] > 0), None)
        if above is None:
            stalled.add(sequence.request_id)
            continue
        free[above] -= 1
        moves.append(Promotion(sequence.request_id, above))
    return tuple(moves), frozenset(stalled)


def admissions_of(
    state: SchedulerState, room: Room, order: Iterable[SequenceState]
) -> tuple[tuple[Admission, ...], list[SequenceState]]:
    """Waiting sequences that get a stream now, in ``order``. Takes from ``room``."""
    entering = admissible(order, room, state)
    admissions = tuple([Admission(sequence.request_id, band) for sequence, band in entering])
    return admissions, [sequence for sequence, _ in entering]
