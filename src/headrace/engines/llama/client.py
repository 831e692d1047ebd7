"""The gateway's side of the embedded engine: starts the process, talks to it, restarts it when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from headrace.engines.output_stream import OutputStream
from headrace.errors import EngineError, EngineGone, EngineNotReady, ModelError
from headrace.messages import framing
from headrace.messages.engine import (
    Abort,
    EngineLoad,
    EngineMessage,
    EngineSnapshot,
    Fatal,
    GatewayMessage,
    Knobs,
    Ready,
    Shutdown,
    Snapshot,
    Start,
    StepOutput,
    Submit,
)

log = logging.getLogger(__name__)

FIRST_RESTART_DELAY_S = 0.2
MAX_RESTART_DELAY_S = 10.0
CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """``start_s``: from process start to ready. ``stall_s``: the longest a busy engine may be silent."""

    start_s: float = 120.0
    stall_s: float = 120.0


class _Connection(asyncio.Protocol):
    """Bytes from the engine process, handed on as messages."""

    def __init__(self, on_message: Callable[[EngineMessage], None], on_lost: Callable[[str | None], None]) -> None:
        self._frames = framing.FrameBuffer()
        self._on_message = on_message
        self._on_lost = on_lost
        self._problem: str | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are not asyncio's classes.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._on_message(framing.decode_for_gateway(body))
        except EngineError as error:
            self._problem = str(error)
            if self.transport is not None:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost(self._problem or (str(exc) if exc is not None else None))

    def send(self, message: GatewayMessage) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(framing.encode(message))


class LlamaEngine:
    """Implements ``engines.protocol.Engine`` over one engine process.

    When the process dies, running sequences raise EngineGone, ``ready`` becomes None, and a new process is
    started until one is ready or ``close`` is called.
    """

    def __init__(
        self,
        start: Start,
        timeouts: EngineTimeouts = EngineTimeouts(),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._timeouts = timeouts
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._connection: _Connection | None = None
        self._ready: Ready | None = None
        self._ready_before: Ready | None = None
        self._load: EngineLoad | None = None
        self._streams: dict[str, OutputStream] = {}
        self._snapshots: dict[int, asyncio.Future[EngineSnapshot]] = {}
        self._next_ask = 0
        self._arrival: asyncio.Future[Ready] | None = None
        self._lost: asyncio.Event = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._knobs: Knobs | None = None
        self._last_heard_s = clock()
        self.restarts = 0

    @property
    def ready(self) -> Ready | None:
        return self._ready

    @property
    def load(self) -> EngineLoad | None:
        return self._load

    @property
    def pid(self) -> int | None:
        """Process id of the engine process, None when there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> Ready:
        try:
            ready = await self._launch()
        except BaseException:
            await self._reap()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="headrace-engine-supervisor")
        return ready

    async def _launch(self) -> Ready:
        """Start one process and wait until it is ready. Raises ModelError, EngineError."""
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise EngineError(f"no socket for the engine process: {error}") from error
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headrace.engines.llama.process",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise EngineError(f"the engine process cannot be started: {error}") from error
        except asyncio.CancelledError:
            ours.close()  # a process that was started all the same ends with it
            raise
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        self._arrival = loop.create_future()
        self._lost = asyncio.Event()
        ours.setblocking(False)
        _, connection = await loop.create_unix_connection(
            lambda: _Connection(self._on_message, self._on_lost), sock=ours
        )
        self._connection = connection
        # A restart has no time for measuring: requests wait for it.
        again = self._ready_before is not None
        connection.send(msgspec.structs.replace(self._start, self_measure=False) if again else self._start)
        try:
            async with asyncio.timeout(self._timeouts.start_s):
                ready = await self._arrival
        except TimeoutError as error:
            raise EngineError(
                f"the engine was not ready within {self._timeouts.start_s:g} s (engine.start_timeout_s)"
            ) from error
        self._last_heard_s = self._clock()
        self._ready = self._ready_before = ready
        # Set before it was ready, or on a process before this one.
        if self._knobs is not None:
            connection.send(self._knobs)
        return ready

    def _on_message(self, message: EngineMessage) -> None:
        self._last_heard_s = self._clock()
        if isinstance(message, StepOutput):  # by far the most frequent: asked for first, by type alone
            self._on_step(message)
            return
        match message:
            case Ready():
                if self._arrival is not None and not self._arrival.done():
                    self._arrival.set_result(message)
            case EngineSnapshot():
                future = self._snapshots.pop(message.ask_id, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case Fatal():
                log.error("engine: %s", message.message)
                if self._arrival is not None and not self._arrival.done():
                    self._arrival.set_exception(ModelError(message.message))

    def _on_step(self, step: StepOutput) -> None:
        if step.load is not None:
            self._load = step.load
        streams = self._streams
        for output in step.outputs:
            # The last output ends the id's life in the engine, however late its reader comes.
            take = streams.get if output.finish is None else streams.pop
            stream = take(output.request_id, None)
            if stream is not None:
                stream.push(output)

    def _on_lost(self, problem: str | None) -> None:
        """The socket closed: the process is gone or of no use any more."""
        self._ready = None
        self._load = None
        reason = f"the engine process ended while the request ran{f' ({problem})' if problem else ''}"
        for stream in self._streams.values():
            stream.push(EngineGone(reason))
        self._streams.clear()
        for future in self._snapshots.values():
            if not future.done():
                future.set_exception(EngineGone(reason))
        self._snapshots.clear()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_exception(EngineError("the engine process ended before it was ready"))
        self._lost.set()

    async def _supervise(self) -> None:
        """Restart the process whenever it is lost or hangs, until ``close`` cancels this task."""
        while True:
            await self._wait_until_lost()
            log.warning("engine process lost; restarting")
            delay_s = FIRST_RESTART_DELAY_S
            while not await self._relaunch():
                log.error("next try in %.1f s", delay_s)
                await asyncio.sleep(delay_s)
                delay_s = min(MAX_RESTART_DELAY_S, delay_s * 2)
            self.restarts += 1
            log.warning("engine process is back")

    async def _relaunch(self) -> bool:
        """Replace a lost process; False when the new one does not become ready."""
        await self._reap()
        try:
            await self._launch()
        except (EngineError, ModelError) as error:
            log.error("the engine does not come back: %s", error)
            return False
        return True

    async def _wait_until_lost(self) -> None:
        """Return when the connection is lost; kill a process that has work but reports no step."""
        while not self._lost.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, min(1.0, self._timeouts.stall_s / 4))):
                    await self._lost.wait()
            silent_s = self._clock() - self._last_heard_s
            if (self._streams or self._snapshots) and silent_s > self._timeouts.stall_s and self._process is not None:
                log.error("engine silent for %.0f s with work to do; killing it", silent_s)
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()

    async def _reap(self) -> None:
        """Make sure that no process and no connection is left."""
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.abort()
        self._connection = None
        process = self._process
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
            await process.wait()
            self._process = None  # not before: whoever is cancelled while waiting leaves it to the next

    def submit(self, request: Submit) -> OutputStream:
        def begin(stream: OutputStream) -> None:
            if self._ready is None or self._connection is None:
                raise EngineNotReady("the engine is not ready")
            if request.request_id in self._streams:
                raise EngineError(f"request id {request.request_id} is already live")
            self._expect_answer()
            self._streams[request.request_id] = stream
            self._connection.send(request)

        def abort(stream: OutputStream) -> None:
            # Until the engine says that it ended, the id stays taken: its outputs may still be on their way.
            if self._connection is not None and self._streams.get(request.request_id) is stream:
                self._connection.send(Abort(request.request_id))

        return OutputStream(begin, abort)

    def _expect_answer(self) -> None:
        """The silence that counts begins with the first thing asked of an idle engine."""
        if not self._streams and not self._snapshots:
            self._last_heard_s = self._clock()

    def abort(self, request_id: str) -> None:
        if self._connection is not None and request_id in self._streams:
            self._connection.send(Abort(request_id))

    async def snapshot(self) -> EngineSnapshot:
        if self._ready is None or self._connection is None:
            raise EngineNotReady("the engine is not ready")
        self._expect_answer()
        self._next_ask += 1
        future: asyncio.Future[EngineSnapshot] = asyncio.get_running_loop().create_future()
        self._snapshots[self._next_ask] = future
        self._connection.send(Snapshot(self._next_ask))
        return await future

    def set_knobs(self, knobs: Knobs) -> None:
        # Kept for the next process: a restart must not undo what an operator set.
        self._knobs = knobs if self._knobs is None else _merged(self._knobs, knobs)
        # A process that is not ready reads Start alone, and gets these when it is.
        if self._connection is not None and self._ready is not None:
            self._connection.send(knobs)

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        self._ready = None
        if self._connection is not None and self._process is not None:
            self._connection.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._lost.wait()
        await self._reap()


def _merged(earlier: Knobs, later: Knobs) -> Knobs:
    """Both changes in one: the later value of each knob that either sets."""
    return Knobs(
        **{
            name: getattr(later, name) if getattr(later, name) is not None else getattr(earlier, name)
            for name in Knobs.__struct_fields__
        }
    )
