"""The engine process: a socket to the gateway on one side, an ``EngineCore`` on the other.

One thread. Between two steps it takes in whatever messages have arrived; with nothing to do it sleeps in
the socket. It ends when the gateway says so or is gone. Run by ``client.LlamaEngine`` as
``python -m headrace.engines.llama.process FD``.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import psutil

from headrace.engines.llama import library as llama_library
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.measure import measure
from headrace.engines.llama.threads import CpuReader, ThreadState, check_threads, decide, usable_cores
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.errors import EngineError, HeadraceError
from headrace.kv.budget import fit_bands
from headrace.messages import framing
from headrace.messages.engine import (
    Abort,
    EngineMessage,
    EngineSnapshot,
    Fatal,
    GatewayMessage,
    Knobs,
    Ready,
    Shutdown,
    Snapshot,
    Start,
    Submit,
)
from headrace.scheduling.bands import Band
from headrace.scheduling.step import DecodeFirst, StepLimits

_RECEIVE_BYTES = 1 << 18


class GatewayGone(Exception):
    """The other end of the socket is closed: nobody is left to serve."""


class Channel:
    """Messages over the socket that the gateway handed down."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = framing.FrameBuffer()

    def receive(self, *, wait: bool) -> list[GatewayMessage]:
        """Every message that has arrived; with ``wait`` sleeps until there is one. Raises GatewayGone."""
        messages: list[GatewayMessage] = []
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionError as error:
                raise GatewayGone from error
            if not data:
                raise GatewayGone
            messages.extend(framing.decode_for_engine(body) for body in self._frames.feed(data))
            if messages and len(data) < _RECEIVE_BYTES:
                return messages

    def send(self, message: EngineMessage) -> None:
        """Send one message, waiting while the gateway is slow to read. Raises GatewayGone."""
        try:
            self._socket.sendall(framing.encode(message))
        except ConnectionError as error:
            raise GatewayGone from error


def build_core(start: Start) -> tuple[EngineCore, Ready]:
    """Load the model, fit bands to memory, create the first context, measure. Raises HeadraceError."""
    library = llama_library.load()
    weights = Weights(library, Path(start.model_path), gpu_layers=start.gpu_layers)
    vocabulary = Vocabulary(weights)
    budget_bytes = start.memory_budget_bytes or psutil.virtual_memory().available // 2
    budget = fit_bands(
        [Band(tokens, sequences) for tokens, sequences in start.bands],
        weights.kv_bytes_per_token(),
        budget_bytes,
        library.api.llama_model_n_ctx_train(weights.handle),
    )
    core = EngineCore(
        library,
        weights,
        vocabulary,
        budget,
        DecodeFirst(),
        limits=StepLimits(start.step_tokens, start.prefill_chunk_tokens),
        threads=check_threads(start.threads),
    )
    first = core.context(0)
    measurement = measure(first, weights.vocab_size) if start.self_measure else None
    ready = Ready(
        model=weights.info(start.model_name, budget.bands[-1].max_context_tokens),
        bands=core.band_plans(),
        memory_budget_bytes=budget_bytes,
        reductions=list(budget.reductions),
        threads=core.threads,
        measurement=measurement,
        processor=library.system_info(),
    )
    return core, ready


class EngineLoop:
    """Messages in, steps, outputs out, until the gateway ends it."""

    def __init__(self, core: EngineCore, channel: Channel, *, fixed_threads: bool) -> None:
        self._core = core
        self._channel = channel
        self._max_threads = core.threads
        self._fixed_threads = fixed_threads
        self._cores = usable_cores()
        now_s = time.monotonic()
        self._thread_state = ThreadState(core.threads)
        self._cpu = CpuReader(os.getppid(), now_s)

    def run(self) -> None:
        """Serve until told to shut down. Raises GatewayGone, EngineError."""
        while True:
            for message in self._channel.receive(wait=not self._core.has_work):
                if isinstance(message, Shutdown):
                    self._core.abort_all()
                    self._channel.send(self._core.step())
                    return
                self._handle(message)
            if self._core.has_work:
                self._follow_neighbours()
                self._channel.send(self._core.step())

    def _handle(self, message: GatewayMessage) -> None:
        match message:
            case Submit():
                self._core.submit(message)
            case Abort():
                self._core.abort(message.request_id)
            case Knobs():
                self._set_knobs(message)
            case Snapshot():
                self._channel.send(
                    EngineSnapshot(
                        message.ask_id,
                        self._core.load(),
                        self._core.band_plans(),
                        self._core.live_ids(),
                        self._core.check_integrity(),
                    )
                )
            case Start() | Shutdown():
                raise EngineError(f"unexpected {type(message).__name__} message while serving")

    def _set_knobs(self, knobs: Knobs) -> None:
        limits = self._core.limits
        self._core.set_limits(
            StepLimits(
                knobs.step_tokens if knobs.step_tokens is not None else limits.step_tokens,
                knobs.prefill_chunk_tokens if knobs.prefill_chunk_tokens is not None else limits.prefill_chunk_tokens,
                limits.band_margin_tokens,
            )
        )
        if knobs.threads is not None:
            self._max_threads = check_threads(knobs.threads)
            self._fixed_threads = True
            self._core.set_threads(self._max_threads)

    def _follow_neighbours(self) -> None:
        """Adjust the number of threads to what other processes leave free."""
        if self._fixed_threads:
            return
        reading = self._cpu.read(time.monotonic())
        if reading is None:
            return
        self._thread_state = decide(self._thread_state, reading, cores=self._cores, max_threads=self._max_threads)
        if self._thread_state.threads != self._core.threads:
            self._core.set_threads(self._thread_state.threads)


def main(arguments: list[str]) -> int:
    """Entry point of the process; ``arguments`` is the socket's file descriptor. Returns the exit code."""
    # The gateway decides when to stop; a Ctrl-C or a service manager's SIGTERM reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    try:
        first, *rest = channel.receive(wait=True)
        if not isinstance(first, Start) or rest:
            raise EngineError("the first message must be Start, alone")
        core, ready = build_core(first)
        channel.send(ready)
        # What was loaded stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        EngineLoop(core, channel, fixed_threads=first.threads is not None).run()
    except GatewayGone:
        return 0
    except HeadraceError as error:
        channel.send(Fatal(str(error)))
        return 1
    return 0


def _exit(code: int) -> NoReturn:
    # libllama's and OpenMP's own exit handlers are slow and can hang; everything was already given back.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _exit(main(sys.argv[1:]))
