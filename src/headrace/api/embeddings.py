"""/v1/embeddings: passed on to the remote engines of the request's lane."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from headrace.api.body import read_body
from headrace.api.decode import decode_lenient
from headrace.api.deps import Deps
from headrace.api.disconnect import CancelOnDisconnect
from headrace.api.exchange import Exchange, exchange_of, header
from headrace.api.generate import authenticate
from headrace.api.plan import resolve_model
from headrace.api.quotas import TenantQuota, tenant_quota
from headrace.api.reply import send_json
from headrace.api.sampling import int_within
from headrace.config.schema import Config
from headrace.engines.fleet.group import Asked
from headrace.engines.remote.chunks import error_message
from headrace.errors import BodyTooLarge, RemoteFailure, RequestError
from headrace.lanes.classify import LaneDecision, RequestSignals, classify
from headrace.lanes.deadline import deadline_s

EMBEDDINGS_PATH: Final = "/v1/embeddings"
MAX_INPUTS: Final = 2048
_MOST_DIMENSIONS: Final = 2**20
_HAS_NONE: Final = frozenset({404, 405, 501})


class EmbeddingsRequest(Struct, frozen=True, kw_only=True):
    """``input`` is a string, a list of strings, a list of token ids or a list of lists of token ids. Engines get every
    field as it came."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


class Embeddings:
    """ASGI endpoint."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deps, exchange = self._deps, exchange_of(scope)
        config = deps.live.config
        authenticate(deps, scope, exchange)
        with tenant_quota(deps, config, exchange) as quota:
            await self._embed(config, exchange, quota, scope, receive, send)

    async def _embed(
        self, config: Config, exchange: Exchange, quota: TenantQuota, scope: Scope, receive: Receive, send: Send
    ) -> None:
        deps = self._deps
        body = await read_body(scope, receive, config.server)
        request, fields = decode_lenient(body, EmbeddingsRequest)
        model = resolve_model(config, request.model)
        tokens = [self._tokens(model, item) for item in _inputs(request)]
        decision = _lane(config, scope, exchange, model, max(tokens))
        exchange.lane, exchange.lane_rule = decision.name, decision.rule
        if deps.fleet is None:
            raise _none()
        deps.gateway.require_ready()
        exchange.prompt_tokens = sum(tokens)
        quota.charge_tokens(exchange.prompt_tokens)
        lane = decision.lane
        asked = Asked(
            lane=decision.name,
            breaker=lane.breaker,
            priority=lane.priority,
            arrived_s=exchange.started_s,
            deadline_s=deadline_s(lane, exchange.started_s, lane.slo),
            prompt_tokens=max(tokens),
            output_tokens=0,
            last_resort=True,  # breakers judge by tokens' times
        )
        members = [msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in fields.items() if name != "model"]
        async with CancelOnDisconnect(receive):
            found = await deps.fleet.ask(decision.name, asked, EMBEDDINGS_PATH, b"{" + b",".join(members) + b"}")
            if found is None:
                raise _none()
            quota.used_tokens = exchange.prompt_tokens
            await send_json(send, exchange, _answer(*found, model))

    def _tokens(self, model: str, item: str | list[int]) -> int:
        if isinstance(item, str):
            return self._deps.prompt_sizes.estimate(model, len(item.encode("utf-8", "replace")))
        return len(item)


def _inputs(request: EmbeddingsRequest) -> list[str | list[int]]:
    """Each input by itself. Raises RequestError."""
    given = request.input
    items: list[str | list[int]]
    if isinstance(given, str):
        items = [given]
    else:
        tokens = [item for item in given if isinstance(item, int)]
        texts = [item for item in given if not isinstance(item, int)]
        if tokens and texts:
            raise RequestError("input mixes token ids with strings or lists", param="input")
        items = [tokens] if tokens else texts
    if not items or not all(items):
        raise RequestError("input must not be empty, nor hold anything empty", param="input")
    if len(items) > MAX_INPUTS:
        raise RequestError(f"input holds {len(items)} inputs; at most {MAX_INPUTS} are allowed", param="input")
    if request.encoding_format not in (None, "float", "base64"):
        raise RequestError("encoding_format must be 'float' or 'base64'", param="encoding_format")
    if request.dimensions is not None:
        int_within("dimensions", request.dimensions, 1, _MOST_DIMENSIONS)
    return items


def _lane(config: Config, scope: Scope, exchange: Exchange, model: str, prompt_tokens: int) -> LaneDecision:
    return classify(
        config,
        RequestSignals(
            header_lane=header(scope, b"x-headrace-lane"),
            path=exchange.path,
            tenant=exchange.tenant,
            model=model,
            prompt_tokens=prompt_tokens,
        ),
    )


def _answer(status: int, body: bytes, model: str) -> dict[str, Any]:
    """The engine's answer under the name that the client knows the model by. Raises RequestError, RemoteFailure."""
    if status in _HAS_NONE:
        raise RequestError(
            "the engines of this lane have no embeddings; ask in a lane whose group has an embedding model",
            param="model",
            code="no_embeddings",
        )
    if status == 413:
        raise BodyTooLarge(f"the engine refuses the request: {error_message(body)}")
    if status in (400, 422):
        raise RequestError(f"the engine refuses the request: {error_message(body)}", code="refused_by_engine")
    if status != 200:
        raise RemoteFailure(f"the engine answered with status {status}", kind="status")
    try:
        said = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteFailure("the engine answered with something that is no JSON object", kind="junk") from error
    if not isinstance(said.get("data"), list):
        raise RemoteFailure("the engine's answer holds no embeddings", kind="junk")
    kept: dict[str, Any] = {name: said[name] for name in ("object", "data", "usage") if name in said}
    return {"object": "list", **kept, "model": model}


def _none() -> RequestError:
    return RequestError(
        "the embedded engine of this lane has no embeddings; a lane can whose group is remote engines with an embedding"
        " model",
        param="model",
        code="no_embeddings",
    )
