"""The engine's heart: takes sequences in, runs one planned step at a time, gives outputs back.

No socket, no process, no signal: ``process`` owns those, so that tests drive a core directly. The policy decides
(``scheduling.step``); ``apply`` and ``forward`` carry the plan out on the ``residents``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from headrace.engines.llama.apply import Applier
from headrace.engines.llama.context import Context
from headrace.engines.llama.forward import Forward
from headrace.engines.llama.kv_account import kv_account, kv_limits
from headrace.engines.llama.live import LiveSequence, prompt_problem
from headrace.engines.llama.load_report import LoadReport
from headrace.engines.llama.parking import Parking
from headrace.engines.llama.prefix import PREFIX_DEFAULT, PrefixRules
from headrace.engines.llama.pressure import KvPressure
from headrace.engines.llama.residents import Residents
from headrace.engines.llama.step_costs import StepCosts
from headrace.engines.llama.tiering import Tiering
from headrace.kv.account import KvAccount
from headrace.kv.sources import SourceTimes
from headrace.messages.engine import BandPlan, EngineLoad, SequenceOutput, StepOutput, Submit
from headrace.scheduling.bands import first_band, longest_context
from headrace.scheduling.caps import SIZES_INTERVAL_S, BatchSizes, batch_sizes
from headrace.scheduling.cost import CostModel
from headrace.scheduling.cut import ArrivalFacts, first_token_s, saves_deadline
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.order import ServiceRates
from headrace.scheduling.sequence import UNKNOWN_OUTPUT_TOKENS
from headrace.scheduling.shares import LaneShares
from headrace.scheduling.step import SchedulerState, StepPlan, StepPolicy
from headrace.scheduling.traffic import TrafficWindow

if TYPE_CHECKING:
    from headrace.engines.llama.library import Library
    from headrace.engines.llama.vocabulary import Vocabulary
    from headrace.engines.llama.weights import Weights
    from headrace.kv.budget import BandBudget

Chores = Literal["now", "soon"] | None

EMPTY_PAUSE_S = 0.05
"""How long to wait after a plan that computes nothing and does not say when to ask again."""
OVERHEAD_MEMORY = 0.05
"""Weight of the latest step in what a step takes besides its passes."""


class EngineCore:
    """Sequences over banded contexts. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        library: Library,
        weights: Weights,
        vocabulary: Vocabulary,
        budget: BandBudget,
        policy: StepPolicy,
        *,
        knobs: SchedulingKnobs,
        threads: int,
        prefix: PrefixRules = PREFIX_DEFAULT,
        clock: Callable[[], float] = time.monotonic,
        kv_budget_tokens: int | None = None,
        parking: Parking | None = None,
        tiering: Tiering | None = None,
    ) -> None:
        """``kv_budget_tokens`` is what sequences may hold together (None: what the streams do), ``parking`` where KV
        goes that has no stream (None: memory, without a limit), ``tiering`` the stores of KV blocks."""
        self._library = library
        self._vocabulary = vocabulary
        self._policy = policy
        self._clock = clock
        self.knobs = knobs
        self._step_tokens_capacity = knobs.step_tokens
        self.max_context_tokens = longest_context(budget.bands)
        if kv_budget_tokens is not None:
            self.max_context_tokens = min(self.max_context_tokens, kv_budget_tokens)
        self.costs = StepCosts(CostModel())
        self.residents = Residents(
            library, weights, budget, knobs, prefix, self.now_s, Parking() if parking is None else parking, tiering
        )
        self.pressure = KvPressure(self.residents, kv_budget_tokens)
        self.applier = Applier(self.residents, self.now_s)
        self.forward = Forward(self.residents, vocabulary, self.costs, self.now_s, threads)
        self._report = LoadReport(self.residents, self.applier, self.forward, self.pressure, budget)
        self._token_bytes = [budget.band_token_bytes(index) for index in range(len(budget.bands))]
        self._shares = LaneShares()
        self._traffic = TrafficWindow()
        self._ended: list[SequenceOutput] = []
        self._last_plan = StepPlan()
        self._last_step_s = 0.0
        self._sizes = BatchSizes()
        self._overhead_s = 0.0
        self._sizes_s = -SIZES_INTERVAL_S
        self.emit: Callable[[StepOutput], None] | None = None
        """Takes outputs as soon as they are there, before the step's next pass; without it ``step`` returns all."""
        self.cut: Callable[[], bool] | None = None
        """Asked before and during prefill passes whether to end the step (``cut_saves``)."""
        self.pause_s = 0.0
        """How long the last plan wants to wait before the next one, unless a message comes."""

    def now_s(self) -> float:
        """The core's clock."""
        return self._clock()

    @property
    def has_work(self) -> bool:
        """True when a step would compute or report something."""
        residents = self.residents
        return bool(residents.running or residents.waiting or residents.fetching or self._ended)

    @property
    def threads(self) -> int:
        """Threads that the next step computes with."""
        return self.forward.threads

    def set_threads(self, threads: int) -> None:
        """Compute with ``threads`` threads from the next step on."""
        self.forward.threads = threads

    @property
    def one_by_one_limit(self) -> int:
        """With one thread, up to this many decoding sequences are computed one by one (see ``measure``)."""
        return self.forward.one_by_one_limit

    @one_by_one_limit.setter
    def one_by_one_limit(self, limit: int) -> None:
        self.forward.one_by_one_limit = limit

    def set_knobs(self, knobs: SchedulingKnobs) -> None:
        """New live values, cut to what the contexts were created for."""
        self.knobs = msgspec.structs.replace(knobs, step_tokens=min(knobs.step_tokens, self._step_tokens_capacity))
        self.residents.queue.set_knobs(self.knobs)
        self._sizes_s = -SIZES_INTERVAL_S

    def set_policy(self, policy: StepPolicy) -> None:
        """Another policy from the next step on. Policies keep nothing between steps: no sequence notices."""
        self._policy = policy

    def context(self, band: int) -> Context:
        """The context of a band, created on first use. Raises EngineError when memory does not suffice."""
        context = self.residents.context(band)
        context.set_threads(self.threads)
        return context

    # Sequences

    def submit(self, request: Submit) -> None:
        """Take a sequence in. One that cannot be served ends with ``error`` at the next step."""
        prompt = len(request.prompt_tokens)
        problem = self._refusal(request)
        if problem is not None:
            self._ended.append(SequenceOutput(request.request_id, finish="error", error=problem, prompt_tokens=prompt))
            return
        if request.max_tokens == 0 and request.sampling.prompt_logprobs is None:
            self._ended.append(SequenceOutput(request.request_id, finish="length", prompt_tokens=prompt))
            return
        sequence = LiveSequence.start(
            request, self._library, self._vocabulary, max_context_tokens=self._longest(request)
        )
        self.residents.enter(sequence, self._rates(), self._source_times())
        state = sequence.state
        self._traffic.note(prompt + state.output_tokens_to_expect, state.lane, state.urgent, request.stream)

    def _refusal(self, request: Submit) -> str | None:
        if self.residents.get(request.request_id) is not None:
            return f"request id {request.request_id} is already live"
        longest = self._longest(request)
        if not longest:
            return f"no band keeps KV at {request.min_kv_dtype} or finer, which lane {request.lane} asks for"
        return prompt_problem(request.prompt_tokens, self._vocabulary.vocab_size, longest)

    def _longest(self, request: Submit) -> int:
        """Tokens, prompt and output together, that a request may come to."""
        return min(self.max_context_tokens, longest_context(self.residents.bands, request.min_kv_dtype))

    def abort(self, request_id: str) -> None:
        """End a sequence now; its output with finish ``abort`` comes with the next step. Unknown ids are
        ignored: the sequence may have ended while the message travelled."""
        sequence = self.residents.get(request_id)
        if sequence is not None:
            self._ended.append(sequence.output(finish="abort"))
            self.residents.forget(sequence)

    def abort_all(self) -> None:
        """End every sequence."""
        for request_id in self.live_ids():
            self.abort(request_id)

    def live_ids(self) -> list[str]:
        """Request ids of all sequences, running first."""
        return [*self.residents.running, *self.residents.waiting, *self.residents.fetching]

    # Steps

    def step(self) -> StepOutput:
        """Plan and run one step. Returns what it produced and has not been given to ``emit``, with ends that happened
        since the last one."""
        started_s = self._clock()
        self.residents.settle_parked()
        self._tend_stores()
        self.pressure.relieve(started_s, self.knobs, self._rates(), self.costs.model)
        plan = self._policy.plan(self._scheduler_state(started_s))
        outputs, self._ended = self._ended, []
        self.applier.apply(
            plan, started_s, self.costs.model, self._rates, outputs, chunk_tokens=self.knobs.max_prefill_tokens
        )
        self.forward.begin_step()
        self.forward.decode(plan, outputs)
        self.forward.prefill(plan, outputs, before_pass=lambda: self._emit(outputs), cut=self.cut)
        ended_s = self._clock()
        self.costs.end(ended_s)
        self._shares.charge_parts(self.forward.parts, ended_s)
        if self.forward.parts:
            besides_s = ended_s - started_s - sum([part.took_s for part in self.forward.parts])
            self._overhead_s += OVERHEAD_MEMORY * (max(0.0, besides_s) - self._overhead_s)
        self.pause_s = self._pause_s(plan)
        self._last_plan, self._last_step_s = plan, ended_s - started_s
        return StepOutput(outputs, ended_s, self.load() if self._report.due(ended_s) else None)

    def _tend_stores(self) -> None:
        """Between steps: take in what was stored, save what has ended."""
        residents = self.residents
        if residents.tiering is None:
            return
        residents.tiering.tiers.advance()
        residents.settle_fetched(self._rates())
        if residents.prefix.enabled:
            residents.tiering.save_due(
                residents.reuse,
                residents.context,
                self._source_times(),
                idle=not residents.running and not residents.waiting,
                last_step_s=self._last_step_s,
            )

    @property
    def chores(self) -> Chores:
        """What there is to do while nothing runs: ``now`` something to save, ``soon`` something that a worker does."""
        residents = self.residents
        if residents.tiering is None:
            return None
        if residents.prefix.enabled and residents.reuse.unsaved():
            return "now"
        return "soon" if residents.tiering.tiers.working else None

    def do_chores(self) -> StepOutput | None:
        """One piece of it. An output with the engine's load when it was the last."""
        self._tend_stores()
        return None if self.chores is not None else StepOutput([], self._clock(), self.load())

    def _emit(self, outputs: list[SequenceOutput]) -> None:
        if self.emit is not None and outputs:
            self.emit(StepOutput(outputs.copy(), self._clock()))
            outputs.clear()

    @staticmethod
    def _pause_s(plan: StepPlan) -> float:
        if not plan.empty:
            return 0.0
        if plan.wait_s is not None:
            return plan.wait_s
        # What has just been given a stream can be computed at once.
        return 0.0 if plan.admissions or plan.promotions else EMPTY_PAUSE_S

    def _scheduler_state(self, now_s: float) -> SchedulerState:
        residents = self.residents
        residents.note_cached()
        residents.queue.refresh(now_s)
        sizes = self._batch_sizes(now_s)
        return SchedulerState(
            now_s=now_s,
            bands=residents.bands,
            free_streams=tuple([residents.slots.free_count(b) for b in range(len(residents.bands))]),
            waiting=residents.queue,
            running=[s.state for s in residents.running.values()],
            knobs=self.knobs,
            times=self.costs.model,
            fused=False,
            lane_shares=self._shares.shares(now_s),
            urgent_seen_s=residents.urgent_seen_s(now_s),
            traffic=self._traffic.view(),
            batch_cap=sizes.knee,
            crowd=sizes.crowd,
            strategy=self._last_plan.strategy,
            memory=self.pressure.limits(self.knobs),
        )

    def _batch_sizes(self, now_s: float) -> BatchSizes:
        """Looked for twice a second."""
        if now_s - self._sizes_s >= SIZES_INTERVAL_S and self.costs.known:
            self._sizes_s = now_s
            most = max([band.max_sequences for band in self.residents.bands])
            running = self.residents.running.values()
            context_tokens = sum([s.state.computed_tokens for s in running]) / max(1, len(running))
            self._sizes = batch_sizes(
                self.costs.model,
                most,
                self.knobs.knee_gain,
                context_tokens=context_tokens,
                overhead_s=self._overhead_s,
            )
        return self._sizes

    def _source_times(self) -> SourceTimes:
        return self.residents.reuse.times(self.costs.model, self.knobs.max_prefill_tokens)

    def _rates(self) -> ServiceRates:
        times, cap = self.costs.model, max(1, self._sizes.knee)
        return ServiceRates(times.call_s(256) / 256, times.call_s(cap) / cap, times.call_s(1))

    def cut_saves(self, submit: Submit, now_s: float) -> bool:
        """True when the prefill pass under way should be cut for ``submit``, which has not been taken in yet."""
        running = self.forward.running_pass
        if running is None or submit.deadline_s is None:
            return False
        arrival = ArrivalFacts(submit.deadline_s, submit.priority, self._has_room(submit))
        return saves_deadline(arrival, now_s, running, self._first_token_s(submit))

    def _has_room(self, submit: Submit) -> bool:
        """Whether a stream is free for it, or held by something less urgent."""
        prompt = len(submit.prompt_tokens)
        expected = UNKNOWN_OUTPUT_TOKENS if submit.max_tokens is None else submit.max_tokens
        margin = self.knobs.band_margin_tokens
        band = first_band(prompt, prompt + expected, self.residents.bands, margin, submit.min_kv_dtype)
        if band is None:
            return False
        return self.residents.slots.free_count(band) > 0 or any(
            s.state.priority > submit.priority and s.state.slot is not None and s.state.slot.band == band
            for s in self.residents.running.values()
        )

    def _first_token_s(self, submit: Submit) -> float:
        """Predicted time to its first token when its chunks come next, decodes before each, with what the engine holds
        of its prompt now. One look-up for each 128 tokens of it, once an arrival."""
        return first_token_s(
            len(submit.prompt_tokens),
            self.residents.cached_tokens(submit),
            self.costs.model,
            chunk_tokens=min(self.knobs.max_prefill_tokens, self.knobs.step_tokens),
            decode_s=self.forward.decode_s,
        )

    # Accounts

    def load(self) -> EngineLoad:
        """How full the engine is right now, and what its last step was."""
        self.pressure.look(self.knobs, self._rates(), self.costs.model)
        load = self._report.load(self._last_plan, self._last_step_s, self.costs, self.knobs, self._sizes.knee)
        return msgspec.structs.replace(load, lane_shares=self._shares.shares(self._clock()))

    def band_plans(self) -> list[BandPlan]:
        """Every band with its KV bytes and whether its context exists."""
        return self.residents.band_plans()

    def kv_account(self) -> KvAccount:
        """Where all KV is, who uses it, and what it costs to bring back."""
        reuse = self.residents.reuse
        times = SourceTimes(self.costs.model, reuse.carry_time.s_per_token, self.knobs.max_prefill_tokens)
        return kv_account(self.residents, times, self._token_bytes)

    def check_integrity(self) -> str | None:
        """None when slots, sequences, parked KV, libllama's own counts and the account of all KV agree; else what is
        wrong."""
        return self.residents.check_integrity() or self.kv_account().check_integrity(
            kv_limits(self.residents, self._token_bytes)
        )

    def close(self) -> None:
        """Free contexts and samplers. Sequences must have been ended before."""
        self.residents.close()
