"""The gateway: admits requests, runs their sequences on the engine, keeps the counts, drains."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.admission.decide import AdmissionLimits, fits_lane
from headrace.admission.front import Front, Request, Ticket, Verdict
from headrace.admission.ledger import Entry, Ledger
from headrace.admission.memory import REASON as KV_REASON
from headrace.admission.memory import MemoryState, memory_state
from headrace.admission.rates import rates_of
from headrace.api.live import LiveConfig
from headrace.config.knobs import KnobChange
from headrace.config.scheduling import scheduling_knobs
from headrace.engines.protocol import Engine
from headrace.errors import EngineGone, EngineNotReady, Overloaded
from headrace.lanes.lane import Lane
from headrace.messages.engine import EngineLoad, Knobs, SequenceOutput, Submit
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.telemetry.kv_events import KvEvents
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.moment import Sources
from headrace.telemetry.timing import RequestTiming

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]

RESTART_WAIT_S = 30.0
_RESTART_POLL_S = 0.05
_OUTPUTS_AHEAD = 64


@dataclass(eq=False, slots=True)
class Admitted:
    """One admitted request; close it with ``Gateway.close``."""

    ticket: Ticket
    timing: RequestTiming
    place: asyncio.Future[None] | None = None
    sink: Callable[[SequenceOutput], bool] | None = None
    """Takes outputs on the spot while the reader of a single sequence waits for them (``OutputStream``)."""

    @property
    def entry(self) -> Entry:
        return self.ticket.entry

    @property
    def verdict(self) -> Verdict:
        return self.ticket.verdict

    @property
    def sequences(self) -> Sequence[Submit]:
        """What goes to the engine: what was asked for, or the degraded form of it."""
        return self.verdict.sequences


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
        self._front = Front()
        self._ledger = self._front.ledger
        self._knobs = scheduling_knobs(live.config)
        self._doors: dict[str, _Door] = {}
        self._active: set[Admitted] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._seen_load: EngineLoad | None = None
        self._kv_events = KvEvents(metrics)
        metrics.watch(
            Sources(
                lanes=self._ledger.lanes,
                load=lambda: engine.load,
                ready=lambda: engine.ready,
                lengths=self._front.lengths.learned,
                ttft_errors=self._front.accuracy.errors,
            )
        )
        live.watch(self._scheduling_changed)

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

    def expected_tokens(self, lane_name: str, lane: Lane, max_tokens: int | None) -> int:
        """The output length that the lane's requests with this limit usually have."""
        return self._front.expected_length(lane_name, lane, max_tokens).expected_tokens

    async def admit(self, request: Request, timing: RequestTiming) -> Admitted:
        """Admit a request, waiting at the door while its lane is full; degrade it where its lane says so.

        Raises EngineNotReady, or Overloaded with the predicted time until there is room.
        """
        self.require_ready()
        self._note_load()
        now_s, lane = self._clock(), request.lane
        limits = AdmissionLimits(self._live.config.server.max_queue, lane.max_queue, lane.max_running)
        rates = rates_of(self._engine.load, self._engine.ready, self._knobs)
        memory = memory_state(self._engine.load, self._knobs)
        verdict = self._front.judge(request, limits, rates, now_s, memory)
        self._metrics.admission_decided(request.lane_name, verdict)
        if verdict.decision.action == "shed":
            raise _overloaded(verdict, self._ledger.waiting, memory)
        admitted = Admitted(self._front.admit(request, verdict), timing)
        self._active.add(admitted)
        self._idle.clear()
        if verdict.decision.action == "hold":
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
        self._front.restarted(admitted.ticket)
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

    def _scheduling_changed(self, scheduling: SchedulingKnobs, changes: Sequence[KnobChange]) -> None:
        """Live values have others than before: the engine gets them whole, and whoever waits at a door that is
        wider now may come in."""
        self._knobs = scheduling
        self._engine.set_knobs(Knobs(scheduling=scheduling))
        self._metrics.knobs_changed(change.name for change in changes)
        for lane in self._doors:
            self._open_door(lane)

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
        timing, clock, entry, ledger = admitted.timing, self._clock, admitted.entry, self._ledger
        outputs = self._engine.submit(admitted.sequences[index])
        first_s: float | None = None
        finished = False

        def forward(output: SequenceOutput) -> bool:
            if admitted.sink is None or not admitted.sink(output):
                return False
            timing.output(index, output.tokens, clock())
            ledger.generated(entry, index, output.tokens)
            self._note_load()
            return True

        if len(admitted.sequences) == 1:
            outputs.forward(forward)
        try:
            async for output in outputs:
                now_s = clock()
                timing.output(index, output.tokens, now_s)
                if first_s is None:
                    first_s = now_s
                    self._front.first_output(
                        admitted.ticket, index, now_s, output.finish, cached_tokens=output.cached_tokens
                    )
                    timing.queue_wait_s = output.queue_wait_s
                ledger.generated(entry, index, output.tokens)
                self._note_load()
                finished = output.finish is not None
                if output.finish is not None:
                    self._front.finished(admitted.ticket, index, output.finish, decoded_s=now_s - first_s)
                    self._open_door(entry.lane)
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
            if load.step_s > 0:  # a fleet of remote engines does not see their steps
                self._metrics.step_ended(load)
            self._kv_events.seen(load)

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


def _overloaded(verdict: Verdict, waiting: int, memory: MemoryState | None) -> Overloaded:
    """Why a request is shed, and when to come back."""
    decision, predicted = verdict.decision, verdict.predicted
    if decision.reason == KV_REASON and memory is not None:
        return Overloaded(
            f"KV memory is scarce and the request's context is long (from {memory.long_tokens} tokens on); there should"
            f" be room in {decision.retry_after_s:.1f} s",
            reason=decision.reason,
            retry_after_s=decision.retry_after_s,
            kv_level=memory.level,
        )
    if decision.reason == "predicted_late" and predicted is not None:
        message = (
            f"the answer would come too late to be of use: its first token is predicted in {predicted.ttft_s:.1f} s,"
            f" its last in {predicted.finish_s:.1f} s; try again in {decision.retry_after_s:.1f} s"
        )
    elif decision.reason == "over_share":
        message = (
            "this lane or tenant asks for more than its part of the engine while others ask for theirs; its part"
            f" should have room in {decision.retry_after_s:.1f} s"
        )
    else:
        message = (
            f"the queue is full ({waiting} sequences wait); there should be room in {decision.retry_after_s:.1f} s"
        )
    return Overloaded(message, reason=decision.reason, retry_after_s=decision.retry_after_s)
