"""An engine without arithmetic: applies step plans to counts, and checks every plan while doing so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.scheduling.bands import Band, first_band
from headrace.scheduling.continuous import DecodeFirst
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import SequenceState, urgency
from headrace.scheduling.slots import SlotTable
from headrace.scheduling.step import SchedulerState, StepPlan, StepPolicy


def counts(state: SequenceState) -> tuple[object, ...]:
    """Every field of a sequence, comparable."""
    return tuple(getattr(state, name) for name in SequenceState.__slots__)


@dataclass
class Request:
    """A sequence and what only the engine knows: the length at which it will stop by itself."""

    state: SequenceState
    stops_at_tokens: int


@dataclass
class DryEngine:
    """Waiting and running sequences over a slot table, driven by ``policy``.

    ``kv_travels`` False is the case in which a promoted sequence must be computed again. ``check`` raises for a plan
    that breaks what the policy promises; the default is what ``DecodeFirst`` does.
    """

    bands: Sequence[Band]
    limits: SchedulingKnobs = field(default_factory=SchedulingKnobs)
    policy: StepPolicy = field(default_factory=DecodeFirst)
    kv_travels: bool = True
    steps: int = 0
    check: Callable[[SchedulerState, StepPlan], None] | None = None

    def __post_init__(self) -> None:
        self.slots = SlotTable(self.bands)
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.ended: list[tuple[str, str]] = []
        self.admitted_at: dict[str, int] = {}
        self.plans: list[StepPlan] = []

    @property
    def longest(self) -> int:
        """The longest sequence that the bands hold."""
        return self.bands[-1].max_context_tokens

    def submit(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        *,
        max_tokens: int | None = None,
        priority: int = 0,
        arrived_s: float = 0.0,
        chunk_limit_tokens: int | None = None,
        lane: str = "",
    ) -> None:
        """Take in a request that will generate ``output_tokens``, unless a limit ends it before."""
        limit = self.longest if max_tokens is None else min(self.longest, prompt_tokens + max_tokens)
        state = SequenceState(
            request_id, prompt_tokens, limit, priority, arrived_s, chunk_limit_tokens=chunk_limit_tokens, lane=lane
        )
        self.waiting[request_id] = Request(state, min(limit, prompt_tokens + output_tokens))

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; unknown ids are ignored."""
        if request_id in self.waiting or request_id in self.running:
            self._end(request_id, "abort")

    def remaining_tokens(self) -> int:
        """An upper bound of the tokens that everything alive still needs, promotions with recomputation
        included (a sequence is promoted at most once per band)."""
        alive = [*self.waiting.values(), *self.running.values()]
        return sum((request.stops_at_tokens + 1) * len(self.bands) for request in alive)

    def scheduler_state(self) -> SchedulerState:
        """What the policy sees."""
        return SchedulerState(
            now_s=float(self.steps),
            bands=tuple(self.bands),
            free_streams=tuple(self.slots.free_count(band) for band in range(len(self.bands))),
            waiting=[request.state for request in self.waiting.values()],
            running=[request.state for request in self.running.values()],
            knobs=self.limits,
        )

    def step(self) -> StepPlan:
        """Plan one step, check the plan, apply it."""
        state = self.scheduler_state()
        plan = self._plan_twice(state)
        (self.check or check_plan)(state, plan)
        for admission in plan.admissions:
            request = self.waiting.pop(admission.request_id)
            request.state.slot = self.slots.take(admission.band, admission.request_id)
            self.running[admission.request_id] = request
            self.admitted_at[admission.request_id] = self.steps
        for promotion in plan.promotions:
            request = self.running[promotion.request_id]
            assert request.state.slot is not None
            self.slots.release(request.state.slot, promotion.request_id)
            request.state.slot = self.slots.take(promotion.band, promotion.request_id)
            if not self.kv_travels:
                request.state.computed_tokens = 0
        for request_id in plan.decode:
            self._compute(request_id, 1)
        for chunk in plan.prefill:
            self._compute(chunk.request_id, chunk.tokens)
        self.steps += 1
        self.plans.append(plan)
        problem = self.slots.check_integrity()
        assert problem is None, problem
        assert self.slots.owners() == {r.state.slot: r.state.request_id for r in self.running.values()}
        return plan

    def _plan_twice(self, state: SchedulerState) -> StepPlan:
        """The plan, made sure to depend on nothing but the state and to leave it as it was."""
        sequences = [*state.waiting, *state.running]
        before = [counts(sequence) for sequence in sequences]
        twin = copy.deepcopy(state)
        plan = self.policy.plan(state)
        assert [counts(sequence) for sequence in sequences] == before
        assert self.policy.plan(state) == plan
        assert copy.deepcopy(self.policy).plan(twin) == plan
        return plan

    def _compute(self, request_id: str, tokens: int) -> None:
        request = self.running[request_id]
        state = request.state
        assert state.slot is not None
        state.computed_tokens += tokens
        assert state.computed_tokens <= self.bands[state.slot.band].max_context_tokens
        if state.pending_tokens:
            return
        if state.known_tokens < state.limit_tokens:
            state.known_tokens += 1
            state.note_token(float(self.steps))
        if state.known_tokens >= request.stops_at_tokens:
            self._end(request_id, "length" if state.known_tokens >= state.limit_tokens else "stop")

    def _end(self, request_id: str, reason: str) -> None:
        self.waiting.pop(request_id, None)
        request = self.running.pop(request_id, None)
        if request is not None:
            assert request.state.slot is not None
            self.slots.release(request.state.slot, request_id)
            request.state.slot = None
        self.ended.append((request_id, reason))


