"""/v1/models: the served model's name and aliases."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive, Scope, Send

from headrace.api.deps import Deps
from headrace.api.exchange import exchange_of
from headrace.api.generate import authenticate
from headrace.api.live import without_alias
from headrace.api.plan import resolve_model
from headrace.api.reply import send_json
from headrace.config.model_names import served_model_names
from headrace.errors import PermissionDenied


class Models:
    """ASGI endpoints, one method each."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def list(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/models."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        names = served_model_names(self._deps.live.config)
        data = [self._describe(name) for name in names]
        await send_json(send, exchange, {"object": "list", "data": data})

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/models/{id}."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        name = resolve_model(self._deps.live.config, scope["path_params"]["model"])
        await send_json(send, exchange, self._describe(name))

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /v1/models/{id}: removes an alias until the configuration is loaded again."""
        exchange = exchange_of(scope)
        authenticate(self._deps, scope, exchange)
        config = self._deps.live.config
        name = resolve_model(config, scope["path_params"]["model"])
        if not config.server.allow_model_delete:
            raise PermissionDenied("server.allow_model_delete is off", param="model")
        if name == served_model_names(config)[0]:
            raise PermissionDenied("the model itself cannot be deleted, only its aliases", param="model")
        self._deps.live.swap(without_alias(self._deps.live.loaded, name))
        await send_json(send, exchange, {"id": name, "object": "model", "deleted": True})

    def _describe(self, name: str) -> dict[str, Any]:
        main = served_model_names(self._deps.live.config)[0]
        described: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": int(self._deps.started_at_s),
            "owned_by": "headrace",
            "root": main,
        }
        ready = self._deps.engine.ready
        if ready is not None:
            described["max_model_len"] = ready.model.max_context_tokens
        return described
