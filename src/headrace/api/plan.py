"""From a typed request to what runs: prompts, lane, sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from starlette.types import Scope

from headrace.api.deps import Deps
from headrace.api.exchange import Exchange, header
from headrace.api.prompts import Prompt, chat_prompt, completion_prompts
from headrace.api.sampling import choice_counts, requested_max_tokens, sampling_params
from headrace.api.slo_headers import slo_of
from headrace.api.wire import ChatRequest, CompletionRequest, GenerationRequest
from headrace.config.model_names import served_model_names
from headrace.config.schema import Config
from headrace.errors import ContextTooLong, EngineNotReady, NotFound, RequestError
from headrace.lanes.classify import LaneDecision, RequestSignals, classify
from headrace.lanes.deadline import deadline_s, finish_by_s, output_limit
from headrace.lanes.lane import SLO, Lane
from headrace.messages.engine import Ready, SamplingParams, Submit
from headrace.telemetry.timing import RequestTiming

_DEFAULT_COMPLETION_TOKENS = 16
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """One request, ready to be admitted. Sequence ``i`` continues prompt ``i // best_of``; of each prompt's
    ``best_of`` sequences ``n`` are returned."""

    id: str
    model: str
    created: int
    prompts: list[Prompt]
    n: int
    best_of: int
    logprobs: bool
    stream: bool
    include_usage: bool
    lane: LaneDecision
    slo: SLO
    sequences: list[Submit] = field(repr=False)
    remote: bool = False
    """Whether prompts have no token ids here, only estimated counts."""

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.count for prompt in self.prompts)


def resolve_model(config: Config, model: str | None) -> str:
    """The model name as the client wrote it. Raises RequestError when missing, NotFound when unknown."""
    names = served_model_names(config)
    if model is None:
        raise RequestError(
            f"model is required; this server has {', '.join(names)}",
            param="model",
            code="missing_required_parameter",
        )
    if model not in names:
        raise NotFound(
            f"the model {model[:128]!r} does not exist; this server has {', '.join(names)}",
            param="model",
            code="model_not_found",
        )
    return model


async def make_plan(
    deps: Deps, config: Config, scope: Scope, exchange: Exchange, request: ChatRequest | CompletionRequest
) -> Plan:
    """Resolve, render, tokenize, classify. Raises RequestError and its kin, EngineNotReady."""
    model = resolve_model(config, request.model)
    _refuse_unsupported(request)
    deps.gateway.require_ready()
    sampling = sampling_params(request, deps.tokenizer)
    max_tokens = requested_max_tokens(request)
    n, best_of = choice_counts(request)
    ready = deps.engine.ready
    limit_tokens = None if ready is None else ready.model.max_context_tokens
    if isinstance(request, ChatRequest):
        prompts = [await chat_prompt(request, deps.tokenizer, limit_tokens)]
        answer_id = f"chatcmpl-{deps.new_id()}"
    else:
        prompts = await completion_prompts(request, deps.tokenizer, config.server.max_choices, limit_tokens)
        answer_id = f"cmpl-{deps.new_id()}"
        max_tokens = _DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens
    if len(prompts) * best_of > config.server.max_choices:
        raise RequestError(
            f"{len(prompts)} prompts times {best_of} choices are more than the limit of"
            f" {config.server.max_choices} sequences",
            param="n",
        )
    exchange.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
    decision = classify(
        config,
        RequestSignals(
            header_lane=header(scope, b"x-headrace-lane"),
            path=exchange.path,
            tenant=exchange.tenant,
            model=model,
            prompt_tokens=max(len(prompt.tokens) for prompt in prompts),
        ),
    )
    exchange.lane, exchange.lane_rule = decision.name, decision.rule
    wanted_logprobs = sampling.logprobs is not None
    if best_of > n and not wanted_logprobs:
        # The best are chosen by log-probability, whether or not the client wants to see it.
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    slo = exchange.slo = slo_of(scope, decision.lane.slo)
    exchange.timing = RequestTiming(arrived_s=exchange.started_s)
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    output_tokens = [_output_tokens(deps, decision.lane, prompt, max_tokens, param) for prompt in prompts]
    sequences = [
        Submit(
            request_id=f"{answer_id}-{index}",
            prompt_tokens=prompts[index // best_of].tokens,
            sampling=_seeded(sampling, index % best_of),
            lane=decision.name,
            priority=decision.lane.priority,
            max_tokens=output_tokens[index // best_of],
            deadline_s=deadline_s(decision.lane, exchange.started_s, slo),
            arrived_s=exchange.started_s,
            tenant=exchange.tenant,
            tpot_s=slo.p99_tpot_s,
            finish_by_s=finish_by_s(decision.lane, exchange.started_s, slo),
            expected_tokens=deps.gateway.expected_tokens(decision.name, decision.lane, output_tokens[index // best_of]),
            stream=bool(request.stream),
            min_kv_dtype=decision.lane.min_kv_dtype,
        )
        for index in range(len(prompts) * best_of)
    ]
    return Plan(
        id=answer_id,
        model=model,
        created=int(deps.wall_clock()),
        prompts=prompts,
        n=n,
        best_of=best_of,
        logprobs=wanted_logprobs,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        lane=decision,
        slo=slo,
        sequences=sequences,
    )


def _seeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Choices of one prompt draw from different streams of the same seed."""
    if choice == 0 or sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & _SEED_MASK)


def _output_tokens(deps: Deps, lane: Lane, prompt: Prompt, requested: int | None, param: str) -> int | None:
    """The output limit, within the context; None lets the engine go on to the context's end.

    Raises ContextTooLong when the prompt leaves no room for a token that was asked for.
    """
    ready = deps.engine.ready
    if ready is None:
        raise EngineNotReady("the engine is not ready yet; try again shortly")
    context = ready.longest_context(lane.min_kv_dtype)
    tokens = len(prompt.tokens)
    room = context - tokens
    if room < 0 or (room == 0 and requested != 0):
        raise ContextTooLong(
            f"the prompt has {tokens} tokens; {_whose(context, ready)} holds {context}, prompt and answer together",
            param=param,
        )
    if requested is None and lane.default_max_tokens is None and lane.max_tokens is None:
        return None
    return output_limit(lane, requested, room)


def _whose(context: int, ready: Ready) -> str:
    return "the context of this model" if context == ready.model.max_context_tokens else "the lane's longest band"


def _refuse_unsupported(request: GenerationRequest) -> None:
    """Raise RequestError for what would change the form of an answer and cannot be honoured."""
    if request.response_format is not None and request.response_format.type != "text":
        kind = request.response_format.type[:40]
        raise RequestError(
            f"response_format {kind!r} is not supported: output cannot be constrained; use 'text'",
            param="response_format.type",
            code="unsupported_parameter",
        )
    if not isinstance(request, ChatRequest):
        return
    if request.modalities is not None and any(modality != "text" for modality in request.modalities):
        raise RequestError("modalities: only text is supported", param="modalities", code="unsupported_parameter")
    for name, choice in (("tool_choice", request.tool_choice), ("function_call", request.function_call)):
        if choice not in (None, "none", "auto"):
            raise RequestError(
                f"{name}: only 'none' and 'auto' are supported; a tool call cannot be forced",
                param=name,
                code="unsupported_parameter",
            )
