"""Which waiting sequences may enter now: free streams and caps, counted down as they enter."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.scheduling.bands import first_band
from headrace.scheduling.memory import RESERVE_AFTER_S, MemoryRoom
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState


class Room:
    """How many more sequences may enter before the next step.

    ``streams[b]`` counts streams of band ``b`` that are free within the band's cap, ``sequences`` those that
    ``max_num_seqs`` leaves, ``lanes`` what is left to each lane that has a cap. At most 0 means none, below 0 that
    so many are too many: a cap was turned down while they ran. ``memory`` is what the KV budget leaves, None without
    one.
    """

    def __init__(self, state: SchedulerState) -> None:
        knobs = state.knobs
        self.streams = list(state.free_streams)
        if knobs.band_caps:
            members = [0] * len(self.streams)
            for sequence in state.running:
                if sequence.slot is not None:
                    members[sequence.slot.band] += 1
            for band, (cap, used) in enumerate(zip(knobs.band_caps, members, strict=False)):
                self.streams[band] = min(self.streams[band], cap - used)
        self.sequences = (
            sum(state.free_streams) if knobs.max_num_seqs is None else knobs.max_num_seqs - len(state.running)
        )
        self.memory = None if state.memory is None else MemoryRoom(state.memory, state.running)
        self.lanes = dict(knobs.lane_caps)
        if self.lanes:
            for sequence in state.running:
                if sequence.lane in self.lanes:
                    self.lanes[sequence.lane] -= 1
        if self.memory is not None:
            self._reserve(self.memory, state)

    def _reserve(self, memory: MemoryRoom, state: SchedulerState) -> None:
        """Keep memory free for the oldest that has waited for it, where it is not a stream that it waits for."""
        oldest = min(state.waiting, key=lambda s: (s.arrived_s, s.request_id), default=None)
        if oldest is None or state.now_s - oldest.arrived_s < RESERVE_AFTER_S:
            return
        band = band_of(oldest, state)
        if band is not None and self.admits(oldest.lane, band):
            memory.reserve(oldest)

    @property
    def left(self) -> int:
        """How many could enter at the most, whatever their bands and lanes."""
        return max(0, min(self.sequences, sum([max(0, streams) for streams in self.streams])))

    def lane_open(self, lane: str) -> bool:
        """Whether the lane is below its cap."""
        return self.lanes.get(lane, 1) > 0

    def admits(self, lane: str, band: int) -> bool:
        """Whether a sequence of ``lane`` may enter ``band``."""
        return self.streams[band] > 0 and self.sequences > 0 and self.lane_open(lane)

    def fits(self, sequence: SequenceState) -> bool:
        """Whether the KV budget has room for a sequence."""
        return self.memory is None or self.memory.fits(sequence)

    def take(self, sequence: SequenceState, band: int) -> None:
        """One enters."""
        self.streams[band] -= 1
        self.sequences -= 1
        if self.memory is not None:
            self.memory.take(sequence)
        if sequence.lane in self.lanes:
            self.lanes[sequence.lane] -= 1


def band_of(sequence: SequenceState, state: SchedulerState) -> int | None:
    """The band that a waiting sequence enters; None when none holds it."""
    margin = state.knobs.band_margin_tokens
    return first_band(sequence.known_tokens, sequence.limit_tokens, state.bands, margin, sequence.min_kv_dtype)


def admissible(order: Iterable[SequenceState], room: Room, state: SchedulerState) -> list[tuple[SequenceState, int]]:
    """Who of ``order`` enters, first come first, and which band. Takes from ``room``.

    One whose band or lane has no room is passed over: it keeps nobody from another band or lane out, and nobody
    behind it takes what it waits for. Looks no further once nobody could enter any more.
    """
    found: list[tuple[SequenceState, int]] = []
    left = room.left
    for sequence in order:
        if left <= 0:
            break
        if not room.lane_open(sequence.lane):
            continue
        band = band_of(sequence, state)
        if band is None or not room.admits(sequence.lane, band) or not room.fits(sequence):
            continue
        room.take(sequence, band)
        found.append((sequence, band))
        left -= 1
    return found
