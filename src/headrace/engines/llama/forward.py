"""The forward passes of a step: batches, padding rows, sampling.

Decodes come first, then prefill chunks in the plan's order, each pass a ``llama_decode`` call of its own: its outputs
are there before the next one begins, its time is known, and a prefill pass can be cut without touching the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from headrace.engines.llama.context import Context
from headrace.engines.llama.live import LiveSequence
from headrace.engines.llama.residents import Residents
from headrace.engines.llama.sampling import log_probability
from headrace.engines.llama.step_costs import StepCosts
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.errors import EngineError
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from headrace.messages.engine import SequenceOutput, TokenLogprob
from headrace.scheduling.cost import prefill_pairs
from headrace.scheduling.cut import RunningPass
from headrace.scheduling.runs import Run, decode_runs, prefill_groups, trial_runs, widening
from headrace.scheduling.sequence import Slot
from headrace.scheduling.shares import Part
from headrace.scheduling.step import StepPlan

RUNS_KEPT_STEPS = 16
"""For so many steps the choice between padding and splitting stands while the same streams decode."""

TRIAL_EVERY = 8
TRIAL_STEPS = 6
TRIAL_AT_MOST = 1.6
"""Of so many choices one is the way with the fewest passes, for some steps, if it is predicted to take at most so many
times as long as the best: the cost model learns from it (see ``trial_runs``). Several steps, because the model takes a
single surprise for an outlier. Where the prediction was right, that is 3 % of the decode time at the most."""

WIDENING_TRIAL_EVERY = 64
"""One in so many batches of an odd size is widened to learn what that costs."""


@dataclass(slots=True)
class _KeptRuns:
    """The runs chosen for a band's decoding streams."""

    streams: tuple[int, ...]
    runs: tuple[Run, ...]
    steps_left: int


@dataclass(frozen=True, slots=True)
class _PrefillPass:
    """Chunks, (stream, sequence, tokens), of one prefill pass in ``band``; ``place`` is its most urgent chunk's in the
    plan."""

    place: int
    band: int
    chunks: tuple[tuple[int, LiveSequence, int], ...]


