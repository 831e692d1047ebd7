"""The seam between one pipeline that generates and the APIs that are spoken over it.

Each API reads its own body, says it as a chat or text completion, and writes the answer in its own form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from starlette.types import Scope

from headrace.api.answer import Answer
from headrace.api.chat_format import ChatFormat
from headrace.api.completion_format import CompletionFormat
from headrace.api.deps import Deps
from headrace.api.errors import HttpError
from headrace.api.exchange import Exchange
from headrace.api.plan import Plan
from headrace.api.store import StoredCompletion
from headrace.api.wire import ChatRequest, CompletionRequest
from headrace.messages.engine import SequenceOutput

Generation = ChatRequest | CompletionRequest
Keep = Callable[[dict[str, Any]], None]
"""Writes a whole answer to disk: call it in a thread. Raises OSError."""


class Format(Protocol):
    """Writes one request's answer, as events or whole."""

    def opening(self) -> bytes:
        """What comes before the first output."""

    def chunk(self, index: int, output: SequenceOutput) -> bytes:
        """One output as events; empty when there is nothing to show. An output that could not be written is asked for
        again before the next one."""

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """What ends a stream that went well."""

    def failure(self, error: HttpError) -> bytes:
        """What ends a stream that broke."""

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole answer."""


@dataclass(frozen=True, slots=True)
class Inbound:
    """A request as the pipeline takes it: the JSON of a chat or text completion, and how to answer it.

    ``keep`` says what to do with the whole answer of a request that is to be stored. ``remote_only`` names the field
    that the embedded engine cannot serve, where there is one.
    """

    body: bytes
    kind: type[ChatRequest] | type[CompletionRequest]
    form: Callable[[Plan], Format]
    keep: Callable[[Generation], Keep | None]
    remote_only: str | None = None


class Surface(Protocol):
    """One API."""

    async def read(self, body: bytes, scope: Scope, exchange: Exchange) -> Inbound:
        """Raises RequestError and its kin."""


class OpenAISurface:
    """Chat and text completions: what the pipeline itself speaks."""

    def __init__(self, deps: Deps, kind: type[ChatRequest] | type[CompletionRequest]) -> None:
        self._deps = deps
        self._kind = kind
        self._form: Final = ChatFormat if kind is ChatRequest else CompletionFormat

    async def read(self, body: bytes, scope: Scope, exchange: Exchange) -> Inbound:
        return Inbound(body, self._kind, self._form, lambda request: self._keep(request, exchange.tenant))

    def _keep(self, request: Generation, tenant: str | None) -> Keep | None:
        if not isinstance(request, ChatRequest) or not request.store:
            return None
        messages = [msgspec.to_builtins(message) for message in request.messages]

        def keep(body: dict[str, Any]) -> None:
            completion = {**body, "metadata": request.metadata or {}}
            self._deps.store.put(StoredCompletion(tenant=tenant, completion=completion, messages=messages))

        return keep
