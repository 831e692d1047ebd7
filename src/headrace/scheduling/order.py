"""Who comes first: one number per sequence, fixed when it begins to wait.

The order is by *rank*, a time in seconds, smallest first::

    rank = arrival + time to its deadline + priority * ageing_s / 10

Within one priority that is the order of deadlines, which for waiting sequences is the order of slack. Ten points of
priority weigh ``ageing_s`` of waiting, so whoever waits long enough comes before anything more urgent that arrives
later: ageing without ever sorting again.

A sequence whose deadline cannot be met any more (``start_by_s`` has passed) ranks ``LATE_S`` later, behind those of
its lane that still can.

Between lanes and tenants there are parts (``debts``): whoever asks for more than its part of a busy engine is in debt.
A second of debt ranks everything of that tenant and lane ``DEBT_WEIGHT`` seconds later, and from ``FULL_DEBT_S`` on its
waiting does not count: a backlog that is a tenant's own doing does not age. A flood therefore delays itself, and
whoever stays within its part is served as if there were none.

**Bound.** Sequence A of a tenant without debt is passed only by sequences that arrive before

    arrival(A) + LATE_S + time to A's deadline + (priority(A) - p) * ageing_s / 10

where p is the most urgent priority in use: every later one has a larger rank. Finitely many arrive before then and
each needs finite work, so A is served. A tenant in debt has none after at most ``DEBT_LIMIT_S`` without an admission,
and then its whole age counts: each of its sequences that is before A delays A by at most that much more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from headrace.kv.precision import KvDtype
from headrace.scheduling.bands import Band, first_band
from headrace.scheduling.debts import ACTIVE_S, FULL_DEBT_S, Debts, Owner
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import PACE_MARGIN, SequenceState, urgency

LATE_S: Final = 5.0
"""How much later a sequence ranks once its deadline is lost: long enough that a burst's on-time requests pass, short
enough that the late ones do not wait for the end of the overload."""
DEBT_WEIGHT: Final = 10.0
"""High enough that a flood falls behind the least urgent default lane (some 70 s of rank away) within a few seconds of
engine time, low enough that a chance cluster of arrivals costs a lane no more than its place among near ones."""
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


def natural_rank_s(sequence: SequenceState, ageing_s: float) -> float:
    """The rank of a sequence without lateness and debt (see the module)."""
    return sequence.arrived_s + (_to_deadline_s(sequence) or 0.0) + sequence.priority * ageing_s / _POINTS_PER_AGEING


def _to_deadline_s(sequence: SequenceState) -> float | None:
    return None if sequence.deadline_s is None else max(0.0, sequence.deadline_s - sequence.arrived_s)


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


def expected_pace_s(sequence: SequenceState) -> float:
    """The time per token that a sequence will need to meet its targets; inf without any."""
    pace_s = float("inf") if sequence.tpot_s is None else sequence.tpot_s
    if sequence.finish_by_s is not None:
        tokens = max(1, sequence.output_tokens_to_expect)
        pace_s = min(pace_s, max(0.0, sequence.finish_by_s - sequence.arrived_s) / tokens)
    return PACE_MARGIN * pace_s


class WaitingQueue(Collection[SequenceState]):
    """Sequences that wait, in the order above, kept sorted as they come and go.

    Iterating gives all of them, lane by lane. Not thread-safe. ``refresh`` must be called before the order is used
    at a later time.
    """

    def __init__(self, bands: tuple[Band, ...], knobs: SchedulingKnobs) -> None:
        self._bands = bands
        self._knobs = knobs
        self.groups: dict[GroupKey, Group] = {}
        self._where: dict[str, tuple[GroupKey, SequenceState, float]] = {}
        self._debts = Debts()
        self._now_s = float("-inf")
        self._urgent: list[tuple[int, float, str, SequenceState]] = []
        self._paces: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[SequenceState]:
        return (sequence for _, sequence, _ in self._where.values())

    def __contains__(self, item: object) -> bool:
        return isinstance(item, SequenceState) and item.request_id in self._where

    def add(self, sequence: SequenceState, rates: ServiceRates) -> None:
        """Take a sequence in; sets its ``rank_s`` and ``start_by_s``. One that comes back (parked) keeps its rank."""
        service_s = 0.0
        if sequence.rank_s is None:
            sequence.rank_s = natural_rank_s(sequence, self._knobs.ageing_s)
            sequence.start_by_s = latest_start_s(sequence, rates)
            service_s = sequence.uncached_tokens * rates.prefill_token_s
            service_s += sequence.output_tokens_to_expect * rates.decode_token_s
            self._debts.arrived(
                (sequence.lane, sequence.tenant), service_s, sequence.arrived_s, _to_deadline_s(sequence)
            )
            pace_s = expected_pace_s(sequence)
            if rates.decode_step_s < pace_s < float("inf"):
                self._paces[sequence.lane] = (sequence.arrived_s, pace_s)
        self._insert(sequence, service_s)

    def take(self, sequence: SequenceState, now_s: float) -> None:
        """A sequence is admitted: it leaves, and its tenant pays for it."""
        found = self._where.get(sequence.request_id)
        if found is not None:
            key, _, _ = found
            self._debts.admitted(key[:2], now_s)
            self._remove(sequence)

    def debt_rank_s(self, owner: Owner, sequence: SequenceState) -> float:
        """How much later ``sequence`` of a tenant ranks for what that had or wants beyond its part, as of
        ``refresh``."""
        debt_s = self._debts.debts_s.get(owner)
        if debt_s is None:
            return 0.0
        age_s = self._now_s - sequence.arrived_s
        if age_s <= 0:
            return DEBT_WEIGHT * debt_s
        return DEBT_WEIGHT * debt_s + (age_s if debt_s >= FULL_DEBT_S else age_s * debt_s / FULL_DEBT_S)

    @property
    def debts_s(self) -> Mapping[Owner, float]:
        """The debts of tenants (and their lanes) that have any."""
        return self._debts.debts_s

    @property
    def in_debt(self) -> Collection[Owner]:
        """Tenants (and their lanes) with any debt."""
        return self._debts.debts_s

    @property
    def indebted(self) -> Collection[Owner]:
        """Tenants (and their lanes) that had or want so much more than their part that their waiting does not count."""
        return self._debts.indebted

    def usual_pace_s(self) -> float:
        """The shortest time per token that sequences of late need, whether they are there now or not; inf when none
        needs one."""
        since_s = self._now_s - ACTIVE_S
        return min([pace_s for seen_s, pace_s in self._paces.values() if seen_s >= since_s], default=float("inf"))

    def by_urgency(self) -> Iterator[SequenceState]:
        """All of them by priority and arrival alone (``sequence.urgency``), for strategies without deadlines."""
        return (entry[-1] for entry in self._urgent)

    def discard(self, sequence: SequenceState) -> None:
        """Take a sequence out that will not be served, and so has not been asked for; a no-op when it is not in."""
        found = self._where.get(sequence.request_id)
        if found is not None:
            key, _, service_s = found
            self._debts.withdrawn(key[:2], service_s)
            self._remove(sequence)

    def _remove(self, sequence: SequenceState) -> None:
        key, _, _ = self._where.pop(sequence.request_id)
        self._debts.waits_no_more(key[:2])
        del self._urgent[bisect_left(self._urgent, urgency(sequence))]
        group = self.groups[key]
        entry = (sequence.rank_s or 0.0, sequence.request_id)
        for entries in (group.on_time, group.late):
            at = bisect_left(entries, entry)
            if at < len(entries) and entries[at][1] == sequence.request_id:
                del entries[at]
                break
        if not group:
            del self.groups[key]

    def refresh(self, now_s: float) -> None:
        """It is ``now_s``: put sequences whose deadline was lost since the last call behind the others."""
        self._now_s = now_s
        self._debts.refresh(now_s, self._knobs.lane_weights)
        for group in self.groups.values():
            while group.on_time and group.on_time[0][2].start_by_s < now_s:
                _, request_id, sequence = group.on_time.pop(0)
                insort(group.late, (sequence.rank_s or 0.0, request_id, sequence))

    def set_knobs(self, knobs: SchedulingKnobs) -> None:
        """New knobs: bands and the weight of priority may change, so everything is put in order again."""
        waiting = [(sequence, service_s) for _, sequence, service_s in self._where.values()]
        shift_s = (knobs.ageing_s - self._knobs.ageing_s) / _POINTS_PER_AGEING
        self._knobs = knobs
        for key, _, _ in self._where.values():
            self._debts.waits_no_more(key[:2])
        self.groups.clear()
        self._urgent.clear()
        self._where.clear()
        for sequence, service_s in waiting:
            sequence.rank_s = (sequence.rank_s or 0.0) + sequence.priority * shift_s
            self._insert(sequence, service_s)

    def band_for(self, tokens: int, limit_tokens: int, least: KvDtype | None) -> int | None:
        """The band that a sequence of ``tokens`` begins in as the knobs are; None when none holds it."""
        return first_band(tokens, limit_tokens, self._bands, self._knobs.band_margin_tokens, least)

    def check_integrity(self) -> str | None:
        """None when every index agrees; else what is wrong."""
        found = 0
        for key, group in self.groups.items():
            for entries in (group.on_time, group.late):
                if entries != sorted(entries, key=lambda entry: entry[:2]):
                    return f"group {key} is not in order"
                for rank_s, request_id, sequence in entries:
                    found += 1
                    if self._where.get(request_id, ())[:2] != (key, sequence) or sequence.rank_s != rank_s:
                        return f"{request_id} is not where the index says"
        if found != len(self._urgent) or any((*urgency(s), s) != (*key, s) for *key, s in self._urgent):
            return "the order by urgency does not agree"
        if found != len(self._where):
            return f"{found} sequences are in groups, {len(self._where)} in the index"
        return None

    def _insert(self, sequence: SequenceState, service_s: float) -> None:
        key = self._key(sequence)
        self._where[sequence.request_id] = (key, sequence, service_s)
        self._debts.waits(key[:2], max(self._now_s, sequence.arrived_s))
        insort(self._urgent, (*urgency(sequence), sequence), key=lambda entry: entry[:3])
        group = self.groups.setdefault(key, Group())
        insort(group.on_time, (sequence.rank_s or 0.0, sequence.request_id, sequence), key=lambda entry: entry[:2])

    def _key(self, sequence: SequenceState) -> GroupKey:
        needed = max(sequence.known_tokens, sequence.prompt_tokens)
        band = self.band_for(needed, sequence.limit_tokens, sequence.min_kv_dtype)
        return sequence.lane, sequence.tenant, len(self._bands) if band is None else band
