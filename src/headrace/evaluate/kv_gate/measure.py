"""Runs the prompt set on a model at F16 and at other precisions, side by side.

All contexts stand at once over one set of weights and are given the same chunks, so that nobody keeps a whole text's
distributions. Chunks are as in serving: what a chunk writes is read back by itself at its precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from headrace.engines.llama.context import Context
from headrace.engines.llama.library import Library
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.errors import EngineError, GateError, RequestError
from headrace.evaluate.kv_gate.prompts import Prompt, PromptSet, TokenText, tokenized
from headrace.evaluate.kv_gate.scores import PrecisionScores, Tally, log_probabilities
from headrace.kv.precision import KvDtype
from headrace.scheduling.bands import Band

CHUNK_TOKENS: Final = 128
ANSWER_TOKENS: Final = 24
"""Of a chat's answer: enough to leave the first sentence's common places."""
_ALIGN: Final = 256


@dataclass(frozen=True, slots=True)
class Progress:
    """After a prompt: how many are done, of how many, its name, and the share of all tokens that are computed."""

    done: int
    total: int
    name: str
    share: float


OnPrompt = Callable[[Progress], None]

Rows = list[npt.NDArray[np.float32]]


def measure(
    library: Library,
    weights: Weights,
    vocabulary: Vocabulary,
    prompts: PromptSet,
    dtypes: Sequence[KvDtype],
    *,
    threads: int,
    on_prompt: OnPrompt = lambda progress: None,
) -> dict[KvDtype, PrecisionScores]:
    """The scores of each of ``dtypes``. Raises GateError when the model's context is too short for the set, or libllama
    cannot keep its KV at a precision."""
    texts = [_tokens(prompt, vocabulary) for prompt in prompts.prompts]
    longest = max(len(text.tokens) for text in texts) + ANSWER_TOKENS
    context_tokens = -(-longest // _ALIGN) * _ALIGN
    trained = vocabulary.context_train_tokens
    if trained and longest > trained:
        raise GateError(f"the prompt set needs a context of {longest} tokens; the model was trained for {trained}")
    tallies = {dtype: Tally() for dtype in dtypes}
    contexts: dict[KvDtype, Context] = {}
    try:
        for dtype in ("f16", *dtypes):
            if dtype not in contexts:
                contexts[dtype] = _context(library, weights, context_tokens, dtype, threads)
        costs = [_cost_tokens(prompt, text) for prompt, text in zip(prompts.prompts, texts, strict=True)]
        for number, (prompt, text) in enumerate(zip(prompts.prompts, texts, strict=True), start=1):
            if prompt.kind == "chat":
                _compare_chat(contexts, tallies, text, vocabulary.end_tokens())
            else:
                _compare_text(contexts, tallies, text)
            on_prompt(Progress(number, len(texts), prompt.name, sum(costs[:number]) / sum(costs)))
    finally:
        for context in contexts.values():
            context.close()
    return {dtype: tally.scores() for dtype, tally in tallies.items()}


def _cost_tokens(prompt: Prompt, text: TokenText) -> int:
    """Tokens that a prompt makes each precision compute; a chat's are answered, then read."""
    return 2 * (len(text.tokens) + ANSWER_TOKENS) if prompt.kind == "chat" else len(text.tokens)


def _context(library: Library, weights: Weights, tokens: int, dtype: KvDtype, threads: int) -> Context:
    try:
        return Context(library, weights, Band(tokens, 1, dtype), step_tokens=CHUNK_TOKENS, threads=threads)
    except EngineError as error:
        raise GateError(f"this model's KV cannot be kept at {dtype}: {error}") from error


def _tokens(prompt: Prompt, vocabulary: Vocabulary) -> TokenText:
    if prompt.kind == "chat":
        return TokenText(_chat_tokens(prompt, vocabulary), ())
    return tokenized(prompt, lambda text, first: vocabulary.encode(text, add_special=first, parse_special=False))


def _chat_tokens(prompt: Prompt, vocabulary: Vocabulary) -> list[int]:
    try:
        text = vocabulary.render_chat([{"role": "user", "content": prompt.text}])
    except RequestError:  # a model without a chat template is asked in plain words
        return vocabulary.encode(f"Question: {prompt.text}\nAnswer:", add_special=True, parse_special=False)
    return vocabulary.encode(text, add_special=False, parse_special=True)


def _computed(context: Context, tokens: Sequence[int], position: int) -> Rows:
    """Logits after each of at most ``CHUNK_TOKENS`` tokens: views that the next call overwrites."""
    batch = context.batch
    batch.clear()
    batch.add_chunk(list(tokens), position, 0, last_output=True, all_outputs=True)
    context.decode()
    return [context.logits(index) for index in range(len(tokens))]


def _compare_text(contexts: dict[KvDtype, Context], tallies: dict[KvDtype, Tally], text: TokenText) -> None:
    """Every position of a text, and its answers."""
    likeliest = _read(contexts, tallies, text.tokens, compared_from=0)
    for start, end in text.answers:
        expected = text.tokens[start:end]

        def right(dtype: KvDtype, start: int = start, end: int = end, expected: list[int] = expected) -> bool:
            return likeliest[dtype][start - 1 : end - 1] == expected

        for dtype, tally in tallies.items():
            tally.answer(reference_right=right("f16"), right=right(dtype))


def _read(
    contexts: dict[KvDtype, Context], tallies: dict[KvDtype, Tally], tokens: list[int], *, compared_from: int
) -> dict[KvDtype, list[int]]:
    """Compute ``tokens`` in every context and compare what follows each position from ``compared_from`` on; the
    likeliest token after each position."""
    for context in contexts.values():
        context.clear_stream(0)
    likeliest: dict[KvDtype, list[int]] = {dtype: [] for dtype in contexts}
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        rows = {dtype: _computed(context, chunk, start) for dtype, context in contexts.items()}
        for dtype, found in rows.items():
            likeliest[dtype] += [int(row.argmax()) for row in found]
        for index in range(max(0, compared_from - start), len(chunk)):
            reference = log_probabilities(rows["f16"][index])
            for dtype, tally in tallies.items():
                tally.position(reference, log_probabilities(rows[dtype][index]))
    return likeliest


def _compare_chat(
    contexts: dict[KvDtype, Context], tallies: dict[KvDtype, Tally], text: TokenText, end_tokens: frozenset[int]
) -> None:
    """Greedy answers, each precision for itself; then F16's answer, read by all."""
    answers = {dtype: _greedy(context, text.tokens, end_tokens) for dtype, context in contexts.items()}
    for dtype, tally in tallies.items():
        tally.greedy_total += 1
        tally.greedy_same += answers[dtype] == answers["f16"]
    _read(contexts, tallies, text.tokens + answers["f16"][:-1], compared_from=len(text.tokens) - 1)


def _greedy(context: Context, prompt: list[int], end_tokens: frozenset[int]) -> list[int]:
    """At most ``ANSWER_TOKENS`` greedy tokens, the end token included where it comes."""
    context.clear_stream(0)
    row: npt.NDArray[np.float32] | None = None
    for start in range(0, len(prompt), CHUNK_TOKENS):
        row = _computed(context, prompt[start : start + CHUNK_TOKENS], start)[-1]
    assert row is not None
    answer: list[int] = []
    while True:
        answer.append(int(row.argmax()))
        if len(answer) == ANSWER_TOKENS or answer[-1] in end_tokens:
            return answer
        row = _computed(context, answer[-1:], len(prompt) + len(answer) - 1)[-1]
