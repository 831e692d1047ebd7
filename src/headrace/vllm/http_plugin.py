"""``vllm.endpoint_plugins``: knobs and status over vLLM's HTTP server, and metrics in its ``/metrics``.

vLLM loads it only when ``VLLM_PLUGINS`` names ``headrace``. Who may use it is decided as in headrace's own admin API:
with ``admin_keys`` whoever brings one, without them only clients on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from prometheus_client import REGISTRY
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.api.admin_access import AdminKeys, admit_admin
from headrace.errors import RequestError
from headrace.lanes.tenants import TenantDirectory
from headrace.vllm.engine_plugin import CHANGE, STATUS
from headrace.vllm.metrics import StatusCollector
from headrace.vllm.settings import settings_of
from headrace.vllm.status import Status

SCRAPE_WAIT_S: Final = 1.0
"""How long a scrape waits for the engine core, which answers between two steps; then it gets the latest figures."""
_MOST_BODY_BYTES: Final = 64 * 1024
_NO_TENANTS: Final = TenantDirectory((), frozenset(), False)
_LOG: Final = logging.getLogger("headrace.vllm")

Ask = Callable[..., Awaitable[list[dict[str, Any]]]]
"""Calls a method of every engine core."""


@dataclass(frozen=True)
class _Open:
    """What the routes need once the server has an engine."""

    ask: Ask
    keys: AdminKeys


class HeadracePlugin:
    """The plug-in object that vLLM asks for."""

    name = "headrace"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._collector = StatusCollector()

    def attach_router(self, app: Any) -> None:
        """Add the routes. Called once, before the server has an engine."""
        app.add_route("/headrace/status", self.get_status, methods=["GET"])
        app.add_route("/headrace/knobs", self.get_knobs, methods=["GET"])
        app.add_route("/headrace/knobs", self.patch_knobs, methods=["PATCH"])
        app.add_middleware(_FreshMetrics, plugin=self)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """The engine is there. Raises ConfigError for keys that cannot be read."""
        if engine_client is None:
            return
        settings = settings_of(getattr(args, "additional_config", None))
        self._open = _Open(_ask(engine_client.engine_core), AdminKeys.build(settings.admin_keys, os.environ))
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _LOG.warning("with several API servers vLLM's /metrics does not hold headrace's metrics")
        else:
            REGISTRY.register(self._collector)

    async def refresh(self) -> None:
        """Bring the metrics up to date, if the engine answers in time."""
        if self._open is None:
            return
        try:
            async with asyncio.timeout(SCRAPE_WAIT_S):
                self._collector.statuses = await self._statuses(self._open)
        except TimeoutError:
            _LOG.debug("the engine core did not answer within %s s", SCRAPE_WAIT_S)
        except Exception as error:  # a scrape must not fail because headrace's part of it does
            _LOG.warning("headrace's metrics are not up to date: %s", error)

    async def get_status(self, request: Request) -> Response:
        """GET /headrace/status: the status of every engine core."""
        return await self._answer(request, self._status)

    async def get_knobs(self, request: Request) -> Response:
        """GET /headrace/knobs."""
        return await self._answer(request, self._knobs)

    async def patch_knobs(self, request: Request) -> Response:
        """PATCH /headrace/knobs: change those that the body names; 400 when one is wrong, and then none is changed."""
        return await self._answer(request, self._change)

    async def _answer(self, request: Request, act: Callable[[_Open, Request], Awaitable[Any]]) -> Response:
        opened = self._open
        if opened is None:
            return _problem(503, "the engine is not ready")
        try:
            admit_admin(request.scope, opened.keys, _NO_TENANTS)
            return JSONResponse(await act(opened, request))
        except RequestError as error:
            return _problem(error.status, str(error))

    async def _statuses(self, opened: _Open) -> list[Status]:
        return [msgspec.convert(plain, Status) for plain in await opened.ask(STATUS)]

    async def _status(self, opened: _Open, request: Request) -> Any:
        return {"engines": await opened.ask(STATUS)}

    async def _knobs(self, opened: _Open, request: Request) -> Any:
        return _knobs_of(await opened.ask(STATUS))

    async def _change(self, opened: _Open, request: Request) -> Any:
        changes = await _body(request)
        answers = await opened.ask(CHANGE, changes)
        refused = [answer["refused"] for answer in answers if "refused" in answer]
        if refused:
            raise RequestError(refused[0], code="invalid_knob")
        who = request.client.host if request.client is not None else "?"
        _LOG.info("knobs changed by %s: %s", who, changes)
        return _knobs_of(answers)


def _knobs_of(statuses: list[dict[str, Any]]) -> dict[str, Any]:
    """The knobs of the first engine core; all have the same."""
    first = statuses[0]
    return {"enabled": first["enabled"], "failed": first["failed"], "knobs": first["knobs"]}


def _ask(engine_core: Any) -> Ask:
    """How to call every engine core behind vLLM's client: all of them where it knows several, else the one."""
    everybody = getattr(engine_core, "call_utility_all_async", None)
    if everybody is not None:
        return everybody  # type: ignore[no-any-return]

    async def one(method: str, *args: Any) -> list[dict[str, Any]]:
        return [await engine_core.call_utility_async(method, *args)]

    return one


async def _body(request: Request) -> Mapping[str, Any]:
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MOST_BODY_BYTES:
            raise RequestError(f"the body may hold {_MOST_BODY_BYTES} bytes")
    try:
        changes = json.loads(data)
    except ValueError as error:
        raise RequestError("the body must be a JSON object of knobs") from error
    if not isinstance(changes, dict) or not changes:
        raise RequestError("the body must be a JSON object of knobs")
    return changes


def _problem(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


class _FreshMetrics:
    """Asks the engine core for its figures before vLLM answers a scrape."""

    def __init__(self, app: ASGIApp, plugin: HeadracePlugin) -> None:
        self._app = app
        self._plugin = plugin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") == "/metrics":
            await self._plugin.refresh()
        await self._app(scope, receive, send)
