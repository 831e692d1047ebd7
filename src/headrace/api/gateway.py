"""The gateway: admits requests, runs their sequences on the engine, keeps the counts, drains."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.admission.decide import AdmissionLimits, decide, fits_lane
from headrace.admission.ledger import Entry, Ledger
from headrace.api.live import LiveConfig
from headrace.engines.protocol import Engine
from headrace.errors import EngineGone, EngineNotReady, Overloaded
from headrace.lanes.lane import Lane
from headrace.messages.engine import EngineLoad, SequenceOutput, Submit
from headrace.telemetry.metrics import Metrics, Sources
from headrace.telemetry.timing import RequestTiming

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]

RESTART_WAIT_S = 30.0
_RESTART_POLL_S = 0.05
_OUTPUTS_AHEAD = 64


@dataclass(eq=False, slots=True)
class Admitted:
    """One admitted request. ``sequences`` are what goes to the engine; close it with ``Gateway.close``."""

    entry: Entry
    sequences: Sequence[Submit]
    timing: RequestTiming
    place: asyncio.Future[None] | None = None
    sink: Callable[[SequenceOutput], bool] | None = None
    """Takes outputs on the spot while the reader of a single sequence waits for them (``OutputStream``)."""


@dataclass(slots=True)
class _Door:
    """Requests of one lane that wait for a place, first come first served."""

    waiting: deque[Admitted] = field(default_factory=deque)


class Gateway:
    """Between HTTP and the engine. ``clock`` and ``sleep`` are injected; seconds."""

    def __init__(
        self, live: LiveConfig, engine: Engine, metrics: Metrics, *, clock: Clock, sleep: Sleep = asyncio.sleep
    ) -> None:
        self._live = live
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self._sleep = sleep
        self._ledger = Ledger()
        self._doors: dict[str, _Door] = {}
        self._active: set[Admitted] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._seen_load: EngineLoad | None = None
        metrics.watch(Sources(self._ledger.lanes, lambda: engine.load, lambda: engine.ready))

    @property
    def ledger(self) -> Ledger:
        """The counts, for tests and for whoever reports them."""
        return self._ledger

    @property
    def draining(self) -> bool:
        return self._draining

    def not_ready_reason(self) -> str | None:
        """Why new requests would get 503, or None when they would not."""
        if self._draining:
            return "draining"
        self._metrics.engine_seen(self._engine.ready)
        return None if self._engine.ready is not None else "engine_not_ready"

    def require_ready(self) -> None:
        """Raise EngineNotReady while loading, restarting or draining."""
        reason = self.not_ready_reason()
        if reason == "draining":
            raise EngineNotReady("the server is shutting down; send the request to another one")
        if reason is not None:
            raise EngineNotReady("the engine is not ready yet; try again shortly")

    async def admit(self, lane_name: str, lane: Lane, sequences: Sequence[Submit], timing: RequestTiming) -> Admitted:
        """Admit a request, waiting at the door while its lane is full.

        Raises EngineNotReady, or Overloaded with the predicted time until there is room.
        """
        self.require_ready()
        now_s = self._clock()
        limits = AdmissionLimits(self._live.config.server.max_queue, lane.max_queue, lane.max_running)
        decision = decide(self._ledger.state(lane_name, now_s), limits, len(sequences))
        if decision.action == "shed":
            raise Overloaded(
                f"the queue is full ({self._ledger.waiting} sequences wait); "
                f"there should be room in {decision.retry_after_s:.1f} s",
                reason=decision.reason,
                retry_after_s=decision.retry_after_s,
            )
        held = decision.action == "hold"
        tokens = tuple(len(sequence.prompt_tokens) for sequence in sequences)
        entry = self._ledger.admit(lane_name, tokens, held=held, now_s=now_s)
        admitted = Admitted(entry, sequences, timing)
        self._active.add(admitted)
        self._idle.clear()
        if held:
            await self._wait_for_place(admitted)
        return admitted

    def close(self, admitted: Admitted) -> None:
        """The request ended, however: forget it and let held ones of its lane go on."""
        self._ledger.close(admitted.entry)
        self._active.discard(admitted)
        self._open_door(admitted.entry.lane)
        if not self._active:
            self._idle.set()

    def outputs(self, admitted: Admitted) -> AsyncGenerator[tuple[int, SequenceOutput], None]:
        """Run every sequence once and yield ``(sequence index, output)`` as they come.

        Closing the iterator aborts what still runs. Raises EngineNotReady or EngineGone.
        """
        return self._sequence(admitted, 0) if len(admitted.sequences) == 1 else self._merged(admitted)

    async def engine_back(self, admitted: Admitted) -> bool:
        """Wait until the engine is ready again; False when it is not within ``RESTART_WAIT_S``, or when the
        server drains. The request's counts and times start anew."""
        self._ledger.restarted(admitted.entry)
        admitted.timing.restart()
        deadline_s = self._clock() + RESTART_WAIT_S
        while self._engine.ready is None:
            if self._draining or self._clock() >= deadline_s:
                return False
            await self._sleep(_RESTART_POLL_S)
        self._metrics.engine_seen(self._engine.ready)
        return not self._draining

    async def drain(self, timeout_s: float | None = None) -> None:
        """Refuse new requests, let running ones finish within the limit, then abort the rest.

        ``timeout_s`` None takes ``server.drain_timeout_s``. Requests held at the door are refused at once.
        """
        self._draining = True
        limit_s = self._live.config.server.drain_timeout_s if timeout_s is None else timeout_s
        for admitted in list(self._active):
            if admitted.place is not None and not admitted.place.done():
                admitted.place.set_exception(EngineNotReady("the server is shutting down"))
        if await self._idle_within(limit_s):
            return
        for admitted in list(self._active):
            for sequence in admitted.sequences:
                self._engine.abort(sequence.request_id)
        # Aborted sequences end with the engine's next step; a dead engine must not keep the server up.
        await self._idle_within(min(5.0, max(limit_s, 1.0)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, doors and active requests agree."""
        self._ledger.check_integrity()
        for lane, door in self._doors.items():
            held = sum(len(admitted.sequences) for admitted in door.waiting)
            assert held == self._ledger.lane(lane).held, f"lane {lane}: {held} at the door"
        assert self._ledger.empty == (not self._active), "the ledger and the active requests disagree"

    async def _idle_within(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _wait_for_place(self, admitted: Admitted) -> None:
        admitted.place = asyncio.get_running_loop().create_future()
        door = self._doors.setdefault(admitted.entry.lane, _Door())
        door.waiting.append(admitted)
        try:
            await admitted.place
        except BaseException:
            if admitted in door.waiting:
                door.waiting.remove(admitted)
            self.close(admitted)
            raise

    def _open_door(self, lane_name: str) -> None:
        door = self._doors.get(lane_name)
        lane = self._live.config.lanes.get(lane_name)
        while door is not None and door.waiting:
            admitted = door.waiting[0]
            cap = None if lane is None else lane.max_running
            if not fits_lane(self._ledger.lane(lane_name), cap, len(admitted.sequences)):
                return
            door.waiting.popleft()
            self._ledger.release_hold(admitted.entry)
            if admitted.place is not None and not admitted.place.done():
                admitted.place.set_result(None)

    async def _sequence(self, admitted: Admitted, index: int) -> AsyncGenerator[tuple[int, SequenceOutput], None]:
        """One sequence's outputs. An engine that ends them without ``finish`` counts as gone."""
        timing, clock = admitted.timing, self._clock
        outputs = self._engine.submit(admitted.sequences[index])
        first, finished = True, False

        def forward(output: SequenceOutput) -> bool:
            if admitted.sink is None or not admitted.sink(output):
                return False
            timing.output(index, len(output.token_ids), clock())
            self._note_load()
            return True

        if len(admitted.sequences) == 1:
            outputs.forward(forward)
        try:
            async for output in outputs:
                now_s = clock()
                timing.output(index, len(output.token_ids), now_s)
                if first:
                    first = False
                    self._ledger.started(admitted.entry, index, now_s)
                    timing.queue_wait_s = output.queue_wait_s
                self._note_load()
                finished = output.finish is not None
                if finished:
                    self._ledger.ended(admitted.entry, index)
                    self._open_door(admitted.entry.lane)
                yield index, output
                if finished:
                    return
        finally:
            await outputs.aclose()
        raise EngineGone("the engine stopped answering")

    def _note_load(self) -> None:
        """Put the engine's latest load report, when it is a new one, into the metrics."""
        load = self._engine.load
        if load is not self._seen_load and load is not None:
            self._seen_load = load
            self._metrics.step_ended(load)

    async def _merged(self, admitted: Admitted) -> AsyncGenerator[tuple[int, SequenceOutput], None]:
        """Outputs of several sequences in one stream. The queue is bounded: a reader that stops holds the
        sequences' tasks back instead of filling memory."""
        queue: asyncio.Queue[tuple[int, SequenceOutput | Exception]] = asyncio.Queue(_OUTPUTS_AHEAD)

        async def run(index: int) -> None:
            try:
                async with aclosing(self._sequence(admitted, index)) as outputs:
                    async for item in outputs:
                        await queue.put(item)
            except Exception as error:
                await queue.put((index, error))

        tasks = [asyncio.create_task(run(index)) for index in range(len(admitted.sequences))]
        try:
            unfinished = len(tasks)
            while unfinished:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item.finish is not None:
                    unfinished -= 1
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
