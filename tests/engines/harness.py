"""Driving an ``EngineCore`` step by step, and the yardstick: a plain loop over libllama."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.library import Library
from headrace.engines.llama.parking import Parking
from headrace.engines.llama.prefix import PREFIX_DEFAULT, PrefixRules
from headrace.engines.llama.tiering import Tiering
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.kv.budget import fit_bands
from headrace.messages.engine import FinishReason, SamplingParams, SequenceOutput, StepOutput, Submit, TokenLogprob
from headrace.scheduling.bands import Band
from headrace.scheduling.continuous import DecodeFirst
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.step import Move, SchedulerState, StepPlan, StepPolicy

LogProbs = npt.NDArray[np.float64]

GREEDY = SamplingParams(temperature=0.0)
THREADS = 1
"""The same for engine and reference, since libllama splits some sums over its threads; one, because two that
spin for each other make tests a hundred times slower while something else uses the machine."""
DEFAULT_LIMITS = SchedulingKnobs()
CROWD = 4
"""Sequences in the reference's batches where it computes one in company."""


@dataclass(frozen=True)
class Model:
    """A loaded GGUF."""

    library: Library
    weights: Weights
    vocabulary: Vocabulary

    def chat(self, question: str) -> list[int]:
        """Prompt tokens of a question, through the model's own chat template."""
        text = self.vocabulary.render_chat([{"role": "user", "content": question}])
        return self.vocabulary.encode(text, add_special=False, parse_special=True)

    def tokens(self, text: str) -> list[int]:
        """Plain text as tokens."""
        return self.vocabulary.encode(text, add_special=False, parse_special=False)

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens as text."""
        return self.vocabulary.decode(tokens)


@dataclass
class Result:
    """Everything that came out for one request."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    outputs: list[SequenceOutput] = field(default_factory=list)

    def add(self, output: SequenceOutput) -> None:
        """Take one more output in; nothing may come after the one with ``finish``."""
        assert self.finish is None, f"{output} after {self.finish}"
        self.outputs.append(output)
        self.text += output.text
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt log-probabilities come once"
            self.prompt_logprobs = output.prompt_logprobs
        self.finish, self.stop_reason, self.error = output.finish, output.stop_reason, output.error


class Results(dict[str, Result]):
    """Results by request id, filled from step outputs."""

    def take(self, step: StepOutput) -> None:
        for output in step.outputs:
            self.setdefault(output.request_id, Result()).add(output)


@contextlib.contextmanager
def engine_core(
    model: Model,
    *bands: Band,
    limits: SchedulingKnobs = DEFAULT_LIMITS,
    threads: int = THREADS,
    policy: StepPolicy | None = None,
    prefix: PrefixRules = PREFIX_DEFAULT,
    tiering: Tiering | None = None,
    parking: Parking | None = None,
) -> Iterator[EngineCore]:
    """A core over ``bands``, closed at the end."""
    budget = fit_bands(bands, model.weights.kv_bytes_per_token(), 1 << 34, 1 << 20)
    core = EngineCore(
        model.library,
        model.weights,
        model.vocabulary,
        budget,
        policy or DecodeFirst(),
        knobs=limits,
        threads=threads,
        prefix=prefix,
        tiering=tiering,
        parking=parking,
    )
    try:
        yield core
    finally:
        core.close()


class Amended:
    """``DecodeFirst``, whose every plan a test may change: ``change`` gets the state and the plan."""

    def __init__(self, change: Callable[[SchedulerState, StepPlan], StepPlan]) -> None:
        self.change = change

    def plan(self, state: SchedulerState) -> StepPlan:
        return self.change(state, DecodeFirst().plan(state))


def request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = 16,
    sampling: SamplingParams = GREEDY,
    priority: int = 0,
    arrived_s: float = 0.0,
) -> Submit:
    """A request with what a test does not care about filled in."""
    return Submit(request_id, list(prompt), sampling, "interactive", priority, max_tokens, None, arrived_s)


