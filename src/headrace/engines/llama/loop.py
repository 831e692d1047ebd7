"""The engine process's loop: messages in, steps, outputs out."""

from __future__ import annotations

import os
import time

from headrace.engines.llama.build import Engine
from headrace.engines.llama.channel import Channel
from headrace.engines.llama.threads import CpuReader, ThreadState, check_threads, decide, usable_cores
from headrace.errors import EngineError
from headrace.messages.engine import (
    Abort,
    EngineSnapshot,
    GatewayMessage,
    Knobs,
    Shutdown,
    Snapshot,
    Start,
    Submit,
)
from headrace.scheduling.strategies import policy_for

CHORE_PAUSE_S = 0.02
"""How often an idle engine asks whether what it handed over is done."""


class EngineLoop:
    """Serves until the gateway ends it. While a neighbour keeps cores busy, the core computes with fewer
    threads. A prefill pass is cut when a request arrives that would lose its deadline by waiting for its end."""

    def __init__(self, engine: Engine, channel: Channel, *, fixed_threads: bool) -> None:
        self._core = engine.core
        self._channel = channel
        self._max_threads = engine.max_threads
        self._fixed_threads = fixed_threads
        self._cores = usable_cores()
        self._thread_state = ThreadState(engine.core.threads)
        self._cpu = CpuReader(os.getppid(), time.monotonic())
        engine.core.emit = channel.send
        engine.core.cut = self._cut

    def run(self) -> None:
        """Serve until told to shut down. Raises GatewayGone, EngineError."""
        while True:
            for message in self._channel.receive(wait_s=self._wait_s()):
                if isinstance(message, Shutdown):
                    self._core.abort_all()
                    self._channel.send(self._core.step())
                    return
                self._handle(message)
            self._follow_neighbours()
            if self._core.has_work:
                self._channel.send(self._core.step())
            elif self._core.chores is not None:
                done = self._core.do_chores()
                if done is not None:
                    self._channel.send(done)

    def _wait_s(self) -> float | None:
        """How long to sleep for a message; None: until there is one."""
        if self._core.has_work:
            return self._core.pause_s
        chores = self._core.chores
        return None if chores is None else CHORE_PAUSE_S if chores == "soon" else 0.0

    def _handle(self, message: GatewayMessage) -> None:
        match message:
            case Submit():
                self._core.submit(message)
            case Abort():
                self._core.abort(message.request_id)
            case Knobs():
                self._set_knobs(message)
            case Snapshot():
                self._channel.send(self._snapshot(message.ask_id))
            case Start() | Shutdown():
                raise EngineError(f"unexpected {type(message).__name__} message while serving")

    def _cut(self) -> bool:
        """Whether something has arrived that the running pass should be cut for. What arrived is handled after the
        step as ever."""
        now_s = time.monotonic()
        return any(
            [isinstance(message, Submit) and self._core.cut_saves(message, now_s) for message in self._channel.look()]
        )

    def _snapshot(self, ask_id: int) -> EngineSnapshot:
        core = self._core
        return EngineSnapshot(
            ask_id,
            core.load(),
            core.band_plans(),
            core.live_ids(),
            core.check_integrity(),
            list(core.kv_account().holdings),
        )

    def _set_knobs(self, knobs: Knobs) -> None:
        if knobs.scheduling is not None:
            self._core.set_knobs(knobs.scheduling)
            self._core.set_policy(policy_for(knobs.scheduling.strategy))
        if knobs.threads is not None:
            self._max_threads = check_threads(knobs.threads)
            self._fixed_threads = True
            self._thread_state = ThreadState(self._max_threads)
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
