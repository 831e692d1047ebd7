"""Calibrating the embedded engine: its core is given chosen work, and each forward pass is timed where it happens.

Decodes in batches of every size in use, over short, middle and long contexts; prompt chunks of every size in use,
early and late in a prompt. The core runs as it does when serving (placing, sampling, text), with a policy that asks
for exactly this work.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.engines.llama.core import EngineCore
from headrace.errors import EngineError
from headrace.messages.engine import SamplingParams, Submit
from headrace.scheduling.bands import Band
from headrace.scheduling.cost import Call, CostModel
from headrace.scheduling.step import Admission, PrefillChunk, SchedulerState, StepPlan
from headrace.simulate.calibrate.fit import MeasuredPass

_SHARES_OF_CONTEXT = (0.02, 0.3, 0.8)
_SMALLEST_CHUNK = 16
_KEPT_FREE_TOKENS = 64
"""Of a stream: for the decodes that follow."""


class _Watched(CostModel):
    """Notes every pass."""

    def __init__(self, model: CostModel, note: Callable[[Call, float], None]) -> None:
        super().__init__(model.prior)
        self._note = note

    def learn(self, calls: Sequence[Call], took_s: float) -> None:
        """Also what is computed one after the other, as a whole: with one thread small batches may be."""
        rows, context, pairs = (
            sum(values) for values in zip(*[(c.rows, c.context_tokens, c.pairs) for c in calls], strict=True)
        )
        self._note(Call(rows, context, pairs), took_s)


@dataclass
class _Wanted:
    """A policy that plans what it is told."""

    band: int = 0
    chunk_tokens: int = 512
    fill_to: dict[str, int] = field(default_factory=dict)
    skip: dict[str, int] = field(default_factory=dict)
    """Up to here a prompt is computed in chunks as large as may be."""
    most_tokens: int = 512
    decode: bool = False

    def plan(self, state: SchedulerState) -> StepPlan:
        waiting = [sequence for sequence in state.waiting if sequence.request_id in self.fill_to]
        if waiting:
            return StepPlan(admissions=tuple([Admission(sequence.request_id, self.band) for sequence in waiting]))
        for sequence in state.running:
            left = self.fill_to[sequence.request_id] - sequence.computed_tokens
            if sequence.pending_tokens > 0 and not sequence.decoding and left > 0:
                early = self.skip.get(sequence.request_id, 0) - sequence.computed_tokens
                size = min(early, self.most_tokens) if early > 0 else self.chunk_tokens
                return StepPlan(prefill=(PrefillChunk(sequence.request_id, min(left, size)),))
        if not self.decode:
            return StepPlan(wait_s=0.0)
        return StepPlan(decode=tuple([sequence.request_id for sequence in state.running if sequence.decoding]))


@dataclass(frozen=True, slots=True)
class EngineMeasured:
    """Passes of both kinds, and the median of what a step takes besides its pass."""

    decodes: list[MeasuredPass]
    prompts: list[MeasuredPass]
    overhead_s: float
    copy_s_per_token: float


def measure_engine(
    core: EngineCore,
    *,
    vocab_size: int,
    most_s: float,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[str], None] = lambda text: None,
) -> EngineMeasured:
    """Measure every band until done or ``most_s`` have passed (then what was measured so far, at least one of each).
    Raises EngineError when sequences fail."""
    wanted = _Wanted(chunk_tokens=core.knobs.step_tokens, most_tokens=core.knobs.step_tokens)
    core.set_policy(wanted)
    seen: list[tuple[Call, float]] = []
    core.costs.model = _Watched(core.costs.model, lambda call, took_s: seen.append((call, took_s)))
    session = _Session(core, wanted, vocab_size, seen, clock)
    until_s = clock() + most_s
    for place, band in enumerate(core.residents.bands):
        wanted.band = place
        for chunk_tokens in chunk_sizes_for(band, core.knobs.step_tokens):
            if clock() > until_s and session.prompts:
                break
            progress(f"band {place + 1}: prompt chunks of {chunk_tokens} tokens")
            session.prompt(chunk_tokens, band, repeats)
    for place, band in enumerate(core.residents.bands):
        wanted.band = place
        for share in _SHARES_OF_CONTEXT:
            if clock() > until_s and session.decodes:
                break
            room = band.max_context_tokens - _KEPT_FREE_TOKENS
            depth = max(_SMALLEST_CHUNK, int(share * room) - (repeats + 1) * len(batch_sizes_for(band)))
            progress(f"band {place + 1}: up to {band.max_sequences} sequences of {depth} tokens")
            session.decode(batch_sizes_for(band), depth, repeats)
    return EngineMeasured(session.decodes, session.prompts, _median(session.besides_s), 0.0)


def batch_sizes_for(band: Band) -> list[int]:
    """Each small number, then ever larger ones, and all streams."""
    sizes = [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256]
    return sorted({*[size for size in sizes if size < band.max_sequences], band.max_sequences})


def chunk_sizes_for(band: Band, most_tokens: int) -> list[int]:
    """Powers of two and the numbers half-way between them, within a step and a stream."""
    most = min(most_tokens, band.max_context_tokens - _KEPT_FREE_TOKENS)
    sizes = [size for power in range(4, 12) for size in (1 << power, 3 << (power - 1))]
    return sorted({*[size for size in sizes if size < most], most})


class _Session:
    """Asks the core for work and sorts what came of it."""

    def __init__(
        self,
        core: EngineCore,
        wanted: _Wanted,
        vocab_size: int,
        seen: list[tuple[Call, float]],
        clock: Callable[[], float],
    ) -> None:
        self._core, self._wanted, self._vocab_size = core, wanted, vocab_size
        self._seen, self._clock = seen, clock
        self.decodes: list[MeasuredPass] = []
        self.prompts: list[MeasuredPass] = []
        self.besides_s: list[float] = []
        self._draw = random.Random(0)
        self._number = 0

    def decode(self, sizes: Sequence[int], depth: int, repeats: int) -> None:
        """As many sequences of ``depth`` tokens as the largest size has, decoded ``repeats`` times; then fewer and
        fewer of them, so that contexts are computed once."""
        names = [self._submit(depth, (repeats + 1) * len(sizes) + 2) for _ in range(sizes[-1])]
        self._fill(names, depth)
        self._wanted.decode = True
        for count in reversed(sizes):
            self._end(names[count:])
            names = names[:count]
            calls = [self._step() for _ in range(repeats + 1)][1:]  # the first one after a change is left out
            whole = [(call, took_s) for call, took_s in calls if call is not None and call.rows == count]
            if whole:
                # Contexts grow by a token a step: all count as the middle one, so that repetitions join.
                middle = whole[len(whole) // 2][0].context_tokens
                self.decodes += [MeasuredPass(count, middle, took_s) for _, took_s in whole]
        self._wanted.decode = False
        self._end(names)

    def prompt(self, chunk_tokens: int, band: Band, repeats: int) -> None:
        """One prompt as long as the band holds, in chunks of this size; often, where there are few of them."""
        whole = band.max_context_tokens - _KEPT_FREE_TOKENS
        depth = min(whole // chunk_tokens, 12) * chunk_tokens
        for turn in range(max(1, repeats * chunk_tokens // depth)):
            # Early in a prompt and, every second time, late: in between, chunks as large as may be.
            early_tokens = (whole - depth) // self._core.knobs.step_tokens * self._core.knobs.step_tokens
            self._wanted.chunk_tokens = chunk_tokens
            start_tokens = early_tokens if turn % 2 else 0
            name = self._submit(start_tokens + depth, 2)
            self._wanted.skip[name] = start_tokens
            self._fill([name], start_tokens + depth)
            self._end([name])
        self._wanted.chunk_tokens = self._core.knobs.step_tokens

    def _submit(self, tokens: int, more: int) -> str:
        self._number += 1
        name = f"calibrate-{self._number}"
        low = min(300, self._vocab_size // 2)
        self._wanted.fill_to[name] = tokens
        self._core.submit(
            Submit(
                request_id=name,
                prompt_tokens=[self._draw.randrange(low, self._vocab_size) for _ in range(tokens)],
                sampling=SamplingParams(temperature=0, ignore_eos=True),
                lane="calibrate",
                priority=0,
                max_tokens=more + 1,
                arrived_s=self._core.now_s(),
            )
        )
        return name

    def _fill(self, names: Sequence[str], depth: int) -> None:
        """Compute their prompts, and keep what the passes over whole chunks took."""
        while any(not self._filled(name, depth) for name in names):
            call, took_s = self._step()
            # Only whole chunks: the odd rest of a prompt comes too seldom to be a point of the curve.
            if call is not None and call.pairs and call.rows == self._wanted.chunk_tokens:
                self.prompts.append(MeasuredPass(call.rows, call.pairs, took_s))

    def _filled(self, name: str, depth: int) -> bool:
        sequence = self._core.residents.get(name)
        if sequence is None:
            raise EngineError(f"the sequence {name} of the calibration has ended early")
        return sequence.state.slot is not None and sequence.state.computed_tokens >= depth

    def _step(self) -> tuple[Call | None, float]:
        self._seen.clear()
        self._core.costs.forget_pause()
        started_s = self._clock()
        output = self._core.step()
        step_s = self._clock() - started_s
        failed = [one.error for one in output.outputs if one.finish == "error"]
        if failed:
            raise EngineError(f"the calibration failed: {failed[0]}")
        if not self._seen:
            return None, 0.0
        call = Call(
            *[sum(values) for values in zip(*[(c.rows, c.context_tokens, c.pairs) for c, _ in self._seen], strict=True)]
        )
        took_s = sum([taken_s for _, taken_s in self._seen])
        self.besides_s.append(max(0.0, step_s - took_s))
        return call, took_s

    def _end(self, names: Sequence[str]) -> None:
        for name in names:
            self._core.abort(name)
            del self._wanted.fill_to[name]
            self._wanted.skip.pop(name, None)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _together(calls: Sequence[Call]) -> Call:
    return Call(
        sum([call.rows for call in calls]),
        sum([call.context_tokens for call in calls]),
        sum([call.pairs for call in calls]),
    )
