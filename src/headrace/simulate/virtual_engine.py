"""An engine on the virtual clock: it carries out step plans on counts, and time passes as a cost function says.

It does what the embedded engine does with a plan (victims, moves, admissions, promotions, forward passes) and keeps
the same accounts: slots, lanes' shares, recent traffic. Only the arithmetic is missing. What arrives during a step is
seen at its end. A plan sees the engine as it is; what it believes about time (``believed``) and what time it really
takes (``true``) may differ.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from msgspec import Struct

from headrace.scheduling.bands import Band
from headrace.scheduling.caps import SIZES_INTERVAL_S, BatchSizes, batch_sizes
from headrace.scheduling.cost import Call
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.order import ServiceRates
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.shares import LaneShares, Part
from headrace.scheduling.step import SchedulerState, StepPlan, StepPolicy, StepTimes
from headrace.scheduling.strategies import policy_for
from headrace.scheduling.traffic import TrafficWindow
from headrace.simulate.check_plan import check_plan
from headrace.simulate.cutting import worth_a_cut
from headrace.simulate.passes import Pass, PassLayout, passes_of
from headrace.simulate.requests import Outcome, RequestRecord, VirtualRequest
from headrace.simulate.residents import Residents
from headrace.simulate.simulation import Event, SimulationError

_STEP_RANK: Final = 1
"""A step begins after everything else that happens at its time: it sees all that has arrived."""
_SHORTEST_WAIT_S: Final = 1e-6
_MOST_EMPTY_PLANS: Final = 100
"""In a row, by which sequences change places and nothing is computed: more are a policy that turns in circles."""


class EngineShape(Struct, frozen=True):
    """How an engine computes. ``layout``: how a plan becomes forward passes (``passes``). ``kv_travels``: a sequence
    that is preempted or promoted keeps its KV, copied out and in at ``copy_s_per_token`` each (in the embedded engine
    1,900 tokens are read in 5 ms and written in 6); otherwise it is computed again. ``cuts``: a prefill
    pass ends early for an arrival whose deadline that saves (not ``fused``). ``overhead_s`` passes with every
    step (planning, sampling, messages). ``noise`` is the standard deviation of the logarithm of a step's time."""

    bands: tuple[Band, ...]
    layout: PassLayout = "apart"
    kv_travels: bool = True
    copy_s_per_token: float = 3e-6
    cuts: bool = False
    overhead_s: float = 0.0
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    """The step under way: its passes, when each ends, and when the first begins."""

    passes: Sequence[Pass]
    ends_s: Sequence[float]
    computes_from_s: float


