"""Which band a sequence enters, and when it moves up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from headrace.kv.precision import at_least
from headrace.scheduling.admissible import Room, admissible
from headrace.scheduling.bands import Band
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
        above = next((b for b in _above(state.bands, sequence) if free[b] > 0), None)
        if above is None:
            stalled.add(sequence.request_id)
            continue
        free[above] -= 1
        moves.append(Promotion(sequence.request_id, above))
    return tuple(moves), frozenset(stalled)


def _above(bands: Sequence[Band], sequence: SequenceState) -> Iterator[int]:
    """Bands that hold more than the sequence's own, and keep KV precisely enough for it; shortest first."""
    assert sequence.slot is not None
    own = bands[sequence.slot.band].max_context_tokens
    for index in range(sequence.slot.band + 1, len(bands)):
        if bands[index].max_context_tokens > own and at_least(bands[index].kv_dtype, sequence.min_kv_dtype):
            yield index


def admissions_of(
    state: SchedulerState, room: Room, order: Iterable[SequenceState]
) -> tuple[tuple[Admission, ...], list[SequenceState]]:
    """Waiting sequences that get a stream now, in ``order``. Takes from ``room``."""
    entering = admissible(order, room, state)
    admissions = tuple([Admission(sequence.request_id, band) for sequence, band in entering])
    return admissions, [sequence for sequence, _ in entering]
