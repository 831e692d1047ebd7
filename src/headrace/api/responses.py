"""The Responses API: generating, and what was stored of it."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.api.decode import decode
from headrace.api.deps import Deps
from headrace.api.exchange import Exchange, exchange_of
from headrace.api.generate import authenticate
from headrace.api.metadata import check_metadata
from headrace.api.reply import send_json
from headrace.api.responses_format import ResponsesFormat
from headrace.api.responses_request import chat_body, input_messages, needs_remote
from headrace.api.responses_wire import ResponsesRequest
from headrace.api.store import CompletionStore, StoredCompletion
from headrace.api.surface import Inbound
from headrace.api.wire import ChatRequest
from headrace.errors import NotFound

RESPONSES_PATH: Final = "/v1/responses"


class ResponsesSurface:
    """POST /v1/responses. Answers are stored unless ``store`` is false; ``previous_response_id`` goes on from one."""

    def __init__(self, deps: Deps, store: CompletionStore) -> None:
        self._deps = deps
        self._store = store

    async def read(self, body: bytes, scope: Scope, exchange: Exchange) -> Inbound:
        policy = self._deps.live.config.server.unsupported_params
        request, exchange.ignored = decode(body, ResponsesRequest, policy)
        check_metadata(request.metadata)
        asked = input_messages(request)
        messages = asked
        if request.previous_response_id is not None:
            previous = await _found(self._store, request.previous_response_id, exchange.tenant)
            messages = [*previous.messages, *_answer_messages(previous.completion), *asked]
        chat = chat_body(request, messages)

        def keep(response: dict[str, Any]) -> None:
            self._store.put(StoredCompletion(tenant=exchange.tenant, completion=response, messages=messages))

        return Inbound(
            chat,
            ChatRequest,
            lambda plan: ResponsesFormat(plan, request),
            lambda _: None if request.store is False else keep,
            needs_remote(request),
        )


class StoredResponses:
    """ASGI endpoints, one method each."""

    def __init__(self, deps: Deps, store: CompletionStore) -> None:
        self._deps = deps
        self._store = store

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/responses/{id}."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        stored = await _found(self._store, scope["path_params"]["response_id"], exchange.tenant)
        await send_json(send, exchange, stored.completion)

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /v1/responses/{id}."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        response_id = scope["path_params"]["response_id"]
        await _found(self._store, response_id, exchange.tenant)
        await asyncio.to_thread(self._store.delete, response_id, exchange.tenant)
        await send_json(send, exchange, {"id": response_id, "object": "response", "deleted": True})


async def _found(store: CompletionStore, response_id: str, tenant: str | None) -> StoredCompletion:
    try:
        return await asyncio.to_thread(store.get, response_id, tenant)
    except NotFound as error:
        raise NotFound(f"there is no stored response {response_id[:128]!r}", param="response_id") from error


def _answer_messages(response: dict[str, Any]) -> list[dict[str, Any]]:
    """A stored response's output as the chat messages that a next request goes on from."""
    items = [item for item in response.get("output", []) if item.get("type") in ("message", "function_call")]
    if not items:
        return []
    return input_messages(msgspec.convert({"input": items}, ResponsesRequest))
