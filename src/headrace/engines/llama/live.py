"""A sequence while the engine has it: the scheduler's counts plus tokens, sampler and text."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.engines.llama.context import PROMPT_OUTPUT_CHUNK_TOKENS
from headrace.engines.llama.library import Library
from headrace.engines.llama.sampling import Logits, Sampler, log_probability
from headrace.engines.llama.text_stream import TextStream
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.messages.engine import FinishReason, SequenceOutput, Submit, TokenLogprob
from headrace.scheduling.sequence import SequenceState


@dataclass(slots=True, eq=False)
class LiveSequence:
    """Everything one sequence needs between two steps. ``close`` frees the sampler."""

    request: Submit
    state: SequenceState
    tokens: list[int]
    sampler: Sampler
    text: TextStream
    queue_wait_s: float | None = None
    queue_wait_reported: bool = False
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    was_cut: bool = False
    """Its next chunk was cut short or put off once and now runs to its end."""
    cached_tokens: int = 0
    """Prompt tokens that did not have to be computed when it first got a stream."""

    @classmethod
    def start(
        cls, request: Submit, library: Library, vocabulary: Vocabulary, *, max_context_tokens: int
    ) -> LiveSequence:
        """A sequence about to wait for its first step. ``max_context_tokens`` bounds prompt plus output."""
        prompt = len(request.prompt_tokens)
        limit = max_context_tokens
        if request.max_tokens is not None:
            limit = min(limit, prompt + request.max_tokens)
        sampling = request.sampling
        state = SequenceState(
            request_id=request.request_id,
            prompt_tokens=prompt,
            limit_tokens=limit,
            priority=request.priority,
            arrived_s=request.arrived_s,
            deadline_s=request.deadline_s,
            chunk_limit_tokens=PROMPT_OUTPUT_CHUNK_TOKENS if sampling.prompt_logprobs is not None else None,
            lane=request.lane,
            tenant=request.tenant,
            tpot_s=request.tpot_s,
            finish_by_s=request.finish_by_s,
            expected_tokens=request.expected_tokens,
            min_kv_dtype=request.min_kv_dtype,
        )
        return cls(
            request=request,
            state=state,
            tokens=list(request.prompt_tokens),
            sampler=Sampler(library, sampling, vocabulary.vocab_size, max_context_tokens),
            text=TextStream(sampling.stop, include_stop=sampling.include_stop_text),
        )

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def close(self) -> None:
        self.sampler.close()

    def accept(self, token: int, logits: Logits, vocabulary: Vocabulary, end_tokens: frozenset[int]) -> SequenceOutput:
        """Take the sampled ``token`` in and say what can be sent for it."""
        sampling = self.request.sampling
        self.tokens.append(token)
        self.state.known_tokens += 1
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        text = ""
        logprobs: list[TokenLogprob] | None = None
        if token in end_tokens and not sampling.ignore_eos:
            finish = "stop"
        elif token in sampling.stop_token_ids:
            finish, stop_reason = "stop", token
        else:
            hidden = sampling.skip_special_tokens and vocabulary.is_control(token)
            text = self.text.push(b"" if hidden else vocabulary.token_bytes(token))
            if sampling.logprobs is not None:
                logprobs = [log_probability(logits, token, sampling.logprobs, vocabulary.token_bytes)]
            if self.text.stopped_by is not None:
                finish, stop_reason = "stop", self.text.stopped_by
            elif self.state.known_tokens >= self.state.limit_tokens:
                finish = "length"
        if finish is not None:
            text += self.text.finish()
        return self.output(text=text, token_ids=[token], logprobs=logprobs, finish=finish, stop_reason=stop_reason)

    def output(
        self,
        *,
        text: str = "",
        token_ids: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        finish: FinishReason | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        """An output of this sequence; the first one also carries queue wait, cached tokens and prompt
        log-probabilities."""
        first = not self.queue_wait_reported
        self.queue_wait_reported = True
        return SequenceOutput(
            request_id=self.request.request_id,
            text=text,
            token_ids=token_ids or [],
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs if first and self.prompt_logprobs else None,
            finish=finish,
            stop_reason=stop_reason,
            error=error,
            prompt_tokens=self.state.prompt_tokens,
            cached_tokens=self.cached_tokens if first else 0,
            queue_wait_s=self.queue_wait_s if first else None,
        )


def prompt_problem(tokens: list[int], vocab_size: int, max_context_tokens: int) -> str | None:
    """Why no answer to a prompt of these tokens can be generated, or None."""
    if not tokens:
        return "the prompt has no tokens"
    if len(tokens) >= max_context_tokens:
        return f"the prompt of {len(tokens)} tokens leaves no room in the context of {max_context_tokens}"
    if not all(0 <= token < vocab_size for token in tokens):
        return f"a prompt token is outside the vocabulary of {vocab_size}"
    return None
