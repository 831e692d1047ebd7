"""The engine's heart: takes sequences in, runs one planned step at a time, gives outputs back.

No socket, no process, no signal: ``process`` owns those, so that tests drive a core directly. The policy
decides (``scheduling.step``); this module applies the plan and keeps the accounts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace.engines.llama.context import Context
from headrace.engines.llama.live import LiveSequence, prompt_problem
from headrace.engines.llama.sampling import log_probability
from headrace.engines.llama.step_costs import StepCosts
from headrace.engines.llama.stream_state import retarget
from headrace.errors import EngineError
from headrace.messages.engine import BandPlan, EngineLoad, SequenceOutput, StepOutput, Submit, TokenLogprob
from headrace.scheduling.cost import CostModel, prefill_pairs
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.slots import SlotTable
from headrace.scheduling.step import SchedulerState, StepPlan, StepPolicy

if TYPE_CHECKING:
    from headrace.engines.llama.library import Library
    from headrace.engines.llama.vocabulary import Vocabulary
    from headrace.engines.llama.weights import Weights
    from headrace.kv.budget import BandBudget

LOAD_REPORT_INTERVAL_S = 0.05


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._library = library
        self._weights = weights
        self._vocabulary = vocabulary
        self._budget = budget
        self._policy = policy
        self._clock = clock
        self.knobs = knobs
        self._threads = threads
        self._bands = budget.bands
        self._contexts: list[Context | None] = [None] * len(budget.bands)
        self._slots = SlotTable(budget.bands)
        self._waiting: dict[str, LiveSequence] = {}
        self._running: dict[str, LiveSequence] = {}
        self._ended: list[SequenceOutput] = []
        self._reported_counts = (-1, -1)
        self._reported_s = 0.0
        self._total_tokens = sum(band.max_context_tokens * band.max_sequences for band in budget.bands)
        self._end_tokens = vocabulary.end_tokens()
        self._step_tokens_capacity = knobs.step_tokens
        self.max_context_tokens = budget.bands[-1].max_context_tokens
        self.costs = StepCosts(CostModel())
        self.one_by_one_limit = 1
        """With one thread, up to this many decoding sequences are computed one by one (see ``measure``)."""

    @property
    def has_work(self) -> bool:
        """True when a step would compute or report something."""
        return bool(self._running or self._waiting or self._ended)

    @property
    def threads(self) -> int:
        """Threads that the next step computes with."""
        return self._threads

    def set_threads(self, threads: int) -> None:
        """Compute with ``threads`` threads from the next step on."""
        self._threads = threads

    def set_knobs(self, knobs: SchedulingKnobs) -> None:
        """New live values, cut to what the contexts were created for."""
        self.knobs = msgspec.structs.replace(knobs, step_tokens=min(knobs.step_tokens, self._step_tokens_capacity))

    def context(self, band: int) -> Context:
        """The context of a band, created on first use. Raises EngineError when memory does not suffice."""
        existing = self._contexts[band]
        if existing is None:
            existing = Context(
                self._library,
                self._weights,
                self._bands[band],
                step_tokens=self._step_tokens_capacity,
                threads=self._threads,
            )
            self._contexts[band] = existing
        return existing

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
        self._waiting[request.request_id] = LiveSequence.start(
            request, self._library, self._vocabulary, max_context_tokens=self.max_context_tokens
        )

    def _refusal(self, request: Submit) -> str | None:
        if request.request_id in self._waiting or request.request_id in self._running:
            return f"request id {request.request_id} is already live"
        return prompt_problem(request.prompt_tokens, self._vocabulary.vocab_size, self.max_context_tokens)

    def abort(self, request_id: str) -> None:
        """End a sequence now; its output with finish ``abort`` comes with the next step. Unknown ids are
        ignored: the sequence may have ended while the message travelled."""
        sequence = self._waiting.get(request_id) or self._running.get(request_id)
        if sequence is not None:
            self._ended.append(sequence.output(finish="abort"))
            self._forget(sequence)

    def abort_all(self) -> None:
        """End every sequence."""
        for request_id in [*self._waiting, *self._running]:
            self.abort(request_id)

    def step(self) -> StepOutput:
        """Plan and run one step. Returns what it produced, with ends that happened since the last one."""
        started_s = self._clock()
        plan = self._policy.plan(self._scheduler_state(started_s))
        outputs, self._ended = self._ended, []
        self._apply_moves(plan, started_s, outputs)
        computed_s = self._clock()
        self._compute(plan, outputs)
        ended_s = self._clock()
        self.costs.end(computed_s, ended_s)
        return StepOutput(outputs, ended_s, self._changed_load(plan, started_s, ended_s))

    def _changed_load(self, plan: StepPlan, started_s: float, ended_s: float) -> EngineLoad | None:
        """A load report when sequences came or went, or the last one is old; None else, to keep steps short."""
        counts = (len(self._running), len(self._waiting))
        if counts == self._reported_counts and ended_s - self._reported_s < LOAD_REPORT_INTERVAL_S:
            return None
        self._reported_counts, self._reported_s = counts, ended_s
        return self._load(plan, ended_s - started_s)

    def _scheduler_state(self, now_s: float) -> SchedulerState:
        return SchedulerState(
            now_s=now_s,
            bands=self._bands,
            free_streams=tuple([self._slots.free_count(b) for b in range(len(self._bands))]),
            waiting=[s.state for s in self._waiting.values()],
            running=[s.state for s in self._running.values()],
            knobs=self.knobs,
        )

    def _apply_moves(self, plan: StepPlan, now_s: float, outputs: list[SequenceOutput]) -> None:
        for admission in plan.admissions:
            sequence = self._waiting.pop(admission.request_id)
            sequence.state.slot = self._slots.take(admission.band, admission.request_id)
            sequence.queue_wait_s = max(0.0, now_s - sequence.request.arrived_s)
            self._running[admission.request_id] = sequence
        for promotion in plan.promotions:
            sequence = self._running[promotion.request_id]
            try:
                self._promote(sequence, promotion.band)
            except EngineError as error:
                self._fail([sequence], error, outputs)

    def _promote(self, sequence: LiveSequence, band: int) -> None:
        """Move a sequence to a longer band, with its KV where libllama lets it travel; where not, its tokens
        are computed again in the new band. Raises EngineError when the band's context cannot be created."""
        old = sequence.state.slot
        assert old is not None
        source, target = self.context(old.band), self.context(band)
        state = retarget(
            source.save_stream(old.stream),
            stream=old.stream,
            source_streams=source.band.max_sequences,
            target_streams=target.band.max_sequences,
            tokens=sequence.state.computed_tokens,
        )
        source.clear_stream(old.stream)
        self._slots.release(old, sequence.request_id)
        new = sequence.state.slot = self._slots.take(band, sequence.request_id)
        if state is None or not target.load_stream(new.stream, state):
            target.clear_stream(new.stream)
            sequence.state.computed_tokens = 0

    def _compute(self, plan: StepPlan, outputs: list[SequenceOutput]) -> None:
        """One forward pass per band that has work, then sampling."""
        work: dict[int, list[tuple[int, LiveSequence, int]]] = {}
        for request_id in plan.decode:
            self._add_work(work, request_id, 1)
        for chunk in plan.prefill:
            self._add_work(work, chunk.request_id, chunk.tokens)
        for band, items in work.items():
            items.sort(key=lambda item: item[0])
            try:
                context = self.context(band)
            except EngineError as error:
                self._fail([sequence for _, sequence, _ in items], error, outputs)
            else:
                self._compute_band(context, items, outputs)

    def _add_work(self, work: dict[int, list[tuple[int, LiveSequence, int]]], request_id: str, tokens: int) -> None:
        sequence = self._running.get(request_id)
        if sequence is None:
            return  # failed while the plan was being applied
        slot = sequence.state.slot
        assert slot is not None
        work.setdefault(slot.band, []).append((slot.stream, sequence, tokens))

    def _compute_band(
        self, context: Context, items: list[tuple[int, LiveSequence, int]], outputs: list[SequenceOutput]
    ) -> None:
        """A band's part of the step: one decode call, or several where small batches cost more than their
        sequences one by one."""
        context.set_threads(self._threads)
        if self._threads == 1 and 1 < sum([count == 1 for _, _, count in items]) <= self.one_by_one_limit:
            for item in items:
                if item[2] == 1:
                    self._try_call(context, [item], outputs)
            items = [item for item in items if item[2] > 1]
            if not items:
                return
        self._try_call(context, items, outputs)

    def _try_call(
        self, context: Context, items: list[tuple[int, LiveSequence, int]], outputs: list[SequenceOutput]
    ) -> None:
        """One decode call; when it fails, the sequences in it end, and no others."""
        try:
            self._call(context, items, outputs)
        except EngineError as error:
            self._fail([sequence for _, sequence, _ in items], error, outputs)

    def _call(
        self, context: Context, items: list[tuple[int, LiveSequence, int]], outputs: list[SequenceOutput]
    ) -> None:
        batch = context.batch
        batch.clear()
        last_index: list[int] = []
        context_tokens = pairs = 0
        for stream, sequence, count in items:
            position = sequence.state.computed_tokens
            if count == 1:
                context_tokens += position
                last_index.append(batch.add_one(sequence.tokens[position], position, stream))
                continue
            pairs += prefill_pairs(position, count)
            last_index.append(
                batch.add_chunk(
                    sequence.tokens[position : position + count],
                    position,
                    stream,
                    last_output=position + count == sequence.state.known_tokens,
                    all_outputs=sequence.request.sampling.prompt_logprobs is not None,
                )
            )
        self.costs.add(batch.size, context_tokens, pairs)
        context.decode()
        for (_, sequence, count), index in zip(items, last_index, strict=True):
            if sequence.request.sampling.prompt_logprobs is not None:
                self._note_prompt_logprobs(context, sequence, count, index)
            sequence.state.computed_tokens += count
            if sequence.state.pending_tokens == 0:
                self._sample(context, sequence, index, outputs)

    def _note_prompt_logprobs(self, context: Context, sequence: LiveSequence, count: int, last_index: int) -> None:
        """Log-probabilities of the prompt tokens that this chunk's logits predict."""
        state, wanted = sequence.state, sequence.request.sampling.prompt_logprobs or 0
        token_bytes = self._vocabulary.token_bytes
        if state.computed_tokens == 0:
            first = sequence.tokens[0]
            sequence.prompt_logprobs.append(TokenLogprob(first, token_bytes(first), None, []))
        for offset in range(count):
            predicted = state.computed_tokens + offset + 1
            if predicted < state.prompt_tokens:
                logits = context.logits(last_index - count + 1 + offset)
                sequence.prompt_logprobs.append(
                    log_probability(logits, sequence.tokens[predicted], wanted, token_bytes)
                )

    def _sample(self, context: Context, sequence: LiveSequence, index: int, outputs: list[SequenceOutput]) -> None:
        if sequence.state.known_tokens >= sequence.state.limit_tokens:
            output = sequence.output(finish="length")  # max_tokens 0: only the prompt was wanted
        else:
            logits = context.logits(index)
            token = sequence.sampler.choose(context.handle, index, logits)
            output = sequence.accept(token, logits, self._vocabulary, self._end_tokens)
        outputs.append(output)
        if output.finish is not None:
            self._forget(sequence)

    def _fail(self, sequences: list[LiveSequence], error: EngineError, outputs: list[SequenceOutput]) -> None:
        for sequence in sequences:
            if sequence.request_id in self._running:
                outputs.append(sequence.output(finish="error", error=str(error)))
                self._forget(sequence)

    def _forget(self, sequence: LiveSequence) -> None:
        """Give back everything a sequence holds."""
        self._waiting.pop(sequence.request_id, None)
        self._running.pop(sequence.request_id, None)
        slot = sequence.state.slot
        if slot is not None:
            context = self._contexts[slot.band]
            if context is not None:
                context.clear_stream(slot.stream)
            self._slots.release(slot, sequence.request_id)
            sequence.state.slot = None
        sequence.close()

    def _load(self, plan: StepPlan, step_s: float) -> EngineLoad:
        per_token = self._budget.bytes_per_token
        used = sum([s.state.computed_tokens for s in self._running.values()])
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_tokens=used,
            kv_total_tokens=self._total_tokens,
            kv_used_bytes=used * per_token,
            kv_total_bytes=self._total_tokens * per_token,
            waiting_prefill_tokens=sum([s.state.pending_tokens for s in self._waiting.values()]),
            step_s=step_s,
            decode_tokens=len(plan.decode),
            prefill_tokens=sum([c.tokens for c in plan.prefill]),
            threads=self._threads,
            step_error=self.costs.model.error,
        )

    def load(self) -> EngineLoad:
        """How full the engine is right now."""
        return self._load(StepPlan(), 0.0)

    def band_plans(self) -> list[BandPlan]:
        """Every band with its KV bytes and whether its context exists."""
        return [
            BandPlan(
                band.max_context_tokens,
                band.max_sequences,
                self._budget.band_bytes(index),
                existing is not None,
            )
            for index, (band, existing) in enumerate(zip(self._bands, self._contexts, strict=True))
        ]

    def live_ids(self) -> list[str]:
        """Request ids of all sequences, running first."""
        return [*self._running, *self._waiting]

    def check_integrity(self) -> str | None:
        """None when slots, sequences and libllama's own counts agree; else what is wrong."""
        problem = self._slots.check_integrity()
        if problem is not None:
            return problem
        owners = self._slots.owners()
        if len(owners) != len(self._running):
            return f"{len(owners)} streams are owned by {len(self._running)} running sequences"
        for sequence in self._running.values():
            slot = sequence.state.slot
            if slot is None or owners.get(slot) != sequence.request_id:
                return f"{sequence.request_id} runs in {slot}, which it does not own"
            context = self._contexts[slot.band]
            held = context.stream_tokens(slot.stream) if context is not None else 0
            if held != sequence.state.computed_tokens:
                return f"{sequence.request_id}: {sequence.state.computed_tokens} tokens computed, libllama holds {held}"
        for band, context in enumerate(self._contexts):
            if context is None:
                continue
            for stream in range(self._bands[band].max_sequences):
                if not any(s.band == band and s.stream == stream for s in owners) and context.stream_tokens(stream):
                    return f"stream {stream} of band {band} is free but not empty"
        return None

    def close(self) -> None:
        """Free contexts and samplers. Sequences must have been ended before."""
        for sequence in [*self._waiting.values(), *self._running.values()]:
            self._forget(sequence)
        for context in self._contexts:
            if context is not None:
                context.close()
