"""From a client's JSON to what a fleet of groups runs: what engines understand better than headrace goes through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec
from msgspec import Raw
from starlette.types import Scope

from headrace.api.decode import CONSTRAINED_OUTPUT, decode_lenient
from headrace.api.deps import Deps
from headrace.api.exchange import Exchange, header
from headrace.api.plan import Plan, make_plan, resolve_model
from headrace.api.prompts import Prompt
from headrace.api.sampling import choice_counts, requested_max_tokens
from headrace.api.slo_headers import slo_of
from headrace.api.wire import ChatRequest, CompletionRequest
from headrace.config.schema import Config
from headrace.errors import ContextTooLong, EngineNotReady, RequestError
from headrace.lanes.classify import LaneDecision, RequestSignals, classify
from headrace.lanes.deadline import deadline_s, finish_by_s, output_limit
from headrace.messages.engine import SamplingParams, Submit, WireRequest
from headrace.telemetry.timing import RequestTiming

_DEFAULT_COMPLETION_TOKENS: Final = 16
_SEED_MASK: Final = 2**63 - 1
_MAX_SESSION_CHARS: Final = 128
_OURS: Final = frozenset(
    {
        "best_of",
        "echo",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "metadata",
        "model",
        "n",
        "priority",
        "prompt",
        "seed",
        "store",
        "stream",
        "stream_options",
    }
)
"""Fields that headrace answers for itself, or writes anew for the engine."""

_NOT_CONTINUABLE: Final = CONSTRAINED_OUTPUT | {
    "continue_final_message",
    "function_call",
    "functions",
    "logprobs",
    "prompt_logprobs",
    "tools",
}
"""With one of these an answer is more than text, or its rest depends on how it began."""

Generation = ChatRequest | CompletionRequest


async def make_fleet_plan(
    deps: Deps,
    config: Config,
    scope: Scope,
    exchange: Exchange,
    body: bytes,
    kind: type[ChatRequest] | type[CompletionRequest],
) -> tuple[Plan, Generation]:
    """Classify by the prompt's estimated length, then plan for the lane's group: with token ids where the embedded
    engine may serve it, else from the JSON alone. Raises RequestError and its kin, EngineNotReady."""
    request, fields = decode_lenient(body, kind)
    assert isinstance(request, ChatRequest | CompletionRequest)
    model = resolve_model(config, request.model)
    deps.gateway.require_ready()
    prompts = _prompts(deps, config, request, fields, model)
    exchange.prompt_tokens = sum(prompt.count for prompt, _ in prompts)
    decision = _lane(config, scope, exchange, model, [prompt for prompt, _ in prompts])
    wires = [_wire(request, fields, raw) for _, raw in prompts]
    if _may_be_embedded(config, decision):
        plan = await make_plan(deps, config, scope, exchange, request)
        wired = [_with_wire(sequence, wires[index // plan.best_of]) for index, sequence in enumerate(plan.sequences)]
        return replace(plan, sequences=wired), request
    return _remote_plan(deps, config, scope, exchange, request, model, decision, prompts, wires), request


def _remote_plan(
    deps: Deps,
    config: Config,
    scope: Scope,
    exchange: Exchange,
    request: Generation,
    model: str,
    decision: LaneDecision,
    prompts: list[tuple[Prompt, bytes]],
    wires: list[WireRequest],
) -> Plan:
    chat = isinstance(request, ChatRequest)
    max_tokens = requested_max_tokens(request)
    n, best_of = choice_counts(request)
    if not chat and max_tokens is None:
        max_tokens = _DEFAULT_COMPLETION_TOKENS
    if len(prompts) * best_of > config.server.max_choices:
        raise RequestError(
            f"{len(prompts)} prompts times {best_of} choices are more than the limit of"
            f" {config.server.max_choices} sequences",
            param="n",
        )
    if best_of > n and not _wants_logprobs(request):
        # The best are chosen by log-probability, whether or not the client wants to see it.
        wires = [msgspec.structs.replace(wire, fields=_and_logprobs(wire.fields), continuable=False) for wire in wires]
    exchange.lane, exchange.lane_rule = decision.name, decision.rule
    lane = decision.lane
    slo = exchange.slo = slo_of(scope, lane.slo)
    exchange.timing = RequestTiming(arrived_s=exchange.started_s)
    answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{deps.new_id()}"
    session = (header(scope, b"x-session-id") or "")[:_MAX_SESSION_CHARS]
    if session and exchange.tenant is not None:
        session = f"{exchange.tenant}/{session}"
    sequences = []
    for index in range(len(prompts) * best_of):
        prompt, _ = prompts[index // best_of]
        limit = _output_limit(deps, decision, prompt.count, max_tokens, "messages" if chat else "prompt")
        seed = request.seed
        sequences.append(
            Submit(
                request_id=f"{answer_id}-{index}",
                prompt_tokens=prompt.tokens,
                sampling=SamplingParams(seed=None if seed is None else (seed + index % best_of) & _SEED_MASK),
                lane=decision.name,
                priority=lane.priority,
                max_tokens=limit,
                deadline_s=deadline_s(lane, exchange.started_s, slo),
                arrived_s=exchange.started_s,
                tenant=exchange.tenant,
                tpot_s=slo.p99_tpot_s,
                finish_by_s=finish_by_s(lane, exchange.started_s, slo),
                expected_tokens=deps.gateway.expected_tokens(decision.name, lane, limit),
                stream=bool(request.stream),
                wire=wires[index // best_of],
                estimated_prompt_tokens=prompt.count,
                session=session or None,
            )
        )
    return Plan(
        id=answer_id,
        model=model,
        created=int(deps.wall_clock()),
        prompts=[prompt for prompt, _ in prompts],
        n=n,
        best_of=best_of,
        logprobs=_wants_logprobs(request),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        lane=decision,
        slo=slo,
        sequences=sequences,
        remote=True,
    )


def _prompts(
    deps: Deps, config: Config, request: Generation, fields: dict[str, Raw], model: str
) -> list[tuple[Prompt, bytes]]:
    """Each prompt with its length as estimated, and its JSON."""
    if isinstance(request, ChatRequest):
        if not request.messages:
            raise RequestError("messages must hold at least one message", param="messages", code="empty_messages")
        raw = bytes(fields["messages"])
        return [(Prompt([], estimated=deps.prompt_sizes.estimate(model, len(raw))), raw)]
    asked: Any = request.prompt
    several = isinstance(asked, list) and bool(asked) and not isinstance(asked[0], int)
    items = asked if several else [asked]
    if len(items) > config.server.max_choices:
        raise RequestError(
            f"prompt holds {len(items)} prompts; at most {config.server.max_choices} are allowed", param="prompt"
        )
    found = []
    for item in items:
        if not item and item != "":
            raise RequestError("prompt must not be empty", param="prompt")
        raw = msgspec.json.encode(item)
        if isinstance(item, str):
            text = item if request.echo else None
            found.append((Prompt([], text, deps.prompt_sizes.estimate(model, len(raw))), raw))
        elif request.echo:
            raise RequestError("echo needs a text prompt: token ids cannot be shown here", param="echo")
        else:
            found.append((Prompt([], estimated=len(item)), raw))
    if request.echo and request.logprobs is not None:
        raise RequestError("echo with logprobs is not supported by remote engines", param="echo")
    return found


def _lane(config: Config, scope: Scope, exchange: Exchange, model: str, prompts: list[Prompt]) -> LaneDecision:
    return classify(
        config,
        RequestSignals(
            header_lane=header(scope, b"x-headrace-lane"),
            path=exchange.path,
            tenant=exchange.tenant,
            model=model,
            prompt_tokens=max(prompt.count for prompt in prompts),
        ),
    )


def _may_be_embedded(config: Config, decision: LaneDecision) -> bool:
    names = (config.group_of(decision.lane), decision.lane.fallback.group)
    return any(name is not None and config.groups[name].kind == "embedded" for name in names)


def _wire(request: Generation, fields: dict[str, Raw], prompt: bytes) -> WireRequest:
    members = [
        msgspec.json.encode(name) + b":" + bytes(value)
        for name, value in fields.items()
        if name not in _OURS and bytes(value) != b"null"
    ]
    plain_format = request.response_format is None or request.response_format.type == "text"
    special = [name for name in _NOT_CONTINUABLE if name in fields and bytes(fields[name]) not in (b"null", b"false")]
    return WireRequest(
        endpoint="chat" if isinstance(request, ChatRequest) else "completion",
        prompt=prompt,
        fields=b",".join(members),
        continuable=plain_format and not special,
    )


def _with_wire(sequence: Submit, wire: WireRequest) -> Submit:
    return msgspec.structs.replace(sequence, wire=wire)


def _output_limit(
    deps: Deps, decision: LaneDecision, prompt_tokens: int, requested: int | None, param: str
) -> int | None:
    """The output limit. The context's end is the engine's to say, since the prompt's length is only estimated; what
    cannot fit by far is refused here."""
    ready = deps.engine.ready
    if ready is None:
        raise EngineNotReady("no engine is ready yet; try again shortly")
    context = ready.model.max_context_tokens
    if context and prompt_tokens > 2 * context:
        raise ContextTooLong(
            f"the prompt has about {prompt_tokens} tokens; the longest context here holds {context}", param=param
        )
    lane = decision.lane
    if requested is None and lane.default_max_tokens is None and lane.max_tokens is None:
        return None
    return max(1, output_limit(lane, requested, max(1, (context or 2**31) - 1)))


def _and_logprobs(fields: bytes) -> bytes:
    return fields + (b"," if fields else b"") + b'"logprobs":1'


def _wants_logprobs(request: Generation) -> bool:
    if isinstance(request, ChatRequest):
        return bool(request.logprobs)
    return request.logprobs is not None
