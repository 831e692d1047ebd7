"""Everything ``headrace plan seqs`` says, as values: lengths, sizes, how many fit, and what the formulas would say."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import numpy as np
from msgspec import Struct

from headrace.bench.load.empirical_lengths import EmpiricalLengths
from headrace.bench.load.lengths import Lengths, parse_lengths
from headrace.bench.load.traces.reading import TraceFile
from headrace.errors import ConfigError
from headrace.kv.layout import CacheType
from headrace.kv.libllama_memory import ContextShape, stream_bytes
from headrace.plan import length_pmf
from headrace.plan.circulating import memory_over_weights, multi_head_bytes_per_token, multi_head_sequences
from headrace.plan.described import DescribedModel
from headrace.plan.length_pmf import Probabilities
from headrace.plan.sequences import BLOCK_TOKENS, MemoryFit, SequenceSizes, sizes_of


@dataclass(frozen=True, slots=True)
class SeqsQuestion:
    """What is asked. ``parameters`` is None where it is not known."""

    model: DescribedModel
    types: CacheType
    context_tokens: int
    memory_bytes: int
    reserve_bytes: int
    overflow: float
    parameters: int | None
    bytes_per_parameter: float

    @property
    def kv_bytes(self) -> int:
        """What is left for KV memory."""
        return self.memory_bytes - self.reserve_bytes


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """``words`` says what they are; ``tokens`` are the probabilities of 0, 1, 2... tokens."""

    words: str
    tokens: Probabilities

    @property
    def mean(self) -> float:
        return float(np.arange(len(self.tokens)) @ self.tokens)

    @property
    def std(self) -> float:
        return sqrt(float((np.arange(len(self.tokens)) - self.mean) ** 2 @ self.tokens))

    def percentile(self, share: float) -> int:
        """The fewest tokens that at least this share of sequences has at most."""
        return int(np.searchsorted(np.cumsum(self.tokens), share - 1e-12))


class Answer(Struct, frozen=True):
    """One way to say how many: ``count`` sequences (None where it cannot be said), the exact probability that so many
    overflow, and ``ratio``: the count over the exact answer (None where that is 0)."""

    name: str
    count: int | None
    overflow: float | None
    ratio: float | None


class SeqsPlan(Struct, frozen=True):
    """Sizes in bytes. ``unit_bytes`` is the lattice of the convolution, ``rounded_up`` whether sizes were rounded up to
    it."""

    model: str
    architecture: str
    source: str
    dtype: str
    index_dtype: str
    context_tokens: int
    memory_bytes: int
    reserve_bytes: int
    kv_bytes: int
    lengths: str
    mean_tokens: float
    std_tokens: float
    p50_tokens: int
    p99_tokens: int
    block_tokens: int
    mean_bytes: float
    std_bytes: float
    smallest_bytes: int
    largest_bytes: int
    unit_bytes: int
    rounded_up: bool
    accepted_overflow: float
    sequences: int
    sequences_overflow: float
    one_more_overflow: float
    bytes_per_token: float
    multi_head_bytes_per_token: float
    answers: list[Answer]


def lengths_of(
    context_tokens: int, *, inputs: str | None, outputs: str | None, trace: Path | None, running: bool
) -> TokenLengths:
    """Lengths of sequences from two distributions or from a trace. Raises ConfigError."""
    if context_tokens > length_pmf.MOST_TOKENS:
        raise ConfigError(
            f"{context_tokens} tokens are too many to compute with (at most {length_pmf.MOST_TOKENS}); "
            "give the longest sequence you serve",
            where="--context",
        )
    if context_tokens < 2:
        raise ConfigError("a sequence has a prompt and an answer: at least 2 tokens", where="--context")
    moment = "at a moment while they generate" if running else "at their end"
    if trace is not None:
        if inputs is not None or outputs is not None:
            raise ConfigError(
                "a trace has lengths of its own; leave --input-length and --output-length away", where="--trace"
            )
        pairs = length_pmf.pairs_of((row.input_tokens, row.output_tokens) for row in TraceFile(trace))
        at = length_pmf.rows_while_running if running else length_pmf.rows_at_end
        return TokenLengths(f"{len(pairs[0])} requests of {trace}, {moment}", at(*pairs, context_tokens))
    if inputs is None or outputs is None:
        missing = "--input-length" if inputs is None else "--output-length"
        raise ConfigError("is needed, or a --trace", where=missing)
    prompt, answer = parse_lengths(inputs, where="--input-length"), parse_lengths(outputs, where="--output-length")
    words = f"prompt {prompt.describe()}, answer {answer.describe()}, {moment}"
    return TokenLengths(words, _together(prompt, answer, context_tokens, running=running))


def _together(prompt: Lengths, answer: Lengths, context_tokens: int, *, running: bool) -> Probabilities:
    """Rows of one file belong together, as the load generator has it; all else is independent."""
    if (
        isinstance(prompt, EmpiricalLengths)
        and isinstance(answer, EmpiricalLengths)
        and prompt.path.resolve() == answer.path.resolve()
        and len(prompt.values) == len(answer.values)
    ):
        rows = np.arange(len(prompt.values))
        at = length_pmf.rows_while_running if running else length_pmf.rows_at_end
        return at(prompt.at(rows), answer.at(rows), context_tokens)
    total = length_pmf.total_while_running if running else length_pmf.total_at_end
    chances = [length_pmf.probabilities(lengths, context_tokens) for lengths in (prompt, answer)]
    return total(chances[0], chances[1], context_tokens)


def plan_seqs(question: SeqsQuestion, lengths: TokenLengths) -> SeqsPlan:
    """Raises ConfigError for a memory that is smaller than what is reserved, or a type that does not fit."""
    if question.kv_bytes <= 0:
        raise ConfigError(
            f"{question.reserve_bytes} of {question.memory_bytes} bytes leave nothing for KV memory", where="--reserve"
        )
    model, layout, types = question.model, question.model.layout, question.types
    sizes = sizes_of(length_pmf.in_blocks(lengths.tokens, BLOCK_TOKENS), layout, types)
    fit = MemoryFit(sizes, question.kv_bytes)
    exact = fit.most(question.overflow)
    return SeqsPlan(
        model=model.name,
        architecture=model.architecture,
        source=model.source,
        dtype=types.kv.name,
        index_dtype=types.index.name,
        context_tokens=question.context_tokens,
        memory_bytes=question.memory_bytes,
        reserve_bytes=question.reserve_bytes,
        kv_bytes=question.kv_bytes,
        lengths=lengths.words,
        mean_tokens=lengths.mean,
        std_tokens=lengths.std,
        p50_tokens=lengths.percentile(0.5),
        p99_tokens=lengths.percentile(0.99),
        block_tokens=BLOCK_TOKENS,
        mean_bytes=sizes.mean,
        std_bytes=sqrt(sizes.variance),
        smallest_bytes=sizes.smallest,
        largest_bytes=sizes.largest,
        unit_bytes=fit.unit_bytes,
        rounded_up=fit.rounds_up,
        accepted_overflow=question.overflow,
        sequences=exact,
        sequences_overflow=fit.overflow(exact),
        one_more_overflow=fit.overflow(exact + 1),
        bytes_per_token=float(layout.bytes_per_token(types)),
        multi_head_bytes_per_token=float(multi_head_bytes_per_token(model.layers, model.hidden_entries, types.kv)),
        answers=_answers(question, lengths, sizes, fit, exact),
    )


def _answers(
    question: SeqsQuestion, lengths: TokenLengths, sizes: SequenceSizes, fit: MemoryFit, exact: int
) -> list[Answer]:
    model, context, kind = question.model, question.context_tokens, question.types.kv
    per_token = multi_head_bytes_per_token(model.layers, model.hidden_entries, kind)
    mean_context = max(1, round(lengths.mean))
    weights = None
    if question.parameters is not None:
        weights = memory_over_weights(question.memory_bytes, question.parameters, question.bytes_per_parameter)
    counts: list[tuple[str, int | None]] = [
        ("exact", exact),
        ("every sequence of the largest size", fit.certain),
        ("memory / mean size", int(question.kv_bytes / sizes.mean) if sizes.mean else None),
        ("normal approximation", fit.by_normal(question.overflow)),
        (f"multi-head formula, n_ctx {context}", multi_head_sequences(question.kv_bytes, per_token, context)),
        (f"multi-head formula, n_ctx {mean_context}", multi_head_sequences(question.kv_bytes, per_token, mean_context)),
        ("int(gpu_mem*0.8/(2*model_size*precision))", weights),
    ]
    if kind.ggml_type is not None:
        stream = stream_bytes(model.layout, context, ContextShape(CacheType(kind, kind)))
        counts.append((f"libllama streams of {context} tokens", question.kv_bytes // stream if stream else None))
    return [_answer(name, count, fit, exact) for name, count in counts]


def _answer(name: str, count: int | None, fit: MemoryFit, exact: int) -> Answer:
    if count is None:
        return Answer(name, None, None, None)
    return Answer(name, count, fit.overflow(count), count / exact if exact else None)
