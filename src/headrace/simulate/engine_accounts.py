"""What a virtual engine counts: sequences and their streams, tokens, records, memory, lanes' shares, recent traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from headrace.scheduling.caps import SIZES_INTERVAL_S, BatchSizes, batch_sizes
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.order import ServiceRates
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.shares import LaneShares, Part
from headrace.scheduling.step import SchedulerState, StepPlan, StepTimes
from headrace.scheduling.traffic import TrafficWindow
from headrace.simulate.engine_shape import EngineShape, Listener
from headrace.simulate.pressure import Pressure
from headrace.simulate.requests import Outcome, RequestRecord
from headrace.simulate.residents import Residents


class EngineAccounts:
    """The state of an engine, without its time: ``VirtualEngine`` decides when what happens."""

    def __init__(
        self,
        shape: EngineShape,
        true: StepTimes,
        knobs: SchedulingKnobs | None,
        believed: StepTimes | None,
        listener: Listener | None,
        token_times: bool,
    ) -> None:
        self.shape = shape
        self.knobs = SchedulingKnobs() if knobs is None else knobs
        self._true = true
        self._believed = true if believed is None else believed
        self._listener = listener
        self._token_times = token_times
        self.records: dict[str, RequestRecord] = {}
        self.steps = self.moves = self.victims = 0
        self.last_step_s = 0.0
        self._was_cut: set[str] = set()
        self._stops_at: dict[str, int] = {}
        self._residents = Residents(shape.bands, self.knobs, kv_travels=shape.kv_travels)
        self._pressure = Pressure(shape.bands, shape.kv_tokens)
        self._shares = LaneShares()
        self._traffic = TrafficWindow()
        self._strategy = ""
        self._sizes_until_s = -math.inf
        self._sizes = self._batch_sizes(-math.inf)

    @property
    def longest_tokens(self) -> int:
        """The longest sequence that the bands hold."""
        return self.shape.bands[-1].max_context_tokens

    @property
    def waiting(self) -> Sequence[SequenceState]:
        """Sequences without a stream; some may be parked."""
        return list(self._residents.waiting.values())

    @property
    def running(self) -> Sequence[SequenceState]:
        """Sequences with a stream."""
        return list(self._residents.running.values())

    def check_integrity(self) -> str | None:
        """None when slots, sequences and records agree; else what is wrong."""
        problem = self._residents.check_integrity()
        if problem is not None:
            return problem
        alive = sorted([*self._residents.running, *self._residents.waiting])
        unfinished = sorted([name for name, record in self.records.items() if record.outcome == "unfinished"])
        if alive != unfinished or alive != sorted(self._stops_at):
            return "sequences and records do not agree"
        return None

    def _state(self, now_s: float) -> SchedulerState:
        sizes = self._batch_sizes(now_s)
        return SchedulerState(
            now_s=now_s,
            bands=self.shape.bands,
            free_streams=self._residents.free_streams,
            waiting=self._residents.queue,
            running=list(self._residents.running.values()),
            knobs=self.knobs,
            times=self._believed,
            fused=self.shape.layout == "fused",
            lane_shares=self._shares.shares(now_s),
            urgent_seen_s=self._residents.urgent_seen_s(now_s),
            traffic=self._traffic.view(),
            batch_cap=sizes.knee,
            crowd=sizes.crowd,
            strategy=self._strategy,
            memory=self._pressure.limits(self.knobs),
        )

    def _batch_sizes(self, now_s: float) -> BatchSizes:
        """Looked for as often as the embedded engine does, at the contexts that run."""
        if now_s >= self._sizes_until_s:
            self._sizes_until_s = now_s + SIZES_INTERVAL_S
            running = self._residents.running.values()
            context_tokens = sum([sequence.computed_tokens for sequence in running]) / max(1, len(running))
            most, overhead_s = max([band.max_sequences for band in self.shape.bands]), self.shape.overhead_s
            self._sizes = batch_sizes(
                self._believed, most, self.knobs.knee_gain, context_tokens=context_tokens, overhead_s=overhead_s
            )
        return self._sizes

    def _rates(self) -> ServiceRates:
        """What a token takes, from predicted step times, as the embedded engine reckons."""
        times, cap = self._believed, self._sizes.knee
        return ServiceRates(times.call_s(256) / 256, times.call_s(cap) / cap, times.call_s(1))

    def _place(self, plan: StepPlan, now_s: float) -> float:
        """Victims, moves, admissions and promotions. Returns what the copying of KV takes, seconds."""
        residents, copies_s, copied_tokens = self._residents, 0.0, 0
        for request_id in plan.victims:
            copied_tokens += self._park(request_id)
        for move in plan.moves:
            sequence = residents.move(move.request_id, move.stream)
            assert sequence.slot is not None
            copies_s += self._true.move_s(sequence.computed_tokens, sequence.slot.band)
            self.moves += 1
        for admission in plan.admissions:
            copied_tokens += residents.admit(admission.request_id, admission.band, now_s).computed_tokens
            record = self.records[admission.request_id]
            if record.admitted_s is None:
                record.admitted_s = now_s
        for promotion in plan.promotions:
            copied_tokens += 2 * residents.promote(promotion.request_id, promotion.band).computed_tokens
        return copies_s + self.shape.copy_s_per_token * copied_tokens

    def _sample(self, sequence: SequenceState, now_s: float, step_end_s: float) -> None:
        """A sequence's next token."""
        record = self.records[sequence.request_id]
        sequence.known_tokens += 1
        record.output_tokens += 1
        if sequence.last_token_s is None:
            record.first_token_s = now_s
            if self._listener is not None:
                self._listener.first_token(record, step_end_s)
        else:
            record.longest_gap_s = max(record.longest_gap_s, now_s - sequence.last_token_s)
        sequence.note_token(now_s)
        record.last_token_s = now_s
        if record.token_s is not None:
            record.token_s.append(now_s)
        if sequence.known_tokens >= self._stops_at[sequence.request_id]:
            self._stop(sequence, now_s)

    def _stop(self, sequence: SequenceState, now_s: float) -> None:
        """A sequence has its last token."""
        self._end(sequence.request_id, "length" if sequence.known_tokens >= sequence.limit_tokens else "stop", now_s)

    def _end(self, request_id: str, outcome: Outcome, now_s: float) -> bool:
        """A sequence leaves, wherever it is. False for one that is not alive."""
        if not self._residents.forget(request_id, now_s):
            return False
        self._was_cut.discard(request_id)
        del self._stops_at[request_id]
        record = self.records[request_id]
        record.outcome, record.ended_s = outcome, now_s
        self._tell_end(record, now_s)
        return True

    def _tell_end(self, record: RequestRecord, now_s: float) -> None:
        if self._listener is not None:
            del self.records[record.request.request_id]
            self._listener.ended(record, now_s)

    def _relieve(self, now_s: float) -> float:
        """Park whom the highest watermark says, as the embedded engine does before a step. Returns what copying their
        KV takes, seconds."""
        if not self._pressure.shared or not self.shape.watermarks:
            return 0.0
        copied_tokens = 0
        for sequence in self._pressure.cold(self._residents.running.values(), self.knobs, now_s):
            copied_tokens += self._park(sequence.request_id)
        return self.shape.copy_s_per_token * copied_tokens

    def _park(self, request_id: str) -> int:
        """One gives up its stream. Returns how many tokens of KV it keeps."""
        self.records[request_id].preempted += 1
        self.victims += 1
        return self._residents.park(request_id, self._rates()).computed_tokens

    def _plans_at(self, times_s: list[float]) -> None:
        """What the waiting queue would have been told at these plans: time passes for debts."""
        for time_s in times_s:
            self._residents.queue.refresh(time_s)

    def _count_decodes(self, ends_s: list[float], before_s: float) -> None:
        """Everybody that runs got a token at each of these times."""
        steps = len(ends_s)
        if not steps:
            return
        now_s = ends_s[-1]
        self.steps += steps
        self.last_step_s = now_s - (ends_s[-2] if steps > 1 else before_s)
        longest_s = max([later - earlier for earlier, later in pairwise(ends_s)], default=0.0)
        rows_by_lane: dict[str, int] = {}
        for sequence in list(self._residents.running.values()):
            record = self.records[sequence.request_id]
            rows_by_lane[sequence.lane] = rows_by_lane.get(sequence.lane, 0) + 1
            sequence.computed_tokens += steps
            sequence.known_tokens += steps
            record.output_tokens += steps
            assert sequence.last_token_s is not None
            record.longest_gap_s = max(record.longest_gap_s, ends_s[0] - sequence.last_token_s, longest_s)
            sequence.note_token(now_s)
            record.last_token_s = now_s
            if record.token_s is not None:
                record.token_s += ends_s
            if sequence.known_tokens >= self._stops_at[sequence.request_id]:
                self._stop(sequence, now_s)
        self._shares.charge_parts((Part(rows_by_lane, now_s - before_s),), now_s)
