"""Who is in the virtual engine, and where: waiting, parked, or in a stream of a band."""

from __future__ import annotations

import math

from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.order import ServiceRates, WaitingQueue
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.slots import SlotTable


class Residents:
    """Every live sequence is in ``waiting`` (and ``queue``, in order) or in ``running`` (and has a stream).
    ``kv_travels``: a sequence that leaves its stream keeps its KV."""

    def __init__(self, bands: tuple[Band, ...], knobs: SchedulingKnobs, *, kv_travels: bool) -> None:
        self.bands = bands
        self.waiting: dict[str, SequenceState] = {}
        self.running: dict[str, SequenceState] = {}
        self.queue = WaitingQueue(bands, knobs)
        self.slots = SlotTable(bands)
        self._kv_travels = kv_travels
        self._urgent = 0
        self._urgent_left_s = -math.inf

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def free_streams(self) -> tuple[int, ...]:
        """Free streams of every band."""
        return tuple([self.slots.free_count(band) for band in range(len(self.bands))])

    def urgent_seen_s(self, now_s: float) -> float:
        """When a sequence with a target was last alive."""
        return now_s if self._urgent else self._urgent_left_s

    def enter(self, sequence: SequenceState, rates: ServiceRates) -> None:
        """A new one waits."""
        self._urgent += sequence.urgent
        self._wait(sequence, rates)

    def admit(self, request_id: str, band: int, now_s: float) -> SequenceState:
        """One that waits gets the lowest free stream of ``band``, with what is cached of its prompt."""
        sequence = self.waiting.pop(request_id)
        self.queue.take(sequence, now_s)
        sequence.slot = self.slots.take(band, request_id)
        sequence.computed_tokens = max(sequence.computed_tokens, sequence.cached_tokens)
        self.running[request_id] = sequence
        return sequence

    def park(self, request_id: str, rates: ServiceRates) -> SequenceState:
        """One that runs gives its stream back and waits again."""
        sequence = self.running.pop(request_id)
        self._leave_stream(sequence)
        self._wait(sequence, rates)
        return sequence

    def promote(self, request_id: str, band: int) -> SequenceState:
        """One that runs goes on in a stream of ``band``."""
        sequence = self.running[request_id]
        self._leave_stream(sequence)
        sequence.slot = self.slots.take(band, request_id)
        return sequence

    def move(self, request_id: str, stream: int) -> SequenceState:
        """One that runs goes on in another stream of its band."""
        sequence = self.running[request_id]
        assert sequence.slot is not None
        sequence.slot = self.slots.move(sequence.slot, stream, request_id)
        return sequence

    def forget(self, request_id: str, now_s: float) -> bool:
        """One ends, wherever it is. False when it is not alive."""
        sequence = self.waiting.pop(request_id, None) or self.running.pop(request_id, None)
        if sequence is None:
            return False
        self.queue.discard(sequence)
        if sequence.slot is not None:
            self.slots.release(sequence.slot, request_id)
            sequence.slot = None
        if sequence.urgent:
            self._urgent -= 1
            self._urgent_left_s = now_s
        return True

    def check_integrity(self) -> str | None:
        """None when streams, sequences and counts agree; else what is wrong."""
        problem = self.slots.check_integrity() or self.queue.check_integrity()
        if problem is not None:
            return problem
        if self.slots.owners() != {s.slot: s.request_id for s in self.running.values()}:
            return "streams and running sequences do not agree"
        if any(sequence.slot is not None for sequence in self.waiting.values()):
            return "a waiting sequence has a stream"
        if sorted(s.request_id for s in self.queue) != sorted(self.waiting):
            return "the queue and the waiting sequences do not agree"
        if sum(s.urgent for s in (*self.running.values(), *self.waiting.values())) != self._urgent:
            return "the count of urgent sequences is wrong"
        return None

    def _wait(self, sequence: SequenceState, rates: ServiceRates) -> None:
        self.waiting[sequence.request_id] = sequence
        self.queue.add(sequence, rates)

    def _leave_stream(self, sequence: SequenceState) -> None:
        assert sequence.slot is not None
        self.slots.release(sequence.slot, sequence.request_id)
        sequence.slot = None
        if not self._kv_travels:
            sequence.computed_tokens = 0
