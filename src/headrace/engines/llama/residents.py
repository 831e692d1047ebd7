"""Who is in the engine and what they hold: sequences, their streams, the contexts, parked KV."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.engines.llama.context import Context
from headrace.engines.llama.live import LiveSequence
from headrace.engines.llama.parking import ParkedState, Parking
from headrace.errors import EngineError
from headrace.messages.engine import BandPlan, SequenceOutput
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.order import ServiceRates, WaitingQueue
from headrace.scheduling.slots import SlotTable

if TYPE_CHECKING:
    from headrace.engines.llama.library import Library
    from headrace.engines.llama.weights import Weights
    from headrace.kv.budget import BandBudget


class Residents:
    """Sequences that wait and run, and everything that they own. A running sequence owns a stream; a waiting one
    owns at most parked KV."""

    def __init__(self, library: Library, weights: Weights, budget: BandBudget, knobs: SchedulingKnobs) -> None:
        self._library = library
        self._weights = weights
        self._budget = budget
        self._step_tokens = knobs.step_tokens
        self.bands = budget.bands
        self.contexts: list[Context | None] = [None] * len(budget.bands)
        self.slots = SlotTable(budget.bands)
        self.queue = WaitingQueue(budget.bands, knobs)
        self.waiting: dict[str, LiveSequence] = {}
        self.running: dict[str, LiveSequence] = {}
        self.parking = Parking()
        self._urgent_alive = 0
        self._urgent_seen_s = -math.inf

    def context(self, band: int) -> Context:
        """The context of a band, created on first use. Raises EngineError when memory does not suffice."""
        existing = self.contexts[band]
        if existing is None:
            existing = Context(self._library, self._weights, self.bands[band], step_tokens=self._step_tokens, threads=1)
            self.contexts[band] = existing
        return existing

    def get(self, request_id: str) -> LiveSequence | None:
        """The live sequence with this id."""
        return self.waiting.get(request_id) or self.running.get(request_id)

    def urgent_seen_s(self, now_s: float) -> float:
        """When a sequence with a target was last alive, as of ``now_s``."""
        if self._urgent_alive:
            self._urgent_seen_s = now_s
        return self._urgent_seen_s

    # Coming and going

    def enter(self, sequence: LiveSequence, rates: ServiceRates) -> None:
        """A new sequence begins to wait."""
        self.waiting[sequence.request_id] = sequence
        self.queue.add(sequence.state, rates)
        self._urgent_alive += sequence.state.urgent

    def admit(self, request_id: str, band: int, now_s: float) -> LiveSequence:
        """Give a waiting sequence a stream of ``band``; the stream is empty. Raises KeyError when it does not wait,
        ValueError when no stream is free."""
        sequence = self.waiting[request_id]
        sequence.state.slot = self.slots.take(band, request_id)
        del self.waiting[request_id]
        self.queue.discard(sequence.state)
        if sequence.queue_wait_s is None:
            sequence.queue_wait_s = max(0.0, now_s - sequence.request.arrived_s)
        self.running[request_id] = sequence
        return sequence

    def evict(self, sequence: LiveSequence, rates: ServiceRates) -> None:
        """Make a running sequence wait again, its KV parked; where libllama does not hand it out, its tokens are
        computed again."""
        slot = sequence.state.slot
        assert slot is not None
        if sequence.state.computed_tokens:
            context = self.context(slot.band)
            try:
                data = context.save_stream(slot.stream)
            except EngineError:
                sequence.state.computed_tokens = 0
            else:
                self.parking.park(
                    sequence.request_id,
                    ParkedState(data, slot.stream, context.band.max_sequences, sequence.state.computed_tokens),
                )
        self._leave_stream(sequence)
        del self.running[sequence.request_id]
        self.waiting[sequence.request_id] = sequence
        self.queue.add(sequence.state, rates)

    def _leave_stream(self, sequence: LiveSequence) -> None:
        slot = sequence.state.slot
        if slot is None:
            return
        context = self.contexts[slot.band]
        if context is not None:
            context.clear_stream(slot.stream)
        self.slots.release(slot, sequence.request_id)
        sequence.state.slot = None

    def forget(self, sequence: LiveSequence) -> None:
        """Give back everything a sequence holds."""
        if self.waiting.pop(sequence.request_id, None) is not None:
            self.queue.discard(sequence.state)
            self.parking.take(sequence.request_id)
        self.running.pop(sequence.request_id, None)
        self._leave_stream(sequence)
        self._urgent_alive -= sequence.state.urgent
        sequence.close()

    def fail(self, sequences: list[LiveSequence], error: EngineError, outputs: list[SequenceOutput]) -> None:
        """End those of ``sequences`` that run, with ``error``."""
        for sequence in sequences:
            if sequence.request_id in self.running:
                outputs.append(sequence.output(finish="error", error=str(error)))
                self.forget(sequence)

    @contextlib.contextmanager
    def ending_on_error(self, sequence: LiveSequence, outputs: list[SequenceOutput]) -> Iterator[None]:
        """An EngineError in the block ends ``sequence``."""
        try:
            yield
        except EngineError as error:
            self.fail([sequence], error, outputs)

    # Accounts

    def band_plans(self) -> list[BandPlan]:
        """Every band with its KV bytes and whether its context exists."""
        return [
            BandPlan(band.max_context_tokens, band.max_sequences, self._budget.band_bytes(index), existing is not None)
            for index, (band, existing) in enumerate(zip(self.bands, self.contexts, strict=True))
        ]

    def check_integrity(self) -> str | None:
        """None when slots, sequences, parked KV and libllama's own counts agree; else what is wrong."""
        problem = (
            self.slots.check_integrity()
            or self.queue.check_integrity()
            or self.parking.check_integrity({name: s.state.computed_tokens for name, s in self.waiting.items()})
        )
        if problem is not None:
            return problem
        queued = {state.request_id for state in self.queue}
        if queued != set(self.waiting):
            return f"{len(queued)} sequences are in the queue, {len(self.waiting)} wait"
        urgent = sum(s.state.urgent for s in [*self.waiting.values(), *self.running.values()])
        if urgent != self._urgent_alive:
            return f"{urgent} urgent sequences are alive, {self._urgent_alive} are counted"
        owners = self.slots.owners()
        if len(owners) != len(self.running):
            return f"{len(owners)} streams are owned by {len(self.running)} running sequences"
        for sequence in self.running.values():
            slot = sequence.state.slot
            if slot is None or owners.get(slot) != sequence.request_id:
                return f"{sequence.request_id} runs in {slot}, which it does not own"
            context = self.contexts[slot.band]
            held = context.stream_tokens(slot.stream) if context is not None else 0
            if held != sequence.state.computed_tokens:
                return f"{sequence.request_id}: {sequence.state.computed_tokens} tokens computed, libllama holds {held}"
        used = {(slot.band, slot.stream) for slot in owners}
        for band, context in enumerate(self.contexts):
            if context is None:
                continue
            for stream in range(self.bands[band].max_sequences):
                if (band, stream) not in used and context.stream_tokens(stream):
                    return f"stream {stream} of band {band} is free but not empty"
        return None

    def close(self) -> None:
        """Free contexts and samplers."""
        for sequence in [*self.waiting.values(), *self.running.values()]:
            self.forget(sequence)
        for context in self.contexts:
            if context is not None:
                context.close()