class Forward:
    """Runs the passes of plans. ``parts`` and the token counts are the last step's."""

    def __init__(
        self, residents: Residents, vocabulary: Vocabulary, costs: StepCosts, clock: Callable[[], float], threads: int
    ) -> None:
        self._residents = residents
        self._vocabulary = vocabulary
        self._costs = costs
        self._clock = clock
        self._end_tokens = vocabulary.end_tokens()
        self._kept: dict[int, _KeptRuns] = {}
        self._choices = 0
        self._widenings = 0
        self.threads = threads
        self.one_by_one_limit = 1
        self.cut_steps = 0
        self.running_pass: RunningPass | None = None
        """The prefill pass under way or about to begin, while ``cut`` may be asked about it."""
        self.parts: list[Part] = []
        self.decode_s = 0.0
        self.decode_tokens = 0
        self.prefill_tokens = 0

    def begin_step(self) -> None:
        """Forget the last step's counts."""
        self.parts.clear()
        self.decode_s = 0.0
        self.decode_tokens = self.prefill_tokens = 0

    def forget_runs(self) -> None:
        """Choose anew between padding and splitting at the next decode."""
        self._kept.clear()

    # Decodes

    def decode(self, plan: StepPlan, outputs: list[SequenceOutput]) -> None:
        """One token for each sequence in ``plan.decode``, as few passes a band as pay."""
        work: dict[int, dict[int, LiveSequence]] = {}
        running = self._residents.running
        for request_id in plan.decode:
            sequence = running.get(request_id)
            if sequence is None:
                continue  # failed while the plan was being applied
            slot = sequence.state.slot
            assert slot is not None
            work.setdefault(slot.band, {})[slot.stream] = sequence
        for band, by_stream in work.items():
            started_s = self._clock()
            self._decode_band(band, by_stream, outputs)
            took_s = self._clock() - started_s
            self.decode_s += took_s
            rows_by_lane: dict[str, int] = {}
            for sequence in by_stream.values():
                lane = sequence.state.lane
                rows_by_lane[lane] = rows_by_lane.get(lane, 0) + 1
            self.parts.append(Part(rows_by_lane, took_s))
            self.decode_tokens += len(by_stream)

    def _decode_band(self, band: int, by_stream: dict[int, LiveSequence], outputs: list[SequenceOutput]) -> None:
        try:
            context = self._residents.context(band)
        except EngineError as error:
            self._residents.fail(list(by_stream.values()), error, outputs)
            return
        context.set_threads(self.threads)
        for run in self._runs(band, context, by_stream):
            try:
                self._decode_run(band, context, run, by_stream, outputs)
            except EngineError as error:
                self._residents.fail([by_stream[stream] for stream in run.streams], error, outputs)

    def _runs(self, band: int, context: Context, by_stream: Mapping[int, LiveSequence]) -> tuple[Run, ...]:
        streams = tuple(sorted(by_stream))
        if self.threads == 1 and 1 < len(streams) <= self.one_by_one_limit:
            return tuple([Run((stream,)) for stream in streams])
        if context.band.pooled:  # to libllama one stream: there are no holes between rows
            most = context.micro_batch_tokens
            return tuple([Run(streams[start : start + most]) for start in range(0, len(streams), most)])
        if streams[-1] - streams[0] + 1 == len(streams) <= context.micro_batch_tokens:
            return (self._widened(band, context, Run(streams), by_stream),)
        kept = self._kept.get(band)
        idle = self._idle_streams(band, context, streams)
        if (
            kept is not None
            and kept.streams == streams
            and kept.steps_left > 0
            and all([stream in idle for run in kept.runs for stream in run.padding])
        ):
            kept.steps_left -= 1
            return kept.runs
        contexts = {stream: by_stream[stream].state.computed_tokens for stream in streams}
        times, most_rows = self._costs.model, context.micro_batch_tokens
        runs = decode_runs(contexts, idle, times, most_rows=most_rows)
        keep_steps = RUNS_KEPT_STEPS
        self._choices += 1
        if self._choices % TRIAL_EVERY == 2:
            runs = trial_runs(runs, contexts, idle, times, most_rows=most_rows, at_most=TRIAL_AT_MOST)
            keep_steps = TRIAL_STEPS - 1
        if len(runs) == 1:
            runs = (self._widened(band, context, runs[0], by_stream),)
        self._kept[band] = _KeptRuns(streams, runs, keep_steps)
        return runs

    def _widened(self, band: int, context: Context, run: Run, by_stream: Mapping[int, LiveSequence]) -> Run:
        """The run with up to three idle streams after it, where more rows are predicted to take less time, or tried
        now and then to learn whether they do."""
        wider = widening(run, context.band.max_sequences)
        if not wider:
            return run
        held = [self._padding_cells(Slot(band, stream), context) for stream in wider]
        cells = sum([by_stream[stream].state.computed_tokens for stream in run.streams])
        extra = sum([tokens for tokens in held if tokens is not None])
        if None in held or extra > cells:
            return run
        self._widenings += 1
        rows, call_s = len(run.streams) + len(run.padding), self._costs.model.call_s
        if self._widenings % WIDENING_TRIAL_EVERY and call_s(rows + len(wider), cells + extra) >= call_s(rows, cells):
            return run
        return Run(run.streams, (*run.padding, *wider))

    def _idle_streams(self, band: int, context: Context, streams: tuple[int, ...]) -> dict[int, int]:
        """Streams between the decoding ones that can take a padding row, with the cells they hold."""
        idle: dict[int, int] = {}
        decoding = frozenset(streams)
        for stream in range(streams[0] + 1, streams[-1]):
            held = None if stream in decoding else self._padding_cells(Slot(band, stream), context)
            if held is not None:
                idle[stream] = held
        return idle

    def _padding_cells(self, slot: Slot, context: Context) -> int | None:
        """The KV cells of a stream that can take a padding row; None when it cannot."""
        owner = self._residents.slots.owner(slot)
        if owner is None:
            held = self._residents.reuse.tokens(slot)
        else:
            held = self._residents.running[owner].state.computed_tokens
        if (owner is None and not held) or (context.can_remove_last and held < context.band.max_context_tokens):
            return held
        return None

    def _take_back(self, context: Context, band: int, stream: int, position: int) -> None:
        """Remove a padding row. Where libllama cannot, its owner's tokens are computed again, what an ended sequence
        left is given up, and no stream that holds anything is padded any more."""
        if context.take_back(stream, position):
            return
        residents, slot = self._residents, Slot(band, stream)
        residents.cannot_truncate(context)
        context.clear_stream(stream)
        owner = residents.slots.owner(slot)
        if owner is None:
            residents.reuse.cleared(slot)
        else:
            residents.reuse.restarted(slot)
            residents.running[owner].state.computed_tokens = 0

    def _decode_run(
        self,
        band: int,
        context: Context,
        run: Run,
        by_stream: Mapping[int, LiveSequence],
        outputs: list[SequenceOutput],
    ) -> None:
        started_s = self._clock()
        batch = context.batch
        batch.clear()
        entries: list[tuple[LiveSequence, int]] = []
        context_tokens = 0
        padded: list[tuple[int, int]] = []
        for stream in sorted((*run.streams, *run.padding)) if run.padding else run.streams:
            sequence = by_stream.get(stream)
            if sequence is None:
                position = context.stream_tokens(stream)
                batch.add_padding(position, stream)
                padded.append((stream, position))
            else:
                position = sequence.state.computed_tokens
                entries.append((sequence, batch.add_one(sequence.tokens[position], position, stream)))
            context_tokens += position
        try:
            context.decode()
        finally:
            for stream, position in padded:
                self._take_back(context, band, stream, position)
        for sequence, index in entries:
            sequence.state.computed_tokens += 1
            if sequence.state.computed_tokens % KV_BLOCK_TOKENS == 0:
                self._residents.account(sequence)
            if sequence.state.pending_tokens == 0:  # else its KV was lost on the way: its tokens come again
                self._sample(context, sequence, index, outputs)
        self._costs.add(batch.size, context_tokens, 0, self._clock() - started_s)

    # Prefill

    def prefill(
        self,
        plan: StepPlan,
        outputs: list[SequenceOutput],
        *,
        before_pass: Callable[[], None],
        cut: Callable[[], bool] | None,
    ) -> None:
        """The plan's chunks, most urgent first. ``before_pass`` is called before each pass. When ``cut`` says True,
        before or during a pass, the rest of the plan is left to the next step.

        A chunk is cut or put off once: the pass that computes it next is not asked about. So no more than half of
        the time spent on prefill is lost to cuts, and every chunk is computed by the second pass that holds it.
        """
        for planned in self._prefill_passes(plan, outputs):
            # Without those that an earlier pass of this step ended with an error.
            chunks = tuple([chunk for chunk in planned.chunks if chunk[1].state.slot is not None])
            if not chunks:
                continue
            prefill_pass = replace(planned, chunks=chunks)
            sequences = [sequence for _, sequence, _ in chunks]
            asked = None if cut is None or any([sequence.was_cut for sequence in sequences]) else cut
            before_pass()
            try:
                completed = self._prefill_pass(prefill_pass, outputs, asked)
            except EngineError as error:
                self._residents.fail(sequences, error, outputs)
                continue
            finally:
                self.running_pass = None
            if not completed:
                self.cut_steps += 1
            for sequence in sequences:
                sequence.was_cut = not completed
            if not completed:
                return

    def _prefill_passes(self, plan: StepPlan, outputs: list[SequenceOutput]) -> list[_PrefillPass]:
        work: dict[int, dict[int, tuple[int, LiveSequence, int]]] = {}
        for place, chunk in enumerate(plan.prefill):
            sequence = self._residents.running.get(chunk.request_id)
            if sequence is None:
                continue  # failed while the plan was being applied
            slot = sequence.state.slot
            assert slot is not None
            # A parked sequence whose KV was refused may be longer than its band; the rest follows its promotion.
            room = self._residents.bands[slot.band].max_context_tokens - sequence.state.computed_tokens
            # Less is pending than planned where more of the prompt was there than the plan knew.
            tokens = min(chunk.tokens, room, sequence.state.pending_tokens)
            work.setdefault(slot.band, {})[slot.stream] = (place, sequence, tokens)
        passes: list[_PrefillPass] = []
        for band, by_stream in work.items():
            try:
                context = self._residents.context(band)
            except EngineError as error:
                self._residents.fail([sequence for _, sequence, _ in by_stream.values()], error, outputs)
                continue
            context.set_threads(self.threads)
            chunks = [(stream, by_stream[stream][2]) for stream in sorted(by_stream)]
            for group in prefill_groups(chunks, context.micro_batch_tokens):
                places = min([by_stream[stream][0] for stream, _ in group])
                members = tuple([(stream, by_stream[stream][1], tokens) for stream, tokens in group])
                passes.append(_PrefillPass(places, band, members))
        passes.sort(key=lambda item: item.place)  # stable: passes over one sequence stay in order
        return passes

    def _prefill_pass(
        self, prefill_pass: _PrefillPass, outputs: list[SequenceOutput], cut: Callable[[], bool] | None
    ) -> bool:
        """False when ``cut`` ended it or kept it from beginning."""
        started_s = self._clock()
        context = self._residents.context(prefill_pass.band)
        batch = context.batch
        batch.clear()
        last_index: list[int] = []
        pairs = 0
        for stream, sequence, count in prefill_pass.chunks:
            position = sequence.state.computed_tokens
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
        if cut is not None:
            self.running_pass = self._facts(prefill_pass, started_s + self._costs.model.call_s(batch.size, 0, pairs))
            if cut():
                return False
        if not context.decode(cut):
            return False
        rows_by_lane: dict[str, int] = {}
        for (_, sequence, count), index in zip(prefill_pass.chunks, last_index, strict=True):
            rows_by_lane[sequence.state.lane] = rows_by_lane.get(sequence.state.lane, 0) + count
            if sequence.request.sampling.prompt_logprobs is not None:
                self._note_prompt_logprobs(context, sequence, count, index)
            sequence.state.computed_tokens += count
            self._residents.account(sequence)
            if sequence.state.pending_tokens == 0:
                self._sample(context, sequence, index, outputs)
        took_s = self._clock() - started_s
        self._costs.add(batch.size, 0, pairs, took_s)
        self.parts.append(Part(rows_by_lane, took_s))
        self.prefill_tokens += batch.size
        return True

    @staticmethod
    def _facts(prefill_pass: _PrefillPass, ends_s: float) -> RunningPass:
        states = [sequence.state for _, sequence, _ in prefill_pass.chunks]
        due = [s.deadline_s for s in states if s.deadline_s is not None and s.first_token_s is None]
        return RunningPass(ends_s, min([s.priority for s in states]), min(due, default=None))

    # Sampling

    def _note_prompt_logprobs(self, context: Context, sequence: LiveSequence, count: int, last_index: int) -> None:
        """Log-probabilities of the prompt tokens that this chunk's logits predict, once for each."""
        state, wanted = sequence.state, sequence.request.sampling.prompt_logprobs or 0
        token_bytes = self._vocabulary.token_bytes
        if not sequence.prompt_logprobs:
            first = sequence.tokens[0]
            sequence.prompt_logprobs.append(TokenLogprob(first, token_bytes(first), None, []))
        for offset in range(count):
            predicted = state.computed_tokens + offset + 1
            # Tokens that are computed again (their KV was lost on the way) were noted the first time.
            if len(sequence.prompt_logprobs) <= predicted < state.prompt_tokens:
                logits = context.logits(last_index - count + 1 + offset)
                sequence.prompt_logprobs.append(
                    log_probability(logits, sequence.tokens[predicted], wanted, token_bytes)
                )

    def _sample(self, context: Context, sequence: LiveSequence, index: int, outputs: list[SequenceOutput]) -> None:
        state = sequence.state
        if state.known_tokens >= state.limit_tokens:
            output = sequence.output(finish="length")  # max_tokens 0: only the prompt was wanted
        else:
            logits = context.logits(index)
            token = sequence.sampler.choose(context.handle, index, logits)
            output = sequence.accept(token, logits, self._vocabulary, self._end_tokens)
            state.note_token(self._clock())
        outputs.append(output)
        if output.finish is not None:
            self._residents.forget(sequence)
