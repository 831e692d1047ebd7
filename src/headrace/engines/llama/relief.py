"""The relief core: a second, single-threaded core that works while a neighbour keeps cores busy.

Threads that share one forward pass wait for each other at every operation, so a pass spread over a contended
core runs at that core's pace, and the engine then computes with the cores that are free. That leaves unused
what the contended core would still give. The relief core takes it: another set of streams over the same
weights, stepped on a thread of its own, which nobody waits for. New short sequences go to whichever core
should finish them first; a sequence stays where it began.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from headrace.engines.llama.channel import GatewayGone
from headrace.engines.llama.core import EngineCore
from headrace.errors import EngineError
from headrace.messages.engine import EngineLoad, StepOutput, Submit
from headrace.scheduling.step import StepLimits

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.1
RELIEF_SPEED = 0.5
"""The relief's speed against the core's: a thread beside one busy neighbour gets half a core."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the relief core says of itself."""

    load: EngineLoad
    sequences: list[str]
    integrity: str | None


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


_Item = Submit | _Abort | StepLimits | Future[Inspection] | None


def prefer_relief(core_live: int, relief_live: int, relief_speed: float = RELIEF_SPEED) -> bool:
    """True when one more sequence should get more tokens per second from the relief: each core shares its
    speed among its live sequences."""
    return (relief_live + 1) / relief_speed < core_live + 1


class Relief:
    """Owner of the relief core and its thread. Its methods are called from the engine loop's thread."""

    def __init__(self, make_core: Callable[[], EngineCore], send: Callable[[StepOutput], None]) -> None:
        self._make_core = make_core
        self._send = send
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._core: EngineCore | None = None
        self._core_load: EngineLoad | None = None
        self._load: EngineLoad | None = None
        self._gone = False

    @property
    def live_count(self) -> int:
        """Sequences that the relief has, those on their way to it included."""
        return self._inbox.qsize() + self._core.live_count if self._core is not None else 0

    def prepare(self) -> None:
        """Create the core, on its thread: the memory takes a moment and nobody should wait for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headrace-relief", daemon=True)
            self._thread.start()

    def takes(self, request: Submit, core_live: int, crowded: bool) -> bool:
        """Whether a new sequence goes to the relief: while crowded, when it fits the relief's band for good
        (it cannot be promoted) and should run faster there."""
        if not crowded or self._core is None or self._gone or request.max_tokens is None:
            return False
        fits = len(request.prompt_tokens) + request.max_tokens <= self._core.max_context_tokens
        return fits and prefer_relief(core_live, self.live_count)

    def submit(self, request: Submit) -> None:
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        if self._core is not None:
            self._inbox.put(_Abort(request_id))

    def set_limits(self, limits: StepLimits) -> None:
        """New live limits; kept until the core exists."""
        self._inbox.put(limits)

    def inspect(self) -> Inspection | None:
        """Ask the core for its state, between two of its steps; None while there is no core."""
        if self._core is None or self._gone:
            return None
        answer: Future[Inspection] = Future()
        self._inbox.put(answer)
        while self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                return answer.result(timeout=_LOOK_AGAIN_S)
        return None  # the thread ended between the question and the answer

    def stop(self) -> None:
        """End every sequence and the thread; returns when it is over."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()

    def with_both_loads(self, output: StepOutput) -> StepOutput:
        """A step of the main core, its load report extended by the relief's."""
        if output.load is None:
            return output
        self._core_load = output.load
        return self._reported(output)

    def _reported(self, output: StepOutput) -> StepOutput:
        if output.load is None or self._core_load is None or self._load is None:
            return output
        both = combined(self._core_load, self._load)
        load = msgspec.structs.replace(
            both,
            step_s=output.load.step_s,
            decode_tokens=output.load.decode_tokens,
            prefill_tokens=output.load.prefill_tokens,
        )
        return msgspec.structs.replace(output, load=load)

    def _run(self) -> None:
        try:
            core = self._make_core()
        except EngineError as error:
            log.warning("no relief while neighbours are busy: %s", error)
            return
        self._core = core
        try:
            while self._take_in(core):
                if core.has_work:
                    self._step(core)
        except GatewayGone:
            pass  # the engine loop learns the same from its own end of the socket
        finally:
            self._gone = True

    def _take_in(self, core: EngineCore) -> bool:
        """Handle what has arrived, waiting when there is nothing to compute; False at the end."""
        wait = not core.has_work
        while True:
            try:
                item = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            match item:
                case Submit():
                    core.submit(item)
                case _Abort():
                    core.abort(item.request_id)
                case StepLimits():
                    core.set_limits(item)
                case Future():
                    item.set_result(Inspection(core.load(), core.live_ids(), core.check_integrity()))
                case None:
                    core.abort_all()
                    self._step(core)
                    core.close()
                    return False

    def _step(self, core: EngineCore) -> None:
        output = core.step()
        if output.load is not None:
            self._load = output.load
        self._send(self._reported(output))


def combined(one: EngineLoad, other: EngineLoad) -> EngineLoad:
    """The load of two cores over the same weights; the step's own figures are ``one``'s."""
    return EngineLoad(
        running=one.running + other.running,
        waiting=one.waiting + other.waiting,
        kv_used_tokens=one.kv_used_tokens + other.kv_used_tokens,
        kv_total_tokens=one.kv_total_tokens + other.kv_total_tokens,
        kv_used_bytes=one.kv_used_bytes + other.kv_used_bytes,
        kv_total_bytes=one.kv_total_bytes + other.kv_total_bytes,
        waiting_prefill_tokens=one.waiting_prefill_tokens + other.waiting_prefill_tokens,
        step_s=one.step_s,
        decode_tokens=one.decode_tokens,
        prefill_tokens=one.prefill_tokens,
        threads=one.threads + (1 if other.running else 0),
    )
