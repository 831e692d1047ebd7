"""``hybrid``: every step decodes the urgent, and gives to prefill the time that they can spare.

A step is budgeted by its predicted *time*, not by a token count. What bounds a prefill chunk:

- ``max_prefill_tokens`` and ``step_tokens``;
- the slack of what is decoding (``view.slack_s``): nobody who can keep a TPOT or E2E target loses it;
- ``urgent_step_s`` while sequences with targets are alive and for ``linger_s`` after, ``idle_step_s`` else: the next
  arrival never waits behind a longer step than that.

Prefill goes in the order of ``order``. A sequence whose deadline presses, and can still be met, does not wait for the
decoders' slack: its first token is worth more than theirs being even. Others do wait, until a chunk of efficient size
fits (small ones waste the kernels) or nobody needs the time; since slack grows by at least a tenth of the pace with
every decode step (``view.ACHIEVABLE_SHARE``), that is at most about ten times as long as such a chunk takes.

A waiting sequence is admitted in the plan that computes its first tokens, not before, so urgency is decided as late
as possible. When something urgent finds no room, the least urgent sequence far behind it is parked: one without a
target, or of a tenant that had more than its part.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from headrace.scheduling.batch_room import BatchRoom, presses
from headrace.scheduling.chunks import efficient_tokens, fitting_tokens
from headrace.scheduling.compaction import moves_of
from headrace.scheduling.cost import prefill_pairs
from headrace.scheduling.crowd import Crowd
from headrace.scheduling.debts import Owner
from headrace.scheduling.order import LATE_S, GroupKey, ServiceRates, WaitingQueue
from headrace.scheduling.placement import promotions_of
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import Admission, Move, PrefillChunk, SchedulerState, StepPlan
from headrace.scheduling.view import BandView, RunningView, slack_s, view_of

VICTIM_MARGIN_S: Final = 10.0
"""How far behind in rank a sequence must be to be parked for another: parking and coming back cost time, so it must
not be done for a little."""

_Candidate = tuple[float, str, SequenceState, GroupKey | None, int, bool]
"""Rank with lateness, id, sequence, its waiting group (None: it runs), place in the group, whether it is late."""


class Hybrid:
    """The policy. Stateless."""

    def plan(self, state: SchedulerState) -> StepPlan:
        queue = _queue(state)
        view = view_of(state)
        cap_s = _longest_chunk_s(state)
        room = BatchRoom(state, view, queue, cap_s)
        promotions, stalled = promotions_of(state, room.streams) if view.full else ((), frozenset())
        victim = _victim(state, queue, view, room)
        if victim is not None:
            _remove(view, victim)
            room.give_back(victim)
        if stalled:
            for band in view.bands:
                band.decoders = [s for s in band.decoders if s.request_id not in stalled]
            view.prefilling = [s for s in view.prefilling if s.request_id not in stalled]
        decode = _decodes(state, view, queue.indebted)
        crowd = Crowd(decode.sequences, state, queue, room.presses_until_s)
        prefill = _Prefill(state, room, decode, crowd, cap_s, queue.indebted)
        prefill.fill(_candidates(state, queue, view), queue)
        moves: tuple[Move, ...] = ()
        if not state.fused and not prefill.admissions and not promotions and victim is None:
            moves = _moves(state, view)
        return StepPlan(
            victims=() if victim is None else (victim.request_id,),
            moves=moves,
            admissions=tuple(prefill.admissions),
            promotions=promotions,
            decode=tuple([s.request_id for s in decode.sequences]),
            prefill=tuple(prefill.chunks),
            strategy="hybrid",
        )


def _queue(state: SchedulerState) -> WaitingQueue:
    """The waiting sequences in order: the queue that an engine keeps, or one made here from anything else."""
    if isinstance(state.waiting, WaitingQueue):
        return state.waiting
    queue = WaitingQueue(state.bands, state.knobs)
    rates = ServiceRates(state.times.call_s(256) / 256, state.times.call_s(16) / 16, state.times.call_s(1))
    for sequence in sorted(state.waiting, key=lambda s: (s.arrived_s, s.request_id)):
        queue.add(replace(sequence), rates)
    queue.refresh(state.now_s)
    return queue


def _longest_chunk_s(state: SchedulerState) -> float:
    lingering = state.now_s - state.urgent_seen_s <= state.knobs.linger_s
    return state.knobs.urgent_step_s if lingering else max(state.knobs.idle_step_s, state.knobs.urgent_step_s)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """What decodes in a step, how long that takes, and how long a prefill chunk may take besides: one of a tenant in
    debt, and any other, for which the decodes of those in debt need not keep their pace."""

    sequences: list[SequenceState]
    takes_s: float
    slack_s: float
    fair_slack_s: float


def _decodes(state: SchedulerState, view: RunningView, indebted: Collection[Owner]) -> _Decodes:
    """What decodes in this step, how long that takes, and how long a chunk may take besides.

    Bands with a target, or with nothing to do but this, or where a token is due, decode in every step. A band of cold
    sequences (documents that nobody reads along) costs a call of its own: it decodes when the others can spare that.
    """
    chosen: list[SequenceState] = []
    constraining: list[SequenceState] = []
    total_s = 0.0
    budget = state.knobs.step_tokens
    cold: list[tuple[BandView, float]] = []
    anyone_urgent = any(band.urgent for band in view.bands)
    for band in view.bands:
        if not band.decoders:
            continue
        if state.batch_cap and len(band.decoders) > state.batch_cap:
            _trim(band, state.batch_cap)
        takes_s = state.times.call_s(band.rows(fused=state.fused), band.context_tokens)
        if anyone_urgent and not band.urgent and band.earliest_due_s > state.now_s:
            cold.append((band, takes_s))
            continue
        chosen += band.decoders
        total_s += takes_s
        if band.urgent:
            constraining += band.decoders
    fair = constraining
    if indebted and constraining:
        fair = [s for s in constraining if (s.lane, s.tenant) not in indebted]

    def slack_of(sequences: list[SequenceState]) -> float:
        return slack_s(sequences, state.now_s, total_s, fused=state.fused) if sequences else math.inf

    spare_s = slack_of(constraining)
    for band, takes_s in cold:
        if takes_s <= spare_s:
            chosen += band.decoders
            total_s += takes_s
            spare_s -= takes_s
    if len(chosen) > budget:
        # Too many for one step: those due first, so that everybody gets a turn.
        chosen.sort(key=lambda s: (s.due_s, s.request_id))
        chosen = chosen[:budget]
    fair_s = spare_s if len(fair) == len(constraining) else slack_of(fair)
    relaxed = [s for s in chosen if s.pace_s == math.inf]
    if relaxed and fair_s > 0:
        relaxed_s = slack_of(relaxed)
        spare_s, fair_s = min(spare_s, relaxed_s), min(fair_s, relaxed_s)
    return _Decodes(chosen, total_s, spare_s, fair_s)


def _trim(band: BandView, cap: int) -> None:
    """Keep all that have a target, and of the others as many as the cap leaves, longest without a token first."""
    urgent = [s for s in band.decoders if s.pace_s != math.inf]
    others = sorted((s for s in band.decoders if s.pace_s == math.inf), key=lambda s: (s.due_s, s.request_id))
    band.decoders = urgent + others[: max(0, cap - len(urgent))]


def _victim(state: SchedulerState, queue: WaitingQueue, view: RunningView, room: BatchRoom) -> SequenceState | None:
    """The running sequence to park for the most urgent one that has a deadline to meet and no stream; None when there
    is no such, or nobody far enough behind it."""
    first: tuple[float, str, int] | None = None
    has_stream = [room.has_stream(band) for band in range(len(view.bands))]
    in_debt = queue.in_debt
    for key, group in queue.groups.items():
        band = key[2]
        if not group.on_time or band >= len(has_stream):
            continue
        rank_s, request_id, sequence = group.on_time[0]
        if sequence.deadline_s is None:
            continue
        if key[:2] in in_debt:
            rank_s += queue.debt_rank_s(key[:2], sequence)
        if first is not None and (rank_s, request_id, band) >= first:
            continue
        if room.lane_open(key[0]) and not (has_stream[band] and room.in_time(sequence, band)):
            first = (rank_s, request_id, band)
    if first is None:
        return None
    rank_s, _, band = first
    below = [
        s
        for s in state.running
        if s.slot is not None
        and s.slot.band == band
        and s.computed_tokens < state.bands[band].max_context_tokens
        and (not s.urgent or (s.lane, s.tenant) in queue.indebted)
        and (s.rank_s or 0.0) + queue.debt_rank_s((s.lane, s.tenant), s) > rank_s + VICTIM_MARGIN_S
    ]
    return max(below, key=lambda s: (s.rank_s or 0.0, s.request_id)) if below else None


def _remove(view: RunningView, victim: SequenceState) -> None:
    assert victim.slot is not None
    band = view.bands[victim.slot.band]
    band.decoders = [s for s in band.decoders if s is not victim]
    view.prefilling = [s for s in view.prefilling if s is not victim]


def _candidates(state: SchedulerState, queue: WaitingQueue, view: RunningView) -> list[_Candidate]:
    """The heads of what could be prefilled: running sequences with prompt left, and each group's first ones."""
    found: list[_Candidate] = []
    chunk = state.knobs.max_prefill_tokens
    token_s = state.times.call_s(chunk) / chunk if view.prefilling else 0.0
    indebted = bool(queue.indebted)
    for sequence in view.prefilling:
        # What is computed already need not be started any more.
        late = sequence.start_by_s + sequence.computed_tokens * token_s < state.now_s
        rank_s = (sequence.rank_s or 0.0) + LATE_S * late
        if indebted:
            rank_s += queue.debt_rank_s((sequence.lane, sequence.tenant), sequence)
        found.append((rank_s, sequence.request_id, sequence, None, 0, late))
    in_debt = queue.in_debt
    for key, group in queue.groups.items():
        owner = key[:2]
        owes = owner in in_debt
        if group.on_time:
            rank_s, request_id, sequence = group.on_time[0]
            if owes:
                rank_s += queue.debt_rank_s(owner, sequence)
            found.append((rank_s, request_id, sequence, key, 0, False))
        if group.late:
            rank_s, request_id, sequence = group.late[0]
            rank_s += LATE_S
            if owes:
                rank_s += queue.debt_rank_s(owner, sequence)
            found.append((rank_s, request_id, sequence, key, 0, True))
    heapq.heapify(found)
    return found


