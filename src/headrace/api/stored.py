"""Endpoints over stored chat completions: list, retrieve, update, delete, messages."""

from __future__ import annotations

import asyncio
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from headrace.api.body import read_body
from headrace.api.decode import decode
from headrace.api.deps import Deps
from headrace.api.exchange import exchange_of
from headrace.api.generate import authenticate
from headrace.api.metadata import check_metadata
from headrace.api.reply import send_json
from headrace.api.sampling import int_within
from headrace.api.store import StoredCompletion
from headrace.api.wire import MetadataUpdate
from headrace.errors import RequestError

_DEFAULT_LIMIT = 20
_MAX_LIMIT = 100

Item = TypeVar("Item")


class StoredCompletions:
    """ASGI endpoints, one method each."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/chat/completions: after, limit, order, model, metadata[key]=value."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        query = _Query(scope)
        stored = await asyncio.to_thread(self._deps.store.all, exchange.tenant)
        matching = [item for item in stored if query.matches(item)]
        await send_json(send, exchange, query.page([item.completion for item in matching]))

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/chat/completions/{id}."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        stored = await asyncio.to_thread(self._deps.store.get, _id(scope), exchange.tenant)
        await send_json(send, exchange, stored.completion)

    async def update(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/chat/completions/{id}: replaces the metadata."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        body = await read_body(scope, receive, self._deps.live.config.server)
        update, _ = decode(body, MetadataUpdate)
        check_metadata(update.metadata)

        def work() -> StoredCompletion:
            stored = self._deps.store.get(_id(scope), exchange.tenant)
            stored.completion["metadata"] = update.metadata or {}
            self._deps.store.put(stored)
            return stored

        stored = await asyncio.to_thread(work)
        await send_json(send, exchange, stored.completion)

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /v1/chat/completions/{id}."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        await asyncio.to_thread(self._deps.store.delete, _id(scope), exchange.tenant)
        answer = {"id": _id(scope), "object": "chat.completion.deleted", "deleted": True}
        await send_json(send, exchange, answer)

    async def messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/chat/completions/{id}/messages: after, limit, order."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        query = _Query(scope)
        stored = await asyncio.to_thread(self._deps.store.get, _id(scope), exchange.tenant)
        items = [_store_message(stored.id, index, message) for index, message in enumerate(stored.messages)]
        await send_json(send, exchange, query.page(items))


class _Query:
    """The query of a list endpoint. Raises RequestError for a limit or an order that is none."""

    def __init__(self, scope: Scope) -> None:
        try:
            pairs = parse_qsl(scope["query_string"].decode("latin-1"), max_num_fields=100)
        except ValueError as error:
            raise RequestError("the query holds too many fields") from error
        values = dict(pairs)
        self._after = values.get("after")
        self._model = values.get("model")
        self._limit = _limit(values.get("limit"))
        self._order = _order(values.get("order"))
        self._metadata = {
            name[len("metadata[") : -1]: value
            for name, value in pairs
            if name.startswith("metadata[") and name.endswith("]")
        }

    def matches(self, stored: StoredCompletion) -> bool:
        """Whether a completion passes the model and metadata filters."""
        if self._model is not None and stored.completion.get("model") != self._model:
            return False
        return all(stored.metadata.get(key) == value for key, value in self._metadata.items())

    def page(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """One page of items given oldest first. An ``after`` that is not among them gives an empty page."""
        if self._order == "desc":
            items = items[::-1]
        if self._after is not None:
            ids = [item["id"] for item in items]
            items = items[ids.index(self._after) + 1 :] if self._after in ids else []
        page = items[: self._limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RequestError(f"limit must be a whole number, not {text[:32]!r}", param="limit")
    return int_within("limit", int(text), 0, _MAX_LIMIT)


def _order(text: str | None) -> Literal["asc", "desc"]:
    if text is None or text == "asc":
        return "asc"
    if text == "desc":
        return "desc"
    raise RequestError(f"order must be 'asc' or 'desc', not {text[:32]!r}", param="order")


def _store_message(completion_id: str, index: int, message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    text = "\n".join(str(part.get("text") or "") for part in parts) if parts is not None else content
    kept = {key: value for key, value in message.items() if value is not None}
    return {**kept, "id": f"{completion_id}-{index}", "content": text, "content_parts": parts}


def _id(scope: Scope) -> str:
    completion_id = scope["path_params"]["completion_id"]
    assert isinstance(completion_id, str)
    return completion_id