class VirtualEngine:
    """Sequences over a slot table, driven by ``policy`` (None: what the live ``knobs.strategy`` names). Its methods
    return the events that follow.

    ``learn`` is told each step's calls and what they took (``CostModel.learn``), so that ``believed`` may be a model
    that learns. ``checked`` makes every plan be checked (``check_plan``): SimulationError for one that breaks a
    promise. ``watch`` sees every plan before it is carried out.
    """

    def __init__(
        self,
        shape: EngineShape,
        true: StepTimes,
        randomness: random.Random,
        *,
        policy: StepPolicy | None = None,
        knobs: SchedulingKnobs | None = None,
        believed: StepTimes | None = None,
        learn: Callable[[Sequence[Call], float], None] | None = None,
        checked: bool = False,
        watch: Callable[[SchedulerState, StepPlan], None] | None = None,
    ) -> None:
        self.shape = shape
        self.knobs = SchedulingKnobs() if knobs is None else knobs
        self._own_policy = policy
        self._policy = policy_for(self.knobs.strategy) if policy is None else policy
        self._true = true
        self._believed = true if believed is None else believed
        self._learn = learn
        self._random = randomness
        self._checked = checked
        self._watch = watch
        self.records: dict[str, RequestRecord] = {}
        self.steps = self.moves = self.victims = self.cut_steps = 0
        self._was_cut: set[str] = set()
        self.busy_s = 0.0
        self._stops_at: dict[str, int] = {}
        self._residents = Residents(shape.bands, self.knobs, kv_travels=shape.kv_travels)
        self._shares = LaneShares()
        self._traffic = TrafficWindow()
        self._strategy = ""
        self._sizes_until_s = -math.inf
        self._sizes = self._batch_sizes(-math.inf)
        self._empty_plans = 0
        self._step: _Step | None = None
        self._began_s = 0.0
        self._aborts: list[str] = []
        self._life = 0
        """Counts wakes and restarts: a wait or a step of an earlier life means nothing any more."""
        self._begins = False
        self._not_before_s = -math.inf

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

    def submit(self, request: VirtualRequest, now_s: float) -> Iterable[Event]:
        """Take a request in. Raises SimulationError for an id that was there before or a prompt beyond the bands."""
        if request.request_id in self.records:
            raise SimulationError(f"{request.request_id} has been submitted before")
        if not 0 < request.prompt_tokens < self.longest_tokens:
            raise SimulationError(f"{request.request_id}: {request.prompt_tokens} prompt tokens cannot be served")
        record = self.records[request.request_id] = RequestRecord(request)
        limit = self.longest_tokens
        if request.max_tokens is not None:
            limit = min(limit, request.prompt_tokens + request.max_tokens)
        sequence = SequenceState(
            request.request_id,
            request.prompt_tokens,
            limit,
            request.priority,
            request.arrived_s,
            request.deadline_s,
            chunk_limit_tokens=request.chunk_limit_tokens,
            lane=request.lane,
            tenant=request.tenant,
            tpot_s=request.targets.tpot_s,
            finish_by_s=request.finish_by_s,
            expected_tokens=request.expected_tokens,
            cached_tokens=min(request.cached_tokens, request.prompt_tokens - 1),
        )
        expected_tokens = request.prompt_tokens + sequence.output_tokens_to_expect
        self._traffic.note(expected_tokens, request.lane, sequence.urgent, request.stream)
        if limit == request.prompt_tokens:
            record.outcome, record.ended_s = "length", now_s
            return ()
        self._stops_at[request.request_id] = min(limit, request.prompt_tokens + max(1, request.output_tokens))
        cut = self._cut_for(sequence, now_s)
        self._residents.enter(sequence, self._rates())
        return cut or self._wake(now_s)

    def _cut_for(self, arrival: SequenceState, now_s: float) -> Iterable[Event]:
        """Cut the prefill pass under way when that saves the arrival's deadline; what the step has computed before
        is kept, what it has not is planned anew. No chunk is cut twice in a row."""
        step = self._step
        if step is None or not self.shape.cuts or self.shape.layout == "fused":
            return ()
        done = bisect_right(step.ends_s, now_s)
        if done == len(step.passes) or not worth_a_cut(
            arrival, step.passes[done:], step.ends_s[done], now_s, self._state(now_s), self._was_cut
        ):
            return ()
        self._was_cut |= {request_id for request_id, _ in step.passes[done].items}
        self.cut_steps += 1
        self._step = _Step(step.passes[:done], step.ends_s[:done], step.computes_from_s)
        return (Event(now_s, partial(self._finish, self._step)),)

    def abort(self, request_id: str, now_s: float) -> Iterable[Event]:
        """End a request, between steps as the embedded engine does. Unknown ids and ended ones are ignored."""
        if self._step is not None:
            self._aborts.append(request_id)
            return ()
        return self._wake(now_s) if self._end(request_id, "abort", now_s) else ()

    def set_knobs(self, knobs: SchedulingKnobs, now_s: float) -> Iterable[Event]:
        """New live values, from the next step on."""
        self.knobs = knobs
        self._sizes_until_s = -math.inf
        self._residents.queue.set_knobs(knobs)
        if self._own_policy is None:
            self._policy = policy_for(knobs.strategy)
        return self._wake(now_s)

    def restart(self, now_s: float, down_s: float = 0.0) -> Iterable[Event]:
        """The engine dies: everything in it ends with ``error``, the step under way comes to nothing. It serves
        again after ``down_s``; what arrives until then waits."""
        for request_id in [*self._residents.running, *self._residents.waiting]:
            self._end(request_id, "error", now_s)
        if self._step is not None:
            self.busy_s += now_s - self._began_s
        self._step = None
        self._aborts = []
        self._strategy = ""
        self._shares = LaneShares()
        self._not_before_s = now_s + down_s
        self._begins = False
        return self._wake(now_s)

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

    def _wake(self, now_s: float) -> Iterable[Event]:
        """Plan now, unless a step is under way (its end does) or the engine is down."""
        self._life += 1
        if self._step is not None or self._begins:
            return ()
        self._begins = True
        return (Event(max(now_s, self._not_before_s), self._begin, _STEP_RANK),)

    def _begin(self, now_s: float) -> Iterable[Event]:
        """Plan a step and begin it."""
        if not self._begins or self._step is not None or now_s < self._not_before_s:
            return ()
        self._begins = False
        if not len(self._residents):
            return ()
        self._residents.queue.refresh(now_s)
        state = self._state(now_s)
        plan = self._policy.plan(state)
        if self._checked:
            problems = check_plan(state, plan)
            if problems:
                raise SimulationError(f"at {now_s} s: {'; '.join(problems)}")
        if self._watch is not None:
            self._watch(state, plan)
        self._strategy = plan.strategy
        copies_s = self._place(plan, now_s)
        if not plan.empty:
            self._empty_plans = 0
            return self._compute(plan, copies_s, now_s)
        if plan.wait_s is not None:
            self._not_before_s = now_s + copies_s
            self._life += 1
            return (Event(self._not_before_s + max(plan.wait_s, _SHORTEST_WAIT_S), partial(self._resume, self._life)),)
        if not (plan.victims or plan.moves or plan.admissions or plan.promotions):
            return ()  # nothing can run until something arrives or a knob is turned
        self._empty_plans += 1
        if self._empty_plans > _MOST_EMPTY_PLANS:
            raise SimulationError(f"at {now_s} s: sequences are placed and displaced, and nothing is computed")
        self._not_before_s = now_s + copies_s
        return self._wake(now_s)

    def _resume(self, life: int, now_s: float) -> Iterable[Event]:
        """A wait is over, unless something woke the engine before."""
        return self._wake(now_s) if life == self._life else ()

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
            copied_tokens += residents.park(request_id, self._rates()).computed_tokens
            self.records[request_id].preempted += 1
            self.victims += 1
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

    def _compute(self, plan: StepPlan, copies_s: float, now_s: float) -> Iterable[Event]:
        """Begin the forward passes; their results come at the step's end."""
        passes = passes_of(plan, self._residents.running, self.shape.layout, self._believed)
        pace = 1.0 if not self.shape.noise else math.exp(self._random.gauss(0.0, self.shape.noise))
        end_s = now_s + copies_s + self.shape.overhead_s
        ends_s = []
        for one in passes:
            call = one.call
            end_s += pace * self._true.call_s(call.rows, call.context_tokens, call.pairs)
            ends_s.append(end_s)
        for chunk in plan.prefill:
            record = self.records[chunk.request_id]
            if record.started_s is None:
                record.started_s = now_s
        self._step = _Step(passes, ends_s, now_s + copies_s + self.shape.overhead_s)
        self._began_s = now_s
        return (Event(end_s, partial(self._finish, self._step)),)

    def _finish(self, step: _Step, now_s: float) -> Iterable[Event]:
        """The step has ended: count what it computed, and begin the next one."""
        if step is not self._step:
            return ()  # it died with the engine
        self._step = None
        self.steps += 1
        self.busy_s += now_s - self._began_s
        running, parts, began_s = self._residents.running, [], step.computes_from_s
        for one, end_s in zip(step.passes, step.ends_s, strict=True):
            rows_by_lane: dict[str, int] = {}
            for request_id, tokens in one.items:
                sequence = running[request_id]
                rows_by_lane[sequence.lane] = rows_by_lane.get(sequence.lane, 0) + tokens
                sequence.computed_tokens += tokens
                self._was_cut.discard(request_id)
                if sequence.computed_tokens == sequence.known_tokens:
                    self._sample(sequence, end_s)
            parts.append(Part(rows_by_lane, end_s - began_s))
            began_s = end_s
        self._shares.charge_parts(parts, now_s)
        if self._learn is not None and step.passes:
            self._learn([one.call for one in step.passes], step.ends_s[-1] - step.computes_from_s)
        aborts, self._aborts = self._aborts, []
        for request_id in aborts:
            self._end(request_id, "abort", now_s)
        return self._wake(now_s)

    def _sample(self, sequence: SequenceState, now_s: float) -> None:
        """A sequence's next token."""
        record = self.records[sequence.request_id]
        sequence.known_tokens += 1
        record.output_tokens += 1
        if sequence.last_token_s is None:
            record.first_token_s = now_s
        else:
            record.longest_gap_s = max(record.longest_gap_s, now_s - sequence.last_token_s)
        sequence.note_token(now_s)
        record.last_token_s = now_s
        if sequence.known_tokens >= self._stops_at[sequence.request_id]:
            self._end(
                sequence.request_id, "length" if sequence.known_tokens >= sequence.limit_tokens else "stop", now_s
            )

    def _end(self, request_id: str, outcome: Outcome, now_s: float) -> bool:
        """A sequence leaves, wherever it is. False for one that is not alive."""
        if not self._residents.forget(request_id, now_s):
            return False
        self._was_cut.discard(request_id)
        del self._stops_at[request_id]
        record = self.records[request_id]
        record.outcome, record.ended_s = outcome, now_s
        return True
