"""The pipeline of every endpoint that generates: bytes in, tokens out, in the form of the API that was spoken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Final

from starlette.types import Receive, Scope, Send

from headrace.admission.front import Request
from headrace.api.answer import Answer, check_finish
from headrace.api.body import read_body
from headrace.api.connection import BODY_WRITER_KEY, BodyWriter
from headrace.api.decode import decode
from headrace.api.deps import Deps
from headrace.api.disconnect import CancelOnDisconnect
from headrace.api.errors import to_http
from headrace.api.exchange import Exchange, exchange_of, header, header_value
from headrace.api.fleet_plan import make_fleet_plan
from headrace.api.gateway import Admitted, Gateway
from headrace.api.metadata import check_metadata
from headrace.api.plan import Plan, make_plan
from headrace.api.quotas import TenantQuota, tenant_quota
from headrace.api.reply import send_json
from headrace.api.surface import Format, Generation, Inbound, Keep, Surface
from headrace.api.wire import ChatRequest
from headrace.config.schema import Config
from headrace.errors import EngineError, EngineGone, EngineNotReady, RequestError
from headrace.messages.engine import SequenceOutput

_logger = logging.getLogger(__name__)
_EVENT_STREAM: Final = b"text/event-stream; charset=utf-8"

Outputs = AsyncGenerator[tuple[int, SequenceOutput], None]


class Generate:
    """ASGI endpoint that generates, for one API."""

    def __init__(self, deps: Deps, surface: Surface) -> None:
        self._deps = deps
        self._surface = surface

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deps, exchange = self._deps, exchange_of(scope)
        config = deps.live.config
        exchange.measured = True
        authenticate(deps, scope, exchange)
        with tenant_quota(deps, config, exchange) as quota:
            await self._generate(config, exchange, quota, scope, receive, send)

    async def _generate(
        self, config: Config, exchange: Exchange, quota: TenantQuota, scope: Scope, receive: Receive, send: Send
    ) -> None:
        deps = self._deps
        body = await read_body(scope, receive, config.server)
        inbound = await self._surface.read(body, scope, exchange)
        request: Generation
        if deps.fleet is None:
            request, ignored = decode(inbound.body, inbound.kind, config.server.unsupported_params)
            exchange.ignored += ignored
            _check_metadata(request)
            _refuse_remote_only(inbound)
        async with CancelOnDisconnect(receive):
            if deps.fleet is None:
                plan = await make_plan(deps, config, scope, exchange, request)
            else:
                plan, request = await make_fleet_plan(deps, config, scope, exchange, inbound.body, inbound.kind)
                _check_metadata(request)
                if not plan.remote:
                    _refuse_remote_only(inbound)
            assert exchange.timing is not None
            quota.charge(plan.sequences)
            asked = Request(plan.lane.name, plan.lane.lane, plan.slo, plan.sequences)
            admitted = await deps.gateway.admit(asked, exchange.timing)
            exchange.admitted(admitted.verdict)
            try:
                form, keep = inbound.form(plan), inbound.keep(request)
                await self._answer(plan, form, keep, admitted, exchange, send, scope.get(BODY_WRITER_KEY))
            finally:
                deps.gateway.close(admitted)

    async def _answer(
        self,
        plan: Plan,
        form: Format,
        keep: Keep | None,
        admitted: Admitted,
        exchange: Exchange,
        send: Send,
        write: BodyWriter | None,
    ) -> None:
        if plan.stream:
            answers = [Answer(keep_text=keep is not None) for _ in plan.sequences]
            await self._stream(form, answers, admitted, exchange, send, write, keep)
            self._learn(plan, answers)
            return
        answers = await collect(self._deps.gateway, plan, admitted)
        self._learn(plan, answers)
        self._say_degraded(admitted, exchange)
        body = form.body(answers)
        if keep is not None:
            await _store(keep, body)
        await send_json(send, exchange, body)

    async def _stream(
        self,
        form: Format,
        answers: list[Answer],
        admitted: Admitted,
        exchange: Exchange,
        send: Send,
        write: BodyWriter | None,
        keep: Keep | None,
    ) -> None:
        """Server-sent events. Nothing is sent until the first output is known, so what goes wrong before it
        has a real HTTP status; what goes wrong after it becomes an error event."""
        outputs, (index, output) = await first_output(self._deps.gateway, admitted)
        async with aclosing(outputs):
            check_finish(output)
            self._say_degraded(admitted, exchange)
            exchange.status = 200
            headers = exchange.headers(_EVENT_STREAM)
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            answers[index].add(output)
            await _send_event(send, form.opening() + form.chunk(index, output))
            if write is not None:
                admitted.sink = partial(_write_output, write, form, answers[0])
            try:
                async for index, output in outputs:
                    if output.finish is not None:
                        check_finish(output)
                    answers[index].add(output)
                    event = form.chunk(index, output)
                    if event:
                        await _send_event(send, event)
            except EngineError as error:
                exchange.outcome = "error"
                await send({"type": "http.response.body", "body": form.failure(to_http(error))})
                return
        closing = form.closing(answers)
        if keep is not None:
            await _store(keep, form.body(answers))
        await send({"type": "http.response.body", "body": closing})

    def _say_degraded(self, admitted: Admitted, exchange: Exchange) -> None:
        """In degraded mode the response says so."""
        if self._deps.fleet is None:
            return
        for sequence in admitted.sequences:
            how = self._deps.fleet.degradation(sequence.request_id)
            if how is not None:
                exchange.extra_headers.append((b"x-headrace-degraded", header_value(how)))
                return

    def _learn(self, plan: Plan, answers: list[Answer]) -> None:
        """What the engine counted in a prompt that was only estimated."""
        for sequence, answer in zip(plan.sequences, answers, strict=True):
            if plan.remote and sequence.wire is not None and answer.finish and answer.tokens:
                self._deps.prompt_sizes.learn(plan.model, len(sequence.wire.prompt), answer.prompt_tokens)


async def _store(keep: Keep, body: dict[str, object]) -> None:
    try:
        await asyncio.to_thread(keep, body)
    except OSError as error:
        # The answer exists and is worth more to the client than its copy on disk.
        _logger.error("completion %s could not be stored: %s", body.get("id"), error)


def _check_metadata(request: Generation) -> None:
    if isinstance(request, ChatRequest):
        check_metadata(request.metadata)


def _refuse_remote_only(inbound: Inbound) -> None:
    """Raise RequestError for what the embedded engine would answer in another form than was asked for."""
    if inbound.remote_only is not None:
        raise RequestError(
            f"{inbound.remote_only}: the embedded engine of this lane cannot do that; a lane can whose group and"
            " fallback are remote engines",
            param=inbound.remote_only,
            code="unsupported_parameter",
        )


def authenticate(deps: Deps, scope: Scope, exchange: Exchange) -> None:
    """Note the tenant. Raises AuthenticationFailed."""
    authorization = header(scope, b"authorization")
    if authorization is None and exchange.error_form == "anthropic":
        key = header(scope, b"x-api-key")
        authorization = None if key is None else f"Bearer {key}"
    exchange.tenant = deps.live.tenants.authenticate(authorization, header(scope, b"x-tenant-id"))


async def collect(gateway: Gateway, plan: Plan, admitted: Admitted) -> list[Answer]:
    """Every sequence's whole answer. When the engine dies it is tried once more, for no byte was sent yet.

    Raises EngineError.
    """
    retried = False
    while True:
        answers = [Answer() for _ in plan.sequences]
        try:
            async with aclosing(gateway.outputs(admitted)) as outputs:
                async for index, output in outputs:
                    if output.finish is not None:
                        check_finish(output)
                    answers[index].add(output)
            return answers
        except (EngineGone, EngineNotReady):
            if retried or not await gateway.engine_back(admitted):
                raise
            retried = True


async def first_output(gateway: Gateway, admitted: Admitted) -> tuple[Outputs, tuple[int, SequenceOutput]]:
    """The outputs' iterator and its first item; tried once more when the engine dies before it.

    The caller closes the iterator. Raises EngineError.
    """
    retried = False
    while True:
        outputs = gateway.outputs(admitted)
        try:
            return outputs, await anext(outputs)
        except (EngineGone, EngineNotReady):
            await outputs.aclose()
            if retried or not await gateway.engine_back(admitted):
                raise
            retried = True
        except BaseException:
            await outputs.aclose()
            raise


def _write_output(write: BodyWriter, form: Format, answer: Answer, output: SequenceOutput) -> bool:
    """A stream's usual token, from the engine's message to the client's socket without a task between."""
    event = form.chunk(0, output)
    if event and not write(event):
        return False
    answer.add(output)
    return True


async def _send_event(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})
