"""What a request has got so far: one answer per sequence, and what it used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.api.plan import Plan
from headrace.errors import BodyTooLarge, EngineError, NotFound, RequestError
from headrace.messages.engine import SequenceOutput, TokenLogprob


@dataclass(slots=True)
class Answer:
    """One sequence's output, collected. Without ``keep_text`` (a stream that is not stored) only counts."""

    keep_text: bool = True
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    deltas: list[bytes] = field(default_factory=list)
    finish: str = "length"
    stop_reason: str | int | None = None

    def add(self, output: SequenceOutput) -> None:
        if self.keep_text:
            if output.text:
                self.parts.append(output.text)
            if output.logprobs:
                self.logprobs += output.logprobs
            if output.prompt_logprobs:
                self.prompt_logprobs += output.prompt_logprobs
            if output.delta is not None:
                self.deltas.append(output.delta)
        self.tokens += output.tokens
        if output.prompt_tokens:
            self.prompt_tokens = output.prompt_tokens
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if output.finish is not None:
            self.finish, self.stop_reason = output.finish, output.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens: what ``best_of`` chooses by."""
        known = [entry.logprob for entry in self.logprobs if entry.logprob is not None]
        return sum(known) / len(known) if known else float("-inf")


def check_finish(output: SequenceOutput) -> None:
    """Raise EngineError when a sequence ended for a reason that is no answer."""
    if output.refused_status:
        raise _refusal(output)
    if output.finish == "error":
        raise EngineError(f"the engine could not go on: {output.error or 'no reason given'}")
    if output.finish == "abort":
        raise EngineError("the request was aborted because the server is shutting down")


def _refusal(output: SequenceOutput) -> RequestError:
    """A remote engine's own refusal, in its words."""
    message = f"the engine refuses the request: {output.error or 'no reason given'}"
    match output.refused_status:
        case 404:
            return NotFound(message)
        case 413:
            return BodyTooLarge(message)
        case _:
            return RequestError(message, code="refused_by_engine")


def returned(plan: Plan, answers: Sequence[Answer]) -> list[tuple[int, Answer]]:
    """``(sequence index, answer)`` of the choices to return, best first within each prompt."""
    if plan.best_of == plan.n:
        return list(enumerate(answers))
    chosen: list[tuple[int, Answer]] = []
    for start in range(0, len(answers), plan.best_of):
        indices = range(start, start + plan.best_of)
        ranked = sorted(indices, key=lambda index: -answers[index].mean_logprob)
        chosen += [(index, answers[index]) for index in ranked[: plan.n]]
    return chosen


def usage(plan: Plan, answers: Sequence[Answer]) -> dict[str, object]:
    """OpenAI's usage object. Every generated token counts, those of choices that were not returned too."""
    completion = sum(answer.tokens for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers[:: plan.best_of])
    prompt_tokens = plan.prompt_tokens
    if plan.remote:
        # The engine counted them; here they were only estimated.
        prompt_tokens = sum(answer.prompt_tokens for answer in answers[:: plan.best_of])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
