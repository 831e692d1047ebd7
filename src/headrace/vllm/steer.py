"""Around vLLM's ``schedule``: decide before it, show vLLM what the plan says, learn from what the step took.

The one place where plan and vLLM meet. Whatever goes wrong in deciding leaves vLLM to itself: the step, and all after
it until somebody turns the plug-in on again, is what vLLM would do without it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from headrace.errors import ConfigError
from headrace.scheduling.bands import Band
from headrace.scheduling.caps import SIZES_INTERVAL_S, BatchSizes, batch_sizes
from headrace.scheduling.cost import Call, CostModel, prefill_pairs
from headrace.scheduling.order import ServiceRates
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.shares import LaneShares
from headrace.scheduling.step import SchedulerState, StepPlan, StepPolicy
from headrace.scheduling.strategies import policy_for
from headrace.vllm.adapter import Adapter
from headrace.vllm.book import Book
from headrace.vllm.carry import Shown, shown
from headrace.vllm.gate import GatedQueue
from headrace.vllm.pressure import Pressure
from headrace.vllm.settings import EngineShape, Settings, bands_of, changed, first_knobs
from headrace.vllm.shapes import Request, Scheduler, StepOutput
from headrace.vllm.status import Counts, Status

IDLE_PAUSE_S: Final = 0.002
"""How long a step that can compute nothing waits, so that held requests do not make vLLM's loop spin."""
_OVERHEAD_MEMORY: Final = 0.05
_LOG: Final = logging.getLogger("headrace.vllm")


@dataclass(slots=True)
class _Flight:
    """A step that vLLM has scheduled and not yet processed; ``call`` None: nothing to learn from."""

    output: object
    call: Call | None
    lanes: Mapping[str, int]
    scheduled_s: float


