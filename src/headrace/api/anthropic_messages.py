"""The Messages API: generating, and counting tokens."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from headrace.api.anthropic_format import MessagesFormat
from headrace.api.anthropic_request import chat_body, conversation, needs_remote
from headrace.api.anthropic_wire import CountRequest, MessagesRequest
from headrace.api.body import read_body
from headrace.api.decode import decode, encode
from headrace.api.deps import Deps
from headrace.api.exchange import Exchange, exchange_of
from headrace.api.generate import authenticate
from headrace.api.no_vocabulary import NoVocabulary
from headrace.api.plan import resolve_model
from headrace.api.prompts import chat_prompt
from headrace.api.reply import send_json
from headrace.api.surface import Inbound
from headrace.api.wire import ChatRequest

MESSAGES_PATH: Final = "/v1/messages"


class MessagesSurface:
    """POST /v1/messages."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def read(self, body: bytes, scope: Scope, exchange: Exchange) -> Inbound:
        policy = self._deps.live.config.server.unsupported_params
        request, exchange.ignored = decode(body, MessagesRequest, policy)
        return Inbound(chat_body(request), ChatRequest, MessagesFormat, lambda _: None, needs_remote(request))


class CountTokens:
    """POST /v1/messages/count_tokens. Exact where the model's vocabulary is at hand; else learned from what engines
    counted before, and a header says so."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deps, exchange = self._deps, exchange_of(scope)
        config = deps.live.config
        authenticate(deps, scope, exchange)
        body = await read_body(scope, receive, config.server)
        request, exchange.ignored = decode(body, CountRequest, config.server.unsupported_params)
        chat = conversation(request)
        model = resolve_model(config, request.model)
        if isinstance(deps.tokenizer, NoVocabulary):
            exchange.extra_headers.append((b"x-headrace-estimated", b"input_tokens"))
            count = deps.prompt_sizes.estimate(model, len(encode(chat["messages"])))
        else:
            count = (await chat_prompt(msgspec.convert(chat, ChatRequest), deps.tokenizer)).count
        await send_json(send, exchange, {"input_tokens": count})
