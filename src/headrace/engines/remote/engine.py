"""An engine over any OpenAI-compatible server.

A request is always streamed, whatever its client asked for: only a stream shows that tokens still come. Ending one
early closes its connection; vLLM, SGLang and llama-server take that for an abort.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from headrace.engines.output_stream import OutputStream
from headrace.engines.remote.call import Call, CallTimeouts
from headrace.engines.remote.connection import Address, Pool, fetch
from headrace.engines.remote.exposition import EngineFigures, read_exposition
from headrace.engines.remote.request_body import Dialect
from headrace.errors import EngineError, EngineNotReady, RemoteFailure
from headrace.messages.engine import (
    BandPlan,
    EngineLoad,
    EngineSnapshot,
    Knobs,
    ModelInfo,
    Ready,
    Submit,
)

_logger = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES: Final = 8 * 1024 * 1024
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""Of a document that a client asked for: 2048 embeddings of 4096 numbers."""

MODELS_PATH: Final = "/v1/models"
_HEALTH_PATHS: Final = {"vllm": "/health", "sglang": "/health", "llama-server": "/health", "headrace": "/ready"}


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How to speak to one server, and what is known of it. ``api_key`` is sent as a bearer's; ``max_sequences`` and
    ``max_context_tokens`` are what it was started with (the latter may be learned from /v1/models)."""

    address: Address
    dialect: Dialect = field(default_factory=Dialect)
    timeouts: CallTimeouts = field(default_factory=CallTimeouts)
    api_key: str | None = None
    max_sequences: int = 256
    max_context_tokens: int | None = None
    probe_path: str | None = None
    probe_timeout_s: float = 5.0

    @property
    def health_path(self) -> str:
        """What an active probe asks for."""
        return self.probe_path or _HEALTH_PATHS.get(self.dialect.kind, MODELS_PATH)


class RemoteEngine:
    """Implements ``engines.protocol.Engine`` over one server."""

    def __init__(self, settings: RemoteSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self._clock = clock
        self._pool = Pool(settings.address, clock=clock, connect_s=settings.timeouts.connect_s)
        self._dialect = settings.dialect
        self._ready: Ready | None = None
        self._calls: dict[str, Call] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.figures: EngineFigures | None = None
        """What its /metrics said last."""
        headers = f"authorization: Bearer {settings.api_key}\r\n" if settings.api_key else ""
        self._headers = headers.encode("ascii")

    @property
    def ready(self) -> Ready | None:
        return self._ready

    @property
    def load(self) -> EngineLoad | None:
        return None if self._ready is None else self._measure()

    @property
    def in_flight(self) -> int:
        """Requests that the server has."""
        return len(self._calls)

    @property
    def connections(self) -> int:
        return self._pool.connections

    async def start(self) -> Ready:
        """Learn what the server serves. Raises RemoteFailure while it does not answer."""
        if self._pool.closed:
            self._pool = Pool(self.settings.address, clock=self._clock, connect_s=self.settings.timeouts.connect_s)
        model, context = await self._served_model()
        if not self._dialect.model:
            self._dialect = Dialect(self._dialect.kind, model, self._dialect.priority)
        context = self.settings.max_context_tokens or context or 0
        info = ModelInfo(model, "", self._dialect.kind, 0, 0, context, context, 0, 0)
        band = BandPlan(context, self.settings.max_sequences, 0, created=True)
        self._ready = Ready(info, [band], 0, 1, None)
        return self._ready

    async def probe(self) -> None:
        """Ask whether it is well. Raises RemoteFailure when it is not, or does not say so in time."""
        status, _ = await self._get(self.settings.health_path)
        if status != 200:
            raise RemoteFailure(f"the engine's health probe answers {status}", kind="status")

    async def scrape(self) -> EngineFigures:
        """Read its metrics. Raises RemoteFailure when it has none."""
        status, body = await self._get("/metrics")
        if status != 200:
            raise RemoteFailure(f"the engine's /metrics answers {status}", kind="status")
        self.figures = read_exposition(body.decode("utf-8", "replace"))
        return self.figures

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        """POST a JSON object, given without its ``model``, which is the server's own; the answer's status and body.
        Raises RemoteFailure."""
        whole = b'{"model":' + msgspec.json.encode(self._dialect.model) + b"," + body.lstrip()[1:]
        return await fetch(
            self._pool,
            path,
            self._headers,
            limit_bytes=MAX_ANSWER_BYTES,
            timeout_s=self.settings.timeouts.first_token_s,
            body=whole,
        )

    def submit(self, request: Submit) -> OutputStream:
        def begin(stream: OutputStream) -> None:
            if self._ready is None:
                raise EngineNotReady("the engine is not ready")
            if request.request_id in self._calls:
                raise EngineError(f"request id {request.request_id} is already live")
            call = Call(request, stream, self._pool, self._dialect, self.settings.timeouts, self._ended, self._spawn)
            self._calls[request.request_id] = call
            call.start(self._headers)

        def abort(stream: OutputStream) -> None:
            call = self._calls.get(request.request_id)
            if call is not None and call.stream is stream:
                call.abort()

        return OutputStream(begin, abort)

    def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            call.abort()

    async def snapshot(self) -> EngineSnapshot:
        if self._ready is None:
            raise EngineNotReady("the engine is not ready")
        return EngineSnapshot(0, self._measure(), self._ready.bands, list(self._calls), None)

    def set_knobs(self, knobs: Knobs) -> None:
        """Nothing: how a remote engine makes batches cannot be changed from outside."""

    def lose(self) -> None:
        """Not ready any more, until ``start`` succeeds again; what runs goes on."""
        self._ready = None

    async def close(self) -> None:
        self._ready = None
        for call in list(self._calls.values()):
            call.abort()
        self._pool.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, call: Call) -> None:
        if self._calls.get(call.request.request_id) is call:
            del self._calls[call.request.request_id]

    def _spawn(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _get(self, path: str) -> tuple[int, bytes]:
        return await fetch(
            self._pool, path, self._headers, limit_bytes=MAX_DOCUMENT_BYTES, timeout_s=self.settings.probe_timeout_s
        )

    async def _served_model(self) -> tuple[str, int | None]:
        """The name and the context of the first model that the server lists."""
        status, body = await self._get(MODELS_PATH)
        if status != 200:
            raise RemoteFailure(f"the engine's {MODELS_PATH} answers {status}", kind="status")
        try:
            said: Any = msgspec.json.decode(body)
            models = said["data"]
            wanted = [model for model in models if model.get("id") == self._dialect.model]
            model = (wanted or models)[0]
            context = model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx")
            return str(model["id"]), context if isinstance(context, int) else None
        except (msgspec.MsgspecError, LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise RemoteFailure(f"the engine's {MODELS_PATH} lists no model", kind="junk") from error

    def _measure(self) -> EngineLoad:
        """What runs by headrace's own count: the engine's is older."""
        running = [call for call in self._calls.values() if call.begun]
        used = sum(call.context_tokens for call in running)
        settings, ready = self.settings, self._ready
        total = settings.max_sequences * (ready.model.max_context_tokens if ready is not None else 0)
        return EngineLoad(
            running=len(running),
            waiting=len(self._calls) - len(running),
            kv_used_tokens=used,
            kv_total_tokens=max(total, used),
            kv_used_bytes=0,
            kv_total_bytes=0,
            waiting_prefill_tokens=sum(call.request.prompt_count for call in self._calls.values() if not call.begun),
            step_s=0.0,
            decode_tokens=len(running),
            prefill_tokens=0,
            threads=1,
        )