class Steering:
    """The plug-in's side of one vLLM scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        adapter: Adapter,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
        policy: StepPolicy | None = None,
    ) -> None:
        """``policy`` None: what the live knob ``strategy`` names. Raises ConfigError."""
        self._scheduler = scheduler
        self._adapter = adapter
        self._clock = clock
        self._wall_s = wall_s
        self._pause = pause
        blocks = scheduler.cache_config.num_gpu_blocks or 0
        self.shape = EngineShape(
            max_num_seqs=min(scheduler.max_num_running_reqs, scheduler.max_num_active_reqs),
            max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
            max_model_len=scheduler.max_model_len,
            kv_tokens=max(1, blocks * scheduler.block_size),
        )
        self.knobs = first_knobs(settings, self.shape)
        self.bands: tuple[Band, ...] = bands_of(settings, self.shape)
        self.enabled = settings.enabled
        self.failed = False
        self.costs = CostModel()
        self.counts = Counts()
        self.gate = GatedQueue(scheduler.waiting)
        scheduler.waiting = self.gate
        self._own_policy = policy
        self._policy = policy_for(self.knobs.strategy) if policy is None else policy
        self._threshold = scheduler.scheduler_config.long_prefill_token_threshold
        self._active = scheduler.max_num_active_reqs
        self._adaptive = scheduler.adaptive_long_prefill_threshold
        self._budget = scheduler.max_num_scheduled_tokens
        self._flights: deque[_Flight] = deque()
        self._updated_s = float("-inf")
        self._sizes = BatchSizes()
        self._sizes_s = float("-inf")
        self._shares = LaneShares()
        self._plan = StepPlan()
        self._hidden: list[Request] = []
        self._call: Call | None = None
        self._lanes: dict[str, int] = {}
        self._decide_s = 0.0
        self._said_xargs = False
        self._prefilled = False
        self._start()

    def _start(self) -> None:
        """Begin (again) with what vLLM holds now."""
        self.book = Book(
            self._adapter,
            self.bands,
            self.knobs,
            wall_s=self._wall_s,
            chunk_limit_tokens=self._threshold or None,
        )
        self.pressure = Pressure(self.shape.kv_tokens)
        self.gate.touched = dict(self.gate.members)

    @property
    def active(self) -> bool:
        """Whether the policies decide."""
        return self.enabled and not self.failed

    # Live values

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change knobs by name, and ``enabled``; ``enabled: true`` also starts again after a failure. Raises
        ConfigError; then nothing is changed."""
        changes = dict(changes)
        enabled = changes.pop("enabled", None)
        if enabled is not None and not isinstance(enabled, bool):
            raise ConfigError("must be true or false", where="enabled")
        knobs = changed(self.knobs, changes, self.shape)
        was_active = self.active
        self.knobs = knobs
        if self._own_policy is None:
            self._policy = policy_for(knobs.strategy)
        self._sizes_s = float("-inf")
        if enabled is not None:
            self.enabled = enabled
            self.failed = self.failed and not enabled
        if self.active and not was_active:
            self._start()
        elif self.active:
            self.book.set_knobs(knobs)

    # Around one step

    def before(self) -> None:
        """Decide the step that ``schedule`` is about to make, and show vLLM what it needs for that."""
        self.gate.open()
        self._hidden, self._call = [], None
        if not self.active:
            self.gate.touched.clear()
            return
        began_s = self._clock()
        try:
            step = self._decide(began_s)
            self._show(step)
        except Exception as error:  # whatever a policy or an account does wrong: serving goes on
            self.restore()
            self._fail(error)
            return
        self._decide_s += _OVERHEAD_MEMORY * (self._clock() - began_s - self._decide_s)
        if step.empty and not self._flights and len(self.gate):
            self._pause(IDLE_PAUSE_S)

    def _fail(self, error: Exception) -> None:
        self.failed = True
        self.counts.failures += 1
        self.gate.open()
        self.gate.touched.clear()
        _LOG.error(
            "headrace's policy failed; vLLM goes on by itself until the knob 'enabled' is set to true again",
            exc_info=error,
        )

    def _decide(self, now_s: float) -> Shown:
        scheduler, book = self._scheduler, self.book
        rates = self._rates()
        book.settle(self.gate, scheduler.finished_req_ids, now_s, rates, scheduler)
        if book.unsound and not self._said_xargs:
            self._said_xargs = True
            _LOG.warning("left out of a request, and not said again: %s", ", ".join(book.unsound))
        book.look(scheduler.running, self._updated_s, now_s)
        self._relieve(now_s, rates)
        book.queue.refresh(now_s)
        if self._prefilled:
            book.note_cached(scheduler)
        state = self._state(now_s)
        plan = self._policy.plan(state)
        for request_id in plan.victims:
            self._preempt(book[request_id].request, now_s)
            self.counts.victims += 1
        if plan.victims:
            book.settle(self.gate, (), now_s, rates, scheduler)
            book.look(scheduler.running, self._updated_s, now_s)
        self._plan = plan
        entering = {a.request_id: book[a.request_id].state for a in plan.admissions}
        step = shown(
            plan,
            book.running,
            entering,
            most_tokens=self.knobs.step_tokens,
            drafts=self._drafts(),
            allowed=self._with_blocks(plan, entering) if self._adapter.lets_in(scheduler) else (),
        )
        self._note(step, plan)
        return step

    def _state(self, now_s: float) -> SchedulerState:
        book = self.book
        sizes = self._batch_sizes(now_s)
        free = book.free_streams(max(0, self.shape.max_num_seqs - len(book.running)))
        return SchedulerState(
            now_s=now_s,
            bands=book.bands,
            free_streams=free,
            waiting=book.queue,
            running=book.running,
            knobs=self.knobs,
            times=self.costs,
            fused=True,
            lane_shares=self._shares.shares(now_s),
            urgent_seen_s=book.urgent_seen_s(now_s),
            traffic=book.traffic.view(),
            batch_cap=sizes.knee,
            crowd=sizes.crowd,
            strategy=self._plan.strategy,
            # Far from full, or with no place for anybody, nobody need be counted.
            memory=self.pressure.limits(self.knobs) if self.pressure.level != "normal" and any(free) else None,
        )

    def _relieve(self, now_s: float, rates: ServiceRates) -> None:
        """Look where the level of KV memory is, and take out whom it says."""
        book, scheduler = self.book, self._scheduler
        cold = self.pressure.look(
            book.running, book.queue, scheduler.get_kv_cache_usage(), now_s, self.knobs, rates, self.costs
        )
        for state in cold:
            state.made_way = True
            self._preempt(book[state.request_id].request, now_s)
            self.counts.made_way += 1
        if cold:
            book.settle(self.gate, (), now_s, rates, scheduler)
            book.look(scheduler.running, self._updated_s, now_s)

    def _preempt(self, request: Request, now_s: float) -> None:
        self._adapter.preempt(self._scheduler, request, now_s)

    def _with_blocks(self, plan: StepPlan, entering: Mapping[str, SequenceState]) -> Collection[str]:
        """Who of those that enter finds free KV blocks for its whole prompt beside what runs, first come first: an
        allocation that fails would end vLLM's step, or take somebody out. When nobody runs vLLM itself decides."""
        if not entering or not self.book.running:
            return entering
        block = self._scheduler.block_size
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - len(plan.decode)
        free -= sum([-(-c.tokens // block) + 1 for c in plan.prefill if c.request_id not in entering])
        found: list[str] = []
        for request_id, state in entering.items():
            free -= -(-state.known_tokens // block) + 1
            if free < 0:
                break
            found.append(request_id)
        return found

    def _drafts(self) -> Mapping[str, int]:
        return {r.request_id: len(r.spec_token_ids) for r in self._scheduler.running if r.spec_token_ids}

    def _note(self, step: Shown, plan: StepPlan) -> None:
        """Keep what the step will compute, for learning and for the account of lanes."""
        book = self.book
        context = pairs = 0
        lanes: dict[str, int] = {}
        if step.decodes == len(book.running):
            decoding = book.running
        else:
            decode = set(plan.decode)
            decoding = [s for s in book.running if s.request_id in decode]
        for state in decoding:
            context += state.computed_tokens
            lanes[state.lane] = lanes.get(state.lane, 0) + 1
        for request_id, tokens in step.chunks:
            state = book[request_id].state
            pairs += prefill_pairs(max(state.computed_tokens, state.cached_tokens if state.slot is None else 0), tokens)
            lanes[state.lane] = lanes.get(state.lane, 0) + tokens
        self._prefilled = bool(step.chunks)
        self._call = None if step.empty else Call(step.budget, context, pairs)
        self._lanes = lanes

    def _show(self, step: Shown) -> None:
        scheduler, book = self._scheduler, self.book
        probes = [t.request for t in book.unready.values() if self._adapter.readiness(t.request) == "failed"]
        if step.order is not None or (probes and not step.hide_rest):
            by_id = {request.request_id: request for request in scheduler.running}
            order = tuple(by_id) if step.order is None else step.order
            front = [by_id.pop(request_id) for request_id in order]
            rest = list(by_id.values())
            if step.hide_rest or probes:
                scheduler.running, self._hidden = front, rest
            else:
                scheduler.running = front + rest
        self.gate.shut([*probes, *[book[request_id].request for request_id in step.offered]])
        # A failed request is looked at only while there is budget.
        scheduler.max_num_scheduled_tokens = step.budget + (1 if probes else 0)
        scheduler.scheduler_config.long_prefill_token_threshold = step.threshold
        scheduler.adaptive_long_prefill_threshold = False
        scheduler.max_num_active_reqs = max(0, self._active - len(self._hidden))

    def restore(self) -> None:
        """vLLM's step is made (or failed): everything is as vLLM had it."""
        scheduler = self._scheduler
        if self._hidden:
            scheduler.running.extend(self._hidden)
            self._hidden = []
        self.gate.open()
        scheduler.max_num_scheduled_tokens = self._budget
        scheduler.scheduler_config.long_prefill_token_threshold = self._threshold
        scheduler.adaptive_long_prefill_threshold = self._adaptive
        scheduler.max_num_active_reqs = self._active

    def after(self, output: StepOutput) -> None:
        """vLLM has made the step ``output``."""
        call = self._call
        if call is not None and output.total_num_scheduled_tokens != call.rows:
            self.counts.deviations += 1
            call = None
        if self.active:
            self.counts.steps += 1
        else:
            self.counts.stock_steps += 1
        self._flights.append(_Flight(output, call, self._lanes, self._clock()))

    def updated(self, output: object) -> None:
        """vLLM is about to process what the step ``output`` has computed."""
        now_s = self._clock()
        while self._flights:
            flight = self._flights.popleft()
            if flight.output is output:
                if flight.call is not None:
                    took_s = now_s - max(flight.scheduled_s, self._updated_s)
                    self.costs.learn((flight.call,), took_s)
                    self._shares.charge(flight.lanes, took_s, now_s)
                break
        self._updated_s = now_s

    def _rates(self) -> ServiceRates:
        times, cap = self.costs, max(1, self._sizes.knee)
        return ServiceRates(times.call_s(256) / 256, times.call_s(cap) / cap, times.call_s(1))

    def _batch_sizes(self, now_s: float) -> BatchSizes:
        """Looked for twice a second, once steps have been seen."""
        if now_s - self._sizes_s >= SIZES_INTERVAL_S and self.costs.steps:
            self._sizes_s = now_s
            running = self.book.running
            context_tokens = sum([s.computed_tokens for s in running]) / max(1, len(running))
            self._sizes = batch_sizes(
                self.costs, self.shape.max_num_seqs, self.knobs.knee_gain, context_tokens=context_tokens
            )
        return self._sizes

    # Accounts

    def status(self) -> Status:
        """What the plug-in does and sees, for HTTP and metrics."""
        now_s = self._clock()
        lanes: dict[str, int] = {}
        if self.active:
            for state in self.book.running:
                lanes[state.lane] = lanes.get(state.lane, 0) + 1
        waiting: dict[str, int] = {}
        if self.active:
            for state in self.book.queue:
                waiting[state.lane] = waiting.get(state.lane, 0) + 1
        return Status(
            enabled=self.enabled,
            failed=self.failed,
            knobs=msgspec.to_builtins(self.knobs),
            bands=[(band.max_context_tokens, band.max_sequences) for band in self.bands],
            counts=msgspec.structs.replace(self.counts, ignored_xargs=self.book.ignored_xargs),
            running_by_lane=lanes,
            waiting_by_lane=waiting,
            lane_shares=self._shares.shares(now_s),
            strategy=self._plan.strategy,
            batch_cap=self._sizes.knee,
            step_error=self.costs.error,
            decide_s=self._decide_s,
            kv_level=self.pressure.level,
            kv_budget_tokens=self.pressure.budget_tokens,
            kv_held_tokens=self.pressure.held_tokens,
            kv_promised_tokens=self.pressure.promised_tokens,
            kv_drain_s=self.pressure.drain_s,
        )

    def check_integrity(self) -> str | None:
        """None when the plug-in's accounts agree with vLLM's; else what is wrong. Brings them up to date first."""
        now_s = self._clock()
        self.book.settle(self.gate, self._scheduler.finished_req_ids, now_s, self._rates(), self._scheduler)
        self.book.look(self._scheduler.running, self._updated_s, now_s)
        return self.book.check_integrity(self.gate, self._scheduler)
