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

from headrace.scheduling.cost import Call
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.shares import LaneShares, Part
from headrace.scheduling.step import SchedulerState, StepPlan, StepPolicy, StepTimes
from headrace.scheduling.strategies import policy_for
from headrace.simulate.check_plan import check_plan
from headrace.simulate.cutting import worth_a_cut
from headrace.simulate.decode_runs import SHORTEST, DecodeRun, RunLengths, steps_alike
from headrace.simulate.engine_accounts import EngineAccounts
from headrace.simulate.engine_shape import EngineShape as EngineShape
from headrace.simulate.engine_shape import Listener
from headrace.simulate.passes import Pass, passes_of
from headrace.simulate.requests import RequestRecord, VirtualRequest
from headrace.simulate.simulation import Event, SimulationError

_STEP_RANK: Final = 1
"""A step begins after everything else that happens at its time: it sees all that has arrived."""
_SHORTEST_WAIT_S: Final = 1e-6
_MOST_EMPTY_PLANS: Final = 100
"""In a row, by which sequences change places and nothing is computed: more are a policy that turns in circles."""


@dataclass(frozen=True, slots=True)
class _Step:
    """The step under way: its passes, when each ends, and when the first begins."""

    passes: Sequence[Pass]
    ends_s: Sequence[float]
    computes_from_s: float


