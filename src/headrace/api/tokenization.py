"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from headrace.api.body import read_body
from headrace.api.completion_format import token_text
from headrace.api.decode import decode
from headrace.api.deps import Deps
from headrace.api.exchange import exchange_of
from headrace.api.generate import authenticate
from headrace.api.plan import resolve_model
from headrace.api.prompts import tokenize_request
from headrace.api.quotas import tenant_quota
from headrace.api.reply import send_json
from headrace.api.sampling import int_within
from headrace.api.wire import DetokenizeRequest, TokenizeRequest
from headrace.errors import RequestError

MAX_DETOKENIZE_TOKENS = 1 << 18  # a long context's worth; checking more would hold up running streams

Request = TypeVar("Request", TokenizeRequest, DetokenizeRequest)


class Tokenization:
    """ASGI endpoints, one method each. ``model`` may be left out: there is one tokenizer."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /tokenize: ``{prompt | messages, ...}`` to ``{tokens, count, max_model_len}``."""
        deps = self._deps
        request = await self._request(scope, receive, TokenizeRequest)
        tokens = await tokenize_request(request, deps.tokenizer)
        ready = deps.engine.ready
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": None if ready is None else ready.model.max_context_tokens,
            "tokens": tokens,
            "token_strs": None,
        }
        if request.return_token_strs:
            answer["token_strs"] = [token_text(deps.tokenizer.token_bytes(token)) for token in tokens]
        await send_json(send, exchange_of(scope), answer)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /detokenize: ``{tokens}`` to ``{prompt}``."""
        deps = self._deps
        request = await self._request(scope, receive, DetokenizeRequest)
        if len(request.tokens) > MAX_DETOKENIZE_TOKENS:
            raise RequestError(
                f"{len(request.tokens)} tokens are more than the limit of {MAX_DETOKENIZE_TOKENS}", param="tokens"
            )
        for token in request.tokens:
            int_within("tokens", token, 0, deps.tokenizer.vocab_size - 1)
        text = await asyncio.to_thread(deps.tokenizer.decode, request.tokens)
        await send_json(send, exchange_of(scope), {"prompt": text})

    async def _request(self, scope: Scope, receive: Receive, request_type: type[Request]) -> Request:
        """The authenticated, decoded body. Raises RequestError."""
        exchange, config = exchange_of(scope), self._deps.live.config
        authenticate(self._deps, scope, exchange)
        with tenant_quota(self._deps, config, exchange):
            body = await read_body(scope, receive, config.server)
        request, exchange.ignored = decode(body, request_type, config.server.unsupported_params)
        if request.model is not None:
            resolve_model(config, request.model)
        return request