def check_plan(state: SchedulerState, plan: StepPlan) -> None:
    """Everything that ``StepPlan`` and ``DecodeFirst`` promise about one plan."""
    waiting = {sequence.request_id: sequence for sequence in state.waiting}
    running = {sequence.request_id: sequence for sequence in state.running}
    admitted = {admission.request_id for admission in plan.admissions}
    promoted = {promotion.request_id for promotion in plan.promotions}
    chunked = {chunk.request_id for chunk in plan.prefill}

    assert len(admitted) == len(plan.admissions) and admitted <= waiting.keys()
    assert len(promoted) == len(plan.promotions) and promoted <= running.keys()
    assert len(set(plan.decode)) == len(plan.decode) and set(plan.decode) <= running.keys()
    assert len(chunked) == len(plan.prefill) and chunked <= running.keys() | admitted
    assert not chunked & set(plan.decode)

    tokens = len(plan.decode) + sum(chunk.tokens for chunk in plan.prefill)
    assert tokens <= state.knobs.step_tokens
    assert plan.empty == (tokens == 0)
    if waiting or running:
        assert not plan.empty, "work is there and nothing is computed"

    for band, free in enumerate(state.free_streams):
        taken = [a.band for a in plan.admissions] + [p.band for p in plan.promotions]
        assert taken.count(band) <= free

    full = {
        name
        for name, sequence in running.items()
        if sequence.slot is not None and sequence.computed_tokens >= state.bands[sequence.slot.band].max_context_tokens
    }
    assert promoted <= full, "only a sequence that has filled its band moves"
    assert not (full - promoted) & (set(plan.decode) | chunked), "a full band holds no further token"
    for promotion in plan.promotions:
        slot = running[promotion.request_id].slot
        assert slot is not None and promotion.band > slot.band

    _check_caps(state, plan)
    _check_admissions(state, plan, waiting)
    _check_decode(state, plan, running, full - promoted)
    _check_prefill(state, plan, {**running, **waiting}, full - promoted)


def _check_caps(state: SchedulerState, plan: StepPlan) -> None:
    """Nobody enters what is at its cap, from outside or from the band below; what was there before may stay."""
    total = len(state.running) + len(plan.admissions)
    assert not plan.admissions or state.knobs.max_num_seqs is None or total <= state.knobs.max_num_seqs
    entering = [admission.band for admission in plan.admissions] + [move.band for move in plan.promotions]
    for band, cap in enumerate((state.knobs.band_caps or ())[: len(state.bands)]):
        members = sum(sequence.slot is not None and sequence.slot.band == band for sequence in state.running)
        assert band not in entering or members + entering.count(band) <= cap


def _check_admissions(state: SchedulerState, plan: StepPlan, waiting: dict[str, SequenceState]) -> None:
    """Admitted sequences fit their band, and nobody less urgent passed somebody who waits for the same."""
    admitted = {admission.request_id: admission.band for admission in plan.admissions}
    wanted = {
        name: first_band(sequence.prompt_tokens, sequence.limit_tokens, state.bands, state.knobs.band_margin_tokens)
        for name, sequence in waiting.items()
    }
    for name, band in admitted.items():
        assert wanted[name] == band
        assert waiting[name].prompt_tokens < state.bands[band].max_context_tokens
    for name in wanted.keys() - admitted.keys():
        rivals = [other for other, band in admitted.items() if band == wanted[name]]
        passed = [other for other in rivals if urgency(waiting[other]) > urgency(waiting[name])]
        assert not passed, f"{passed} overtook {name}"


def _check_decode(state: SchedulerState, plan: StepPlan, running: dict[str, SequenceState], stalled: set[str]) -> None:
    """Whoever decodes may; when not all can, the budget is used up by those that generated least."""
    decoders = {name for name, sequence in running.items() if sequence.decoding} - stalled
    assert set(plan.decode) <= decoders
    left_out = decoders - set(plan.decode)
    if left_out:
        assert len(plan.decode) == state.knobs.step_tokens

        def generated(name: str) -> int:
            return running[name].computed_tokens - running[name].prompt_tokens

        assert max(map(generated, plan.decode)) <= min(map(generated, left_out))


def _check_prefill(state: SchedulerState, plan: StepPlan, known: dict[str, SequenceState], stalled: set[str]) -> None:
    """Chunks go to the most urgent, each as large as it may be while the budget lasts."""
    admitted = {admission.request_id for admission in plan.admissions}
    running = {sequence.request_id for sequence in state.running}
    candidates = sorted(
        (known[n] for n in (running | admitted) - stalled if not known[n].decoding and known[n].pending_tokens),
        key=urgency,
    )
    budget = min(state.knobs.step_tokens - len(plan.decode), state.knobs.max_prefill_tokens)
    expected: list[tuple[str, int]] = []
    for sequence in candidates:
        size = min(sequence.pending_tokens, sequence.chunk_limit_tokens or budget, budget)
        if size:
            expected.append((sequence.request_id, size))
            budget -= size
    assert [(chunk.request_id, chunk.tokens) for chunk in plan.prefill] == expected
