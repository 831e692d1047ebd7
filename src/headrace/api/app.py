"""The application: routes, and the edge around them that every request passes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.api.admin import Admin
from headrace.api.admin_groups import AdminGroups
from headrace.api.anthropic_errors import in_anthropic_form
from headrace.api.anthropic_messages import MESSAGES_PATH, CountTokens, MessagesSurface
from headrace.api.deps import Deps
from headrace.api.embeddings import EMBEDDINGS_PATH, Embeddings
from headrace.api.errors import ClientDisconnected, HttpError, error_body, internal_error, to_http
from headrace.api.exchange import Exchange, attach, exchange_of, header, sane_request_id
from headrace.api.generate import Generate
from headrace.api.health import Health
from headrace.api.models import Models
from headrace.api.reply import send_error
from headrace.api.responses import RESPONSES_PATH, ResponsesSurface, StoredResponses
from headrace.api.stored import StoredCompletions
from headrace.api.surface import OpenAISurface
from headrace.api.tokenization import Tokenization
from headrace.api.wire import ChatRequest, CompletionRequest
from headrace.errors import HeadraceError
from headrace.lanes.classify import match_path
from headrace.telemetry.access_log import AccessRecord, log_access

_logger = logging.getLogger(__name__)
_PROBES = frozenset({"/health", "/ready", "/metrics"})

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def create_app(deps: Deps) -> Starlette:
    """The whole HTTP surface, ready for an ASGI server."""
    health, models, stored, tokens = Health(deps), Models(deps), StoredCompletions(deps), Tokenization(deps)
    admin, groups = Admin(deps), AdminGroups(deps)
    chat = Generate(deps, OpenAISurface(deps, ChatRequest))
    completions = Generate(deps, OpenAISurface(deps, CompletionRequest))
    response_store = deps.store.beside("responses")
    responses, stored_responses = (
        Generate(deps, ResponsesSurface(deps, response_store)),
        StoredResponses(deps, response_store),
    )
    messages, counting = Generate(deps, MessagesSurface(deps)), CountTokens(deps)
    completion = ByMethod(GET=stored.retrieve, POST=stored.update, DELETE=stored.delete)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", ByMethod(GET=stored.list, POST=chat)),
            Route("/v1/chat/completions/{completion_id}", completion),
            Route("/v1/chat/completions/{completion_id}/messages", ByMethod(GET=stored.messages)),
            Route("/v1/completions", ByMethod(POST=completions)),
            Route(MESSAGES_PATH, ByMethod(POST=messages)),
            Route(MESSAGES_PATH + "/count_tokens", ByMethod(POST=counting)),
            Route(RESPONSES_PATH, ByMethod(POST=responses)),
            Route(
                RESPONSES_PATH + "/{response_id}",
                ByMethod(GET=stored_responses.retrieve, DELETE=stored_responses.delete),
            ),
            Route(EMBEDDINGS_PATH, ByMethod(POST=Embeddings(deps))),
            Route("/v1/models", ByMethod(GET=models.list)),
            Route("/v1/models/{model:path}", ByMethod(GET=models.retrieve, DELETE=models.delete)),
            Route("/tokenize", ByMethod(POST=tokens.tokenize)),
            Route("/detokenize", ByMethod(POST=tokens.detokenize)),
            Route("/admin/knobs", ByMethod(GET=admin.knobs, PATCH=admin.set_knobs, DELETE=admin.reset_knobs)),
            Route("/admin/scheduling", ByMethod(GET=admin.scheduling)),
            Route("/admin/kv", ByMethod(GET=admin.kv)),
            Route("/admin/groups", ByMethod(GET=groups.groups)),
            Route("/admin/groups/{group}/replicas", ByMethod(POST=groups.add)),
            Route("/admin/groups/{group}/replicas/{replica:path}", ByMethod(PATCH=groups.change, DELETE=groups.remove)),
            Route("/admin/drill", ByMethod(GET=groups.drill, POST=groups.start_drill)),
            Route("/health", ByMethod(GET=health.health)),
            Route("/ready", ByMethod(GET=health.ready)),
            Route("/metrics", ByMethod(GET=health.metrics)),
        ],
        middleware=[Middleware(Edge, deps=deps)],
        exception_handlers={HTTPException: _http_exception},
    )
    app.router.redirect_slashes = False
    return app


class ByMethod:
    """Chooses a handler by HTTP method; a GET handler answers HEAD too."""

    def __init__(self, **handlers: Handler) -> None:
        self._handlers = handlers
        if "GET" in handlers:
            self._handlers["HEAD"] = handlers["GET"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["method"])
        if handler is None:
            raise HTTPException(405, headers={"allow": ", ".join(sorted(self._handlers))})
        await handler(scope, receive, send)


class Edge:
    """Gives every request its exchange, strips a lane's path prefix, turns errors into responses, and
    records what became of it."""

    def __init__(self, app: ASGIApp, deps: Deps) -> None:
        self._app = app
        self._deps = deps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        deps = self._deps
        exchange = Exchange(
            request_id=sane_request_id(header(scope, b"x-request-id")) or f"req-{deps.new_id()}",
            method=scope["method"],
            path=scope["path"],
            started_s=deps.clock(),
        )
        attach(scope, exchange)
        found = match_path(deps.live.config.lanes, exchange.path)
        if found is not None and (found.rest + "/").startswith("/v1/"):
            scope["path"] = found.rest
        if (scope["path"] + "/").startswith(MESSAGES_PATH + "/"):
            exchange.error_form = "anthropic"
            exchange.extra_headers.append((b"request-id", exchange.request_id.encode("ascii")))
        try:
            await self._guarded(scope, receive, send, exchange)
        finally:
            self._record(exchange)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        """Run the routes. ``exchange.status`` says whether a response was begun: then nothing but closing the
        connection can tell the client that it failed."""
        try:
            await self._app(scope, receive, send)
        except ClientDisconnected:
            exchange.outcome = "aborted"
        except asyncio.CancelledError:
            exchange.outcome = "aborted"
            raise
        except HeadraceError as error:
            if exchange.status:
                exchange.outcome = "error"
                raise
            await send_error(send, exchange, to_http(error))
        except Exception:
            _logger.exception("request %s failed", exchange.request_id)
            exchange.outcome = "error"
            if exchange.status:
                raise
            await send_error(send, exchange, internal_error())

    def _record(self, exchange: Exchange) -> None:
        ended_s = self._deps.clock()
        timing = exchange.timing
        if exchange.measured:
            self._deps.metrics.request_ended(
                exchange.lane,
                exchange.outcome,
                prompt_tokens=exchange.prompt_tokens,
                timing=timing,
                ended_s=ended_s,
                slo=exchange.slo,
            )
            ran = timing is not None and timing.first_s is not None
            self._deps.metrics.tenants.ended(
                exchange.tenant,
                exchange.outcome,
                prompt_tokens=exchange.prompt_tokens if ran else 0,
                output_tokens=0 if timing is None else timing.tokens,
            )
        record = AccessRecord(
            request_id=exchange.request_id,
            method=exchange.method,
            path=exchange.path[:256],
            status=exchange.status,
            outcome=exchange.outcome,
            tenant=exchange.tenant,
            lane=exchange.lane,
            lane_rule=exchange.lane_rule,
            prompt_tokens=exchange.prompt_tokens,
            output_tokens=0 if timing is None else timing.tokens,
            ttft_s=None if timing is None else timing.ttft_s,
            e2e_s=ended_s - exchange.started_s,
        )
        log_access(record, level=logging.DEBUG if exchange.path in _PROBES else logging.INFO)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Unknown path and wrong method, in the same JSON form as every other error."""
    assert isinstance(error, HTTPException)
    exchange = exchange_of(request.scope)
    exchange.status, exchange.outcome = error.status_code, "rejected"
    if error.status_code == 405:
        message, code = f"{request.method} is not allowed here", "method_not_allowed"
    else:
        message, code = f"there is nothing at {exchange.path[:256]}", "not_found"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    failure = HttpError(error.status_code, error_body(message, type_=kind, code=code), [], "rejected")
    if exchange.error_form == "anthropic":
        failure = in_anthropic_form(failure, exchange.request_id)
    response = Response(failure.body, status_code=error.status_code, headers=dict(error.headers or {}))
    response.raw_headers += exchange.headers(b"application/json")
    return response