class VirtualEngine(EngineAccounts):
    """Sequences over a slot table, driven by ``policy`` (None: what the live ``knobs.strategy`` names). Its methods
    return the events that follow.

    ``learn`` is told each step's calls and what they took (``CostModel.learn``), so that ``believed`` may be a model
    that learns. ``checked`` makes every plan be checked (``check_plan``): SimulationError for one that breaks a
    promise. ``watch`` sees every plan before it is carried out. With a ``listener`` the records of requests that have
    ended are handed to it and forgotten, so that memory holds what is alive; ``token_times`` keeps every token's time
    in the records.
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
        listener: Listener | None = None,
        token_times: bool = False,
    ) -> None:
        super().__init__(shape, true, knobs, believed, listener, token_times)
        self._own_policy = policy
        self._policy = policy_for(self.knobs.strategy) if policy is None else policy
        self._learn = learn
        self._random = randomness
        self._checked = checked
        self._watch = watch
        self.pace = 1.0
        """How many times longer than ``true`` forward passes take: above 1 in a machine that became slow."""
        self.cut_steps = 0
        self.busy_s = 0.0
        self._empty_plans = 0
        self._step: _Step | None = None
        self._began_s = 0.0
        self._aborts: list[str] = []
        self._joins = (
            shape.joins_decodes
            and shape.layout == "fused"
            and len(shape.bands) == 1
            and not shape.noise
            and not checked
            and watch is None
            and learn is None
        )
        self._run: DecodeRun | None = None
        self._lengths = RunLengths()
        self._life = 0
        """Counts wakes and restarts: a wait or a step of an earlier life means nothing any more."""
        self._begins = False
        self._not_before_s = -math.inf

    def submit(self, request: VirtualRequest, now_s: float) -> Iterable[Event]:
        """Take a request in. Raises SimulationError for an id that was there before or a prompt beyond the bands."""
        if request.request_id in self.records:
            raise SimulationError(f"{request.request_id} has been submitted before")
        if not 0 < request.prompt_tokens < self.longest_tokens:
            raise SimulationError(f"{request.request_id}: {request.prompt_tokens} prompt tokens cannot be served")
        record = self.records[request.request_id] = RequestRecord(request)
        if self._token_times:
            record.token_s = []
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
            self._tell_end(record, now_s)
            return ()
        self._stops_at[request.request_id] = min(limit, request.prompt_tokens + max(1, request.output_tokens))
        joined = self._interrupt(now_s)
        cut = joined or self._cut_for(sequence, now_s)
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
        if self._step is not None or self._run is not None:
            self._aborts.append(request_id)
            return self._interrupt(now_s)
        return self._wake(now_s) if self._end(request_id, "abort", now_s) else ()

    def set_knobs(self, knobs: SchedulingKnobs, now_s: float) -> Iterable[Event]:
        """New live values, from the next step on."""
        self.knobs = knobs
        self._sizes_until_s = -math.inf
        self._residents.queue.set_knobs(knobs)
        if self._own_policy is None:
            self._policy = policy_for(knobs.strategy)
        return self._interrupt(now_s) or self._wake(now_s)

    def restart(self, now_s: float, down_s: float = 0.0) -> Iterable[Event]:
        """The engine dies: everything in it ends with ``error``, the step under way comes to nothing. It serves
        again after ``down_s``; what arrives until then waits."""
        self.settle(now_s)
        for request_id in [*self._residents.running, *self._residents.waiting]:
            self._end(request_id, "error", now_s)
        if self._step is not None or self._run is not None:
            self.busy_s += now_s - self._began_s
        self._step = self._run = None
        self._aborts = []
        self._strategy = ""
        self._shares = LaneShares()
        self._not_before_s = now_s + down_s
        self._begins = False
        return self._wake(now_s)

    def busy_until(self, now_s: float) -> float:
        """How long it has computed until ``now_s``, the step under way included."""
        idle = self._step is None and self._run is None
        return self.busy_s if idle else self.busy_s + max(0.0, now_s - self._began_s)

    def _wake(self, now_s: float) -> Iterable[Event]:
        """Plan now, unless a step is under way (its end does) or the engine is down."""
        self._life += 1
        if self._step is not None or self._run is not None or self._begins:
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
        if self._joins and not self._residents.waiting:
            joined = self._join(now_s)
            if joined:
                return joined
        copies_s = self._relieve(now_s)
        state = self._state(now_s)
        plan = self._policy.plan(state)
        if self._checked:
            problems = check_plan(state, plan)
            if problems:
                raise SimulationError(f"at {now_s} s: {'; '.join(problems)}")
        if self._watch is not None:
            self._watch(state, plan)
        self._strategy = plan.strategy
        copies_s += self._place(plan, now_s)
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

    def _compute(self, plan: StepPlan, copies_s: float, now_s: float) -> Iterable[Event]:
        """Begin the forward passes; their results come at the step's end."""
        passes = passes_of(plan, self._residents.running, self.shape.layout, self._believed)
        pace = self.pace
        if self.shape.noise:
            pace *= math.exp(self._random.gauss(0.0, self.shape.noise))
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

    def set_pace(self, pace: float, now_s: float) -> Iterable[Event]:
        """From the next step on forward passes take ``pace`` times as long as ``true``."""
        self.pace = pace
        return self._interrupt(now_s)

    def _join(self, now_s: float) -> Iterable[Event]:
        """Begin the steps that no plan could change; nothing where there are none."""
        running, shape = self._residents.running, self.shape
        steps = steps_alike(
            running.values(),
            self._stops_at,
            most=self._lengths.ahead,
            band_tokens=shape.bands[0].max_context_tokens,
            budget_tokens=self._pressure.budget_tokens if self._pressure.shared else None,
            knobs=self.knobs,
            batch_cap=self._batch_sizes(now_s).knee,
        )
        if not steps:
            return ()
        rows = len(running)
        cells = sum([sequence.computed_tokens for sequence in running.values()])
        end_s, ends_s = now_s, []
        for step in range(steps):
            end_s += shape.overhead_s
            end_s += self.pace * self._true.call_s(rows, cells + step * rows, 0)
            ends_s.append(end_s)
            if end_s >= self._sizes_until_s:
                break  # the knee is looked for anew
        self._run = DecodeRun(ends_s)
        self._began_s = now_s
        return (Event(ends_s[-1], partial(self._finish_run, self._run, False)),)

    def _interrupt(self, now_s: float) -> Iterable[Event]:
        """Something comes from outside: of joined steps only the one under way goes on."""
        run = self._run
        if run is None:
            return ()
        self.settle(now_s)
        steps, whole = len(run.ends_s), run.ends_s[-1]
        end_s = run.cut(now_s)
        if end_s == whole:
            return ()
        self._lengths.cut(len(run.ends_s))
        assert len(run.ends_s) < steps
        self._run = DecodeRun(run.ends_s, run.done)
        return (Event(end_s, partial(self._finish_run, self._run, True)),)

    def settle(self, now_s: float) -> None:
        """Count the joined steps that have ended by now, except the last one, whose end is an event."""
        run = self._run
        if run is None or len(run.ends_s) < SHORTEST:
            return
        before_s = run.ends_s[run.done - 1] if run.done else self._began_s
        ends_s = run.ended(min(now_s, run.ends_s[-2]))
        self._plans_at(ends_s)
        self._count_decodes(ends_s, before_s)

    def _finish_run(self, run: DecodeRun, cut: bool, now_s: float) -> Iterable[Event]:
        """The last of joined steps has ended."""
        if run is not self._run:
            return ()
        if not cut:
            self._lengths.whole()
        before_s = run.ends_s[run.done - 1] if run.done else self._began_s
        self._run = None
        ends_s = run.ended(now_s)
        self._plans_at(ends_s[:-1])
        self._count_decodes(ends_s, before_s)
        self.busy_s += now_s - self._began_s
        aborts, self._aborts = self._aborts, []
        for request_id in aborts:
            self._end(request_id, "abort", now_s)
        return self._wake(now_s)

    def _finish(self, step: _Step, now_s: float) -> Iterable[Event]:
        """The step has ended: count what it computed, and begin the next one."""
        if step is not self._step:
            return ()  # it died with the engine
        self._step = None
        self.steps += 1
        self.last_step_s = now_s - self._began_s
        self.busy_s += self.last_step_s
        running, parts, began_s = self._residents.running, [], step.computes_from_s
        for one, end_s in zip(step.passes, step.ends_s, strict=True):
            rows_by_lane: dict[str, int] = {}
            for request_id, tokens in one.items:
                sequence = running[request_id]
                rows_by_lane[sequence.lane] = rows_by_lane.get(sequence.lane, 0) + tokens
                sequence.computed_tokens += tokens
                self._was_cut.discard(request_id)
                if sequence.computed_tokens == sequence.known_tokens:
                    self._sample(sequence, end_s, now_s)
            parts.append(Part(rows_by_lane, end_s - began_s))
            began_s = end_s
        self._shares.charge_parts(parts, now_s)
        if self._learn is not None and step.passes:
            self._learn([one.call for one in step.passes], step.ends_s[-1] - step.computes_from_s)
        aborts, self._aborts = self._aborts, []
        for request_id in aborts:
            self._end(request_id, "abort", now_s)
        return self._wake(now_s)
