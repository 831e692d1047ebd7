"""Who comes first: one number per sequence, fixed when it begins to wait.

The order is by *rank*, a time in seconds, smallest first::

    rank = virtual arrival + time to its deadline + priority * ageing_s / 10

Within one priority that is the order of deadlines, which for waiting sequences is the order of slack. Ten points of
priority weigh ``ageing_s`` of waiting, so whoever waits long enough comes before anything more urgent that arrives
later: ageing without ever sorting again.

The *virtual arrival* is the real one as long as a tenant stays within its part of its lane's guaranteed share of the
engine, and later than that when it does not: each request that finds others of the same tenant and lane waiting
arrives, virtually, when the one before it would have been served at that rate. (VirtualClock: L. Zhang, SIGCOMM
1990; reset whenever the backlog is gone, so that nobody pays for idle capacity that it used.) A flood therefore only
delays itself. It is never more than ``VIRTUAL_LIMIT_S`` after the real one.

A sequence whose deadline cannot be met any more (``start_by_s`` has passed) ranks ``LATE_S`` later, behind those of
its lane that still can.

**Bound.** Sequence A is passed only by sequences that arrive before

    arrival(A) + VIRTUAL_LIMIT_S + LATE_S + time to A's deadline + (priority(A) - p) * ageing_s / 10

where p is the most urgent priority in use: every later one has a larger rank. Finitely many arrive before then and
each needs finite work, so A is served.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from headrace.scheduling.bands import Band, first_band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import SequenceState

LATE_S: Final = 5.0
"""How much later a sequence ranks once its deadline is lost: long enough that a burst's on-time requests pass, short
enough that the late ones do not wait for the end of the overload."""
VIRTUAL_LIMIT_S: Final = 100.0
ACTIVE_S: Final = 10.0
"""A lane shares the engine for so long after an arrival."""
_POINTS_PER_AGEING: Final = 10

GroupKey = tuple[str, str | None, int]
"""Lane, tenant, band."""


@dataclass(frozen=True, slots=True)
class ServiceRates:
    """Seconds of engine time that a token takes: of a prompt, and of an output in a usual batch."""

    prefill_token_s: float = 1e-3
    decode_token_s: float = 5e-3
    decode_step_s: float = 2e-2
    """One decode step: the least time between two tokens of one sequence."""


@dataclass(slots=True)
class Group:
    """Waiting sequences of one lane, tenant and band, by rank; those whose deadline is lost apart."""

    on_time: list[tuple[float, str, SequenceState]] = field(default_factory=list)
    late: list[tuple[float, str, SequenceState]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.on_time) + len(self.late)


def bounded_rank_s(sequence: SequenceState, virtual_s: float, ageing_s: float) -> float:
    """The rank of a sequence whose virtual arrival is ``virtual_s`` (see the module)."""
    virtual_s = min(virtual_s, sequence.arrived_s + VIRTUAL_LIMIT_S)
    to_deadline_s = 0.0 if sequence.deadline_s is None else max(0.0, sequence.deadline_s - sequence.arrived_s)
    return virtual_s + to_deadline_s + sequence.priority * ageing_s / _POINTS_PER_AGEING


def latest_start_s(sequence: SequenceState, rates: ServiceRates) -> float:
    """When its prefill must begin, at the latest, to meet its targets on an otherwise idle engine."""
    own_s = sequence.uncached_tokens * rates.prefill_token_s
    start_s = float("inf")
    if sequence.deadline_s is not None and sequence.deadline_s != sequence.finish_by_s:
        start_s = sequence.deadline_s - own_s
    if sequence.finish_by_s is not None:
        decode_s = max(0, sequence.output_tokens_to_expect - 1) * rates.decode_step_s
        start_s = min(start_s, sequence.finish_by_s - own_s - decode_s)
    # One that could not be met even when served at once is not lost by waiting: it keeps its place.
    return start_s if start_s > sequence.arrived_s else float("inf")


class WaitingQueue(Collection[SequenceState]):
    """Sequences that wait, in the order above, kept sorted as they come and go.

    Iterating gives all of them, lane by lane. Not thread-safe. ``refresh`` must be called before the order is used
    at a later time.
    """

    def __init__(self, bands: tuple[Band, ...], knobs: SchedulingKnobs) -> None:
        self._bands = bands
        self._knobs = knobs
        self.groups: dict[GroupKey, Group] = {}
        self._where: dict[str, tuple[GroupKey, SequenceState]] = {}
        self._clocks: dict[tuple[str, str | None], float] = {}
        self._tenants: dict[tuple[str, str | None], int] = {}
        self._seen_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[SequenceState]:
        return (sequence for _, sequence in self._where.values())

    def __contains__(self, item: object) -> bool:
        return isinstance(item, SequenceState) and item.request_id in self._where

    def add(self, sequence: SequenceState, rates: ServiceRates) -> None:
        """Take a sequence in; sets its ``rank_s`` and ``start_by_s``. One that comes back (parked) keeps its rank."""
        if sequence.rank_s is None:
            virtual_s = self._virtual_arrival_s(sequence, rates)
            sequence.rank_s = bounded_rank_s(sequence, virtual_s, self._knobs.ageing_s)
            sequence.start_by_s = latest_start_s(sequence, rates)
        self._insert(sequence)

    def discard(self, sequence: SequenceState) -> None:
        """Take a sequence out; a no-op when it is not in."""
        found = self._where.pop(sequence.request_id, None)
        if found is None:
            return
        key, _ = found
        group = self.groups[key]
        entry = (sequence.rank_s or 0.0, sequence.request_id)
        for entries in (group.on_time, group.late):
            at = bisect_left(entries, entry)
            if at < len(entries) and entries[at][1] == sequence.request_id:
                del entries[at]
                break
        if not group:
            del self.groups[key]
        owner = key[:2]
        self._tenants[owner] -= 1
        if not self._tenants[owner]:
            del self._tenants[owner]
            self._clocks.pop(owner, None)  # the backlog is gone: what was used of idle capacity is forgiven

    def refresh(self, now_s: float) -> None:
        """Put sequences whose deadline was lost since the last call behind the others."""
        for group in self.groups.values():
            while group.on_time and group.on_time[0][2].start_by_s < now_s:
                _, request_id, sequence = group.on_time.pop(0)
                insort(group.late, (sequence.rank_s or 0.0, request_id, sequence))

    def set_knobs(self, knobs: SchedulingKnobs) -> None:
        """New knobs: bands and the weight of priority may change, so everything is put in order again."""
        waiting = list(self)
        shift_s = (knobs.ageing_s - self._knobs.ageing_s) / _POINTS_PER_AGEING
        self._knobs = knobs
        self.groups.clear()
        self._where.clear()
        self._tenants.clear()
        for sequence in waiting:
            sequence.rank_s = (sequence.rank_s or 0.0) + sequence.priority * shift_s
            self._insert(sequence)

    def check_integrity(self) -> str | None:
        """None when every index agrees; else what is wrong."""
        found = 0
        for key, group in self.groups.items():
            for entries in (group.on_time, group.late):
                if entries != sorted(entries, key=lambda entry: entry[:2]):
                    return f"group {key} is not in order"
                for rank_s, request_id, sequence in entries:
                    found += 1
                    if self._where.get(request_id) != (key, sequence) or sequence.rank_s != rank_s:
                        return f"{request_id} is not where the index says"
        if found != len(self._where):
            return f"{found} sequences are in groups, {len(self._where)} in the index"
        return None

    def _insert(self, sequence: SequenceState) -> None:
        key = self._key(sequence)
        owner = key[:2]
        self._where[sequence.request_id] = (key, sequence)
        self._tenants[owner] = self._tenants.get(owner, 0) + 1
        group = self.groups.setdefault(key, Group())
        insort(group.on_time, (sequence.rank_s or 0.0, sequence.request_id, sequence), key=lambda entry: entry[:2])

    def _key(self, sequence: SequenceState) -> GroupKey:
        needed = max(sequence.known_tokens, sequence.prompt_tokens)
        band = first_band(needed, sequence.limit_tokens, self._bands, self._knobs.band_margin_tokens)
        return sequence.lane, sequence.tenant, len(self._bands) if band is None else band

    def _virtual_arrival_s(self, sequence: SequenceState, rates: ServiceRates) -> float:
        owner = (sequence.lane, sequence.tenant)
        service_s = (
            sequence.uncached_tokens * rates.prefill_token_s + sequence.output_tokens_to_expect * rates.decode_token_s
        )
        self._seen_s[sequence.lane] = max(sequence.arrived_s, self._seen_s.get(sequence.lane, sequence.arrived_s))
        before_s = self._clocks.get(owner)
        virtual_s = sequence.arrived_s
        if before_s is not None:
            virtual_s = max(virtual_s, before_s + service_s / self._part(owner, sequence.arrived_s - ACTIVE_S))
        self._clocks[owner] = min(virtual_s, sequence.arrived_s + VIRTUAL_LIMIT_S)
        return virtual_s

    def _part(self, owner: tuple[str, str | None], since_s: float) -> float:
        """The part of the engine that is this tenant's in this lane: the lane's weight among lanes that wait or had an
        arrival lately, divided by the lane's tenants that wait."""
        weights = self._knobs.lane_weights
        # A lane that is served at once hardly ever waits: it counts all the same, or others would take its part.
        lanes = {lane for lane, _ in self._tenants} | {lane for lane, at_s in self._seen_s.items() if at_s >= since_s}
        tenants = sum(1 for lane, _ in self._tenants if lane == owner[0]) + (owner not in self._tenants)
        total = sum(weights.get(lane, 1.0) for lane in lanes)
        return weights.get(owner[0], 1.0) / total / max(1, tenants)