def run(
    core: EngineCore,
    arrivals: Mapping[int, Sequence[Submit]] | Sequence[Submit],
    *,
    each_step: Callable[[int, StepOutput], None] = lambda number, output: None,
    most_steps: int = 5000,
) -> Results:
    """Run to the end. ``arrivals`` are requests by the number of the step before which they come."""
    todo = dict(arrivals) if isinstance(arrivals, Mapping) else {0: arrivals}
    results = Results()
    number = 0
    while todo or core.has_work:
        for submit in todo.pop(number, ()):
            core.submit(submit)
        output = core.step()
        results.take(output)
        each_step(number, output)
        number += 1
        assert number < most_steps, f"no end after {most_steps} steps; alive: {core.live_ids()}"
    return results


def run_one(core: EngineCore, submit: Submit) -> Result:
    """The result of one request alone."""
    return run(core, [submit])[submit.request_id]


def log_softmax(logits: npt.NDArray[Any]) -> LogProbs:
    """Natural-log probabilities in double precision."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return np.asarray(shifted - np.log(np.exp(shifted).sum()), np.float64)


class Reference:
    """The yardstick: libllama's own calls, one sequence, nothing of headrace's engine in it."""

    def __init__(self, model: Model, context_tokens: int) -> None:
        self._api = model.library.api
        self._vocab_size = model.weights.vocab_size
        self._alone = self._new_context(model, context_tokens, 1)
        self._crowded = self._new_context(model, context_tokens, CROWD)
        self._batch = self._api.llama_batch_init(512, 0, 1)

    def _new_context(self, model: Model, context_tokens: int, streams: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = context_tokens * streams, streams
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = THREADS
        params.kv_unified = False
        context = self._api.llama_init_from_model(model.weights.handle, params)
        assert context
        return context

    def close(self) -> None:
        """Free everything."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._alone)
        self._api.llama_free(self._crowded)

    def _decode(
        self, context: Any, tokens: Sequence[int], position: int, others: Sequence[int] = ()
    ) -> list[npt.NDArray[np.float32]]:
        """Logits after each of ``tokens``, computed in one call with one token each for further streams."""
        entries = [(token, position + index, 0) for index, token in enumerate(tokens)]
        entries += [(token, position, stream) for stream, token in enumerate(others, start=1)]
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, at, stream) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, at, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
        assert self._api.llama_decode(context, batch) == 0
        return [
            np.ctypeslib.as_array(self._api.llama_get_logits_ith(context, i), (self._vocab_size,)).copy()
            for i in range(len(tokens))
        ]

    def _forget(self, context: Any) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(context), True)

    def logits(self, tokens: Sequence[int], calls: Sequence[int] = ()) -> npt.NDArray[np.float32]:
        """Logits after every token, shape (tokens, vocabulary). ``calls`` are the numbers of tokens of the
        first calls; after them, one token a call."""
        self._forget(self._alone)
        rows: list[npt.NDArray[np.float32]] = []
        for size in [*calls, *[1] * len(tokens)]:
            if len(rows) < len(tokens):
                rows += self._decode(self._alone, tokens[len(rows) : len(rows) + size], len(rows))
        return np.stack(rows)

    def log_probs(self, tokens: Sequence[int], calls: Sequence[int] = ()) -> LogProbs:
        """Log-probabilities after every token; arguments as for ``logits``."""
        return np.stack([log_softmax(row) for row in self.logits(tokens, calls)])

    def log_probs_in_company(self, tokens: Sequence[int], prompt_tokens: int) -> LogProbs:
        """The same with the first ``prompt_tokens`` in one call, and from there on token by token in a batch
        with sequences of other tokens."""
        self._forget(self._crowded)
        rows = self._decode(self._crowded, tokens[:prompt_tokens], 0)
        for position in range(prompt_tokens, len(tokens)):
            others = [tokens[(position + stream) % len(tokens)] for stream in range(1, CROWD)]
            rows += self._decode(self._crowded, [tokens[position]], position, others)
        return np.stack([log_softmax(row) for row in rows])

    def greedy(self, prompt: Sequence[int], count: int, end_tokens: frozenset[int]) -> tuple[list[int], LogProbs]:
        """``count`` greedy tokens, token by token from an empty context (fewer when one of ``end_tokens``
        comes), and the distribution that each was chosen from."""
        self._forget(self._alone)
        for position, token in enumerate(prompt):
            (row,) = self._decode(self._alone, [token], position)
        tokens: list[int] = []
        rows: list[LogProbs] = []
        while True:
            rows.append(log_softmax(row))
            tokens.append(int(row.argmax()))
            if len(tokens) == count or tokens[-1] in end_tokens:
                return tokens, np.stack(rows)
            (row,) = self._decode(self._alone, [tokens[-1]], len(prompt) + len(tokens) - 1)


