"""Which sequence to copy so that a band's streams become dense again."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import Move, StepTimes

REPAID = 2.0
"""A copy must save this many times what it costs: the expected output may end earlier."""


def moves_of(
    running: Sequence[SequenceState], band: int, times: StepTimes, *, taken: frozenset[int] = frozenset()
) -> tuple[Move, ...]:
    """At most one copy for ``band``, from its highest used stream to its lowest hole. Streams below the lowest used one
    are no holes: they take part in no pass, and may keep KV that is worth more.

    A hole costs a row of every decode batch for as long as the sequences above it run; a copy costs its time once.
    The copy is worth it when the rows saved over the tokens that the highest sequence is still expected to generate
    take ``REPAID`` times as long. ``taken`` are streams that something in the same plan will use.
    """
    members = [s for s in running if s.slot is not None and s.slot.band == band]
    used = {s.slot.stream for s in members if s.slot is not None} | taken
    if len(members) < 2:
        return ()
    lowest = min(used)
    if max(used) - lowest + 1 == len(used):
        return ()
    hole = next(stream for stream in range(lowest, max(used)) if stream not in used)
    top = max(members, key=lambda s: s.slot.stream if s.slot is not None else -1)
    assert top.slot is not None
    if top.slot.stream <= hole or not top.decoding:
        return ()
    below = max((stream for stream in used if stream != top.slot.stream), default=0)
    # Dense or not, the rows above the next sequence are what a copy saves.
    span, span_after = top.slot.stream - lowest + 1, max(below, hole) - lowest + 1
    saved_s = max(0.0, times.call_s(span) - times.call_s(span_after))
    steps = max(1, top.output_tokens_to_expect - top.generated_tokens)
    if saved_s * steps < REPAID * times.move_s(top.computed_tokens, band):
        return ()
    return (Move(top.request_id, hole),)