class _Prefill:
    """Fills a step with chunks, in order, until the time or the tokens are used up."""

    def __init__(
        self,
        state: SchedulerState,
        room: BatchRoom,
        decode: _Decodes,
        crowd: Crowd,
        cap_s: float,
        indebted: Collection[Owner],
    ) -> None:
        rows = len(decode.sequences)
        self._state = state
        self._room = room
        self._decoding = rows > 0
        self._decode_s = decode.takes_s
        self._decodes = decode
        self._indebted = indebted
        self._cap_s = cap_s
        self._crowd = crowd
        self._rows = rows if state.fused else 0
        self._pairs = 0
        self._tokens_left = min(state.knobs.max_prefill_tokens, state.knobs.step_tokens - rows)
        self.admissions: list[Admission] = []
        self.chunks: list[PrefillChunk] = []

    def fill(self, candidates: list[_Candidate], queue: WaitingQueue) -> None:
        """Take candidates (a heap) in order. A group whose head cannot enter is left for this step: nobody of the
        same lane, tenant and band overtakes."""
        while candidates and self._tokens_left > 0:
            rank_s, _, sequence, key, place, late = heapq.heappop(candidates)
            if key is not None and not self._room.lets_in(sequence, key[2]):
                continue
            if self._crowd.holds_back(sequence, rank_s, late):
                continue
            if not self._take(sequence, key, late):
                return
            if key is not None:
                self._push_next(candidates, queue, key, place + 1, late)

    def _push_next(
        self, candidates: list[_Candidate], queue: WaitingQueue, key: GroupKey, place: int, late: bool
    ) -> None:
        entries = queue.groups[key].late if late else queue.groups[key].on_time
        if place < len(entries):
            rank_s, request_id, sequence = entries[place]
            rank_s += queue.debt_rank_s(key[:2], sequence) + LATE_S * late
            heapq.heappush(candidates, (rank_s, request_id, sequence, key, place, late))

    def _take(self, sequence: SequenceState, key: GroupKey | None, late: bool) -> bool:
        """Give a sequence its chunk; False when the step is full, or it must wait for slack."""
        done = max(sequence.computed_tokens, sequence.cached_tokens if key is not None else 0)
        pending = sequence.known_tokens - done
        if key is not None and sequence.generated_tokens and pending <= 1:
            self._admit(sequence, key)  # it was parked while decoding: it decodes from the next step on
            return True
        most = min(max(1, pending), self._tokens_left, sequence.chunk_limit_tokens or self._tokens_left)
        in_debt = (sequence.lane, sequence.tenant) in self._indebted
        pressing = not late and not in_debt and presses(sequence, self._room.presses_until_s)
        slack = self._decodes.slack_s if in_debt else self._decodes.fair_slack_s
        allowed_s = self._cap_s if pressing else min(self._cap_s, slack)
        tokens = self._fitting(allowed_s, most, done)
        floor = min(most, self._state.knobs.min_prefill_tokens)
        if tokens < most and not self.chunks:
            if pressing or not self._decoding or slack == math.inf:
                tokens = max(tokens, floor)
            elif tokens < min(self._efficient(most), max(floor, self._fitting(self._cap_s, most, done))):
                return False
        if tokens < floor:
            return False
        if key is not None:
            self._admit(sequence, key)
        self.chunks.append(PrefillChunk(sequence.request_id, tokens))
        self._rows += tokens
        self._pairs += prefill_pairs(done, tokens)
        self._tokens_left -= tokens
        return True

    def _admit(self, sequence: SequenceState, key: GroupKey) -> None:
        self._room.enter(sequence, key[2])
        self.admissions.append(Admission(sequence.request_id, key[2]))

    def _fitting(self, allowed_s: float, most: int, done: int) -> int:
        return fitting_tokens(
            self._state.times,
            allowed_s + (self._decode_s if self._state.fused else 0.0),
            most=most,
            rows=self._rows,
            pairs=self._pairs,
            computed_tokens=done,
        )

    def _efficient(self, most: int) -> int:
        return min(most, efficient_tokens(self._state.times, self._state.knobs.max_prefill_tokens))


def _moves(state: SchedulerState, view: RunningView) -> tuple[Move, ...]:
    """One copy towards dense streams, in the first band where it pays. A pool has no holes between its rows."""
    for index, band in enumerate(view.bands):
        if band.members > 1 and band.top >= band.members and not state.bands[index].pooled:
            moves = moves_of(state.running, index, state.times)
            if moves:
                return moves
    return ()
