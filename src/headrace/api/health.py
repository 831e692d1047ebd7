"""/health, /ready and /metrics: for probes and scrapers; none of them asks for a key."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from headrace.api.deps import Deps
from headrace.api.exchange import exchange_of
from headrace.api.reply import send_body, send_json
from headrace.telemetry.metrics import CONTENT_TYPE


class Health:
    """ASGI endpoints, one method each."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /health: this process answers."""
        await send_json(send, exchange_of(scope), {"status": "ok"})

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /ready: 200 when requests are served, else 503 with the reason."""
        reason = self._deps.gateway.not_ready_reason()
        if reason is None:
            await send_json(send, exchange_of(scope), {"ready": True})
            return
        await send_json(send, exchange_of(scope), {"ready": False, "reason": reason}, status=503)

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /metrics: Prometheus text format."""
        body = self._deps.metrics.exposition()
        await send_body(send, exchange_of(scope), body, content_type=CONTENT_TYPE.encode())