BAND = Band(256, 8)
WITH_LOGPROBS = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
SMALL_CHUNKS = SchedulingKnobs(step_tokens=64, max_prefill_tokens=16)
"""Chunks below 64 tokens and contexts up to 256 have the same bits in whatever company (``test_reference``)."""


def submits(model: Model, count: int, *, tokens: int = 22) -> list[Submit]:
    """Requests of different prompts. (At its 24th token the first one comes to a tie of 0.0007: rounding decides.)"""
    return [
        request(f"r{n}", model.tokens("stone water " * (n + 1)), max_tokens=tokens, sampling=WITH_LOGPROBS)
        for n in range(count)
    ]


def said(result: Result) -> tuple[str, list[int], Any, str | None]:
    """Everything about a result that must not depend on scheduling, to the bit."""
    return result.text, result.tokens, msgspec.to_builtins(result.logprobs), result.finish


def sound(core: EngineCore) -> Callable[[int, StepOutput], None]:
    """A check after each step."""

    def check(_number: int, _output: StepOutput) -> None:
        assert core.check_integrity() is None

    return check


class CutAt:
    """Says True at the n-th question, and counts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked = 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked == self.number


def assert_same_text_or_near_tie(result: Result, expected: Result) -> None:
    """Beside another sequence the shapes of the calls differ: the tokens are the same up to the first near
    tie, and there both candidates were within the deviation seen before it."""
    deviation = 0.0
    for got, wanted in zip(result.logprobs, expected.logprobs, strict=True):
        if got.token_id != wanted.token_id:
            (first, _, best), (second, _, next_best) = wanted.top
            assert {got.token_id, wanted.token_id} == {first, second}
            assert best - next_best <= 2 * deviation
            return
        assert got.logprob is not None and wanted.logprob is not None
        deviation = max(deviation, abs(got.logprob - wanted.logprob))
    assert result.text == expected.text


def assert_all_same_or_near_tie(results: Mapping[str, Result], expected: Mapping[str, Result]) -> None:
    """The same for every one in ``results``."""
    for name, result in results.items():
        assert_same_text_or_near_tie(result, expected[name])
        assert result.finish == expected[name].finish


@dataclass
class Wishes:
    """Changes to plans for ``Amended``, the last wish first: ``park`` and ``rest`` one of those that run, or ``move``
    somebody to the first hole below it."""

    wanted: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, state: SchedulerState, plan: StepPlan) -> StepPlan:
        if not self.wanted or not state.running:
            return plan
        kind, number = self.wanted.pop()
        chosen = state.running[number % len(state.running)]
        others = {
            "decode": tuple(name for name in plan.decode if name != chosen.request_id),
            "prefill": tuple(chunk for chunk in plan.prefill if chunk.request_id != chosen.request_id),
            "promotions": tuple(p for p in plan.promotions if p.request_id != chosen.request_id),
        }
        if kind == "park":
            return msgspec.structs.replace(plan, victims=(chosen.request_id,), **others)
        if kind == "rest":
            return msgspec.structs.replace(plan, **others)
        for sequence in state.running:
            assert sequence.slot is not None
            band = sequence.slot.band
            used = {s.slot.stream for s in state.running if s.slot is not None and s.slot.band == band}
            holes = [stream for stream in range(sequence.slot.stream) if stream not in used]
            if holes and not plan.admissions and not plan.promotions:
                return msgspec.structs.replace(plan, moves=(Move(sequence.request_id, holes[0]),))
        return plan
