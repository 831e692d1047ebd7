"""Who may make the batch larger: streams, caps, the knee of step time, and the paces of those who decode."""

from __future__ import annotations

import math
from typing import Final

from headrace.scheduling.admissible import Room
from headrace.scheduling.order import WaitingQueue
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState
from headrace.scheduling.view import RunningView, kept_paces_s

PRESSING_STEPS: Final = 2.0
"""A deadline presses when its prefill must begin within so many of the longest steps: decoders' slack is not waited
for any more."""
BATCH_SHARE: Final = 0.9
"""Of the shortest pace that is kept, what a decode step may take once another sequence has entered."""
DEBTOR_SHARE: Final = 0.45
"""The same for a sequence of a tenant in debt, of the shortest pace of all that come."""


def presses(sequence: SequenceState, until_s: float) -> bool:
    """Whether its prefill must begin before ``until_s``; one whose deadline cannot be met in any case presses too."""
    if sequence.start_by_s == math.inf:
        return sequence.deadline_s is not None
    return sequence.start_by_s < until_s


class BatchRoom(Room):
    """``Room`` with two limits of the batch. Only sequences whose deadline presses make it larger than the knee of step
    time: beyond it everybody gets slower and nobody is served sooner. And nobody may make it so large that its decode
    step takes more than ``BATCH_SHARE`` of a pace that can be kept now by somebody as urgent as itself: one more would
    cost them their targets. A sequence of a tenant in debt must leave more (``DEBTOR_SHARE``), and to everybody.
    ``cap_s`` is the longest that a prefill chunk may take."""

    def __init__(self, state: SchedulerState, view: RunningView, queue: WaitingQueue, cap_s: float) -> None:
        super().__init__(state)
        self.presses_until_s = state.now_s + PRESSING_STEPS * cap_s
        self._times = state.times
        self._batch = [(state.batch_cap or math.inf) - band.members for band in view.bands]
        self._rows = [band.members for band in view.bands]
        self._cells = [band.context_tokens for band in view.bands]
        self._takes_s = [
            state.times.call_s(band.members, band.context_tokens) if band.members else 0.0 for band in view.bands
        ]
        self._paces_s = kept_paces_s(view, sum(self._takes_s))
        self._indebted = queue.indebted
        self._debtor_most_s = DEBTOR_SHARE * min([*self._paces_s.values(), queue.usual_pace_s()])

    def in_time(self, sequence: SequenceState, band: int) -> bool:
        """Whether the batch with it would still leave the paces that are kept now."""
        if not self._rows[band]:
            return True
        if self._indebted and (sequence.lane, sequence.tenant) in self._indebted:
            most_s = self._debtor_most_s
        else:
            paces_s = [s for priority, s in self._paces_s.items() if priority <= sequence.priority]
            most_s = BATCH_SHARE * min(paces_s, default=math.inf)
        if most_s == math.inf:
            return True
        cells = self._cells[band] + sequence.known_tokens
        longer_s = self._times.call_s(self._rows[band] + 1, cells) - self._takes_s[band]
        return sum(self._takes_s) + longer_s <= most_s

    def has_stream(self, band: int) -> bool:
        """Whether a stream of the band could be given, lanes aside."""
        return band < len(self.streams) and self.streams[band] > 0 and self.sequences > 0

    def lets_in(self, sequence: SequenceState, band: int) -> bool:
        """Whether it may enter now."""
        if not self.has_stream(band) or not self.lane_open(sequence.lane) or not self.in_time(sequence, band):
            return False
        if not self.fits(sequence):
            return False
        return self._batch[band] > 0 or presses(sequence, self.presses_until_s)

    def enter(self, sequence: SequenceState, band: int) -> None:
        """One enters."""
        self.take(sequence, band)
        self._batch[band] -= 1
        self._rows[band] += 1
        self._cells[band] += sequence.known_tokens
        self._takes_s[band] = self._times.call_s(self._rows[band], self._cells[band])

    def give_back(self, victim: SequenceState) -> None:
        """One leaves."""
        assert victim.slot is not None
        band = victim.slot.band
        self.streams[band] += 1
        self._batch[band] += 1
        self._rows[band] -= 1
        self._cells[band] -= victim.computed_tokens
        self._takes_s[band] = self._times.call_s(self._rows[band], self._cells[band]) if self._rows[band] else 0.0
        self.sequences += 1
        if self.memory is not None:
            self.memory.give_back(victim)
        if victim.lane in self.lanes:
            self.lanes[victim.lane] += 1
