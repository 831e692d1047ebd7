"""Who is in the engine and what they hold: sequences, their streams, the contexts, parked KV, and the KV that those
who ended left in streams that nobody needed since."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engines.llama.context import Context
from headrace.engines.llama.live import LiveSequence
from headrace.engines.llama.memory_formats import MemoryFormats
from headrace.engines.llama.parking import ParkedState, Parking
from headrace.engines.llama.prefix import PrefixRules
from headrace.errors import EngineError
from headrace.kv.precision import KvDtype
from headrace.kv.reuse import PrefixReuse
from headrace.kv.token_blocks import KV_BLOCK_TOKENS, packed
from headrace.messages.engine import BandPlan, SequenceOutput, Submit
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.order import ServiceRates, WaitingQueue
from headrace.scheduling.sequence import Slot
from headrace.scheduling.slots import SlotTable

if TYPE_CHECKING:
    from headrace.engines.llama.library import Library
    from headrace.engines.llama.tiering import Tiering
    from headrace.engines.llama.weights import Weights
    from headrace.kv.budget import BandBudget
    from headrace.kv.sources import Placement, SourceTimes


@dataclass(frozen=True, slots=True)
class Fetching:
    """A sequence that waits for its KV from disk, until ``until_s`` at the latest."""

    sequence: LiveSequence
    until_s: float


class Residents:
    """Sequences that wait and run, and everything that they own. A running sequence owns a stream; a waiting one
    owns at most parked KV. ``reuse`` knows the tokens in every stream: exactly of those that nobody runs in, up to
    the last whole block of those that decode (``account``)."""

    def __init__(
        self,
        library: Library,
        weights: Weights,
        budget: BandBudget,
        knobs: SchedulingKnobs,
        prefix: PrefixRules,
        clock: Callable[[], float],
        parking: Parking,
        tiering: Tiering | None = None,
    ) -> None:
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
        self.fetching: dict[str, Fetching] = {}
        self.parking = parking
        self.tiering = tiering
        self.prefix = prefix
        self.reuse = PrefixReuse(budget.bands)
        self.formats = MemoryFormats(library, weights)
        self.conversions = 0
        self._clock = clock
        self._urgent_alive = 0
        self._urgent_seen_s = -math.inf

    def context(self, band: int) -> Context:
        """The context of a band, created on first use. Raises EngineError when memory does not suffice."""
        existing = self.contexts[band]
        if existing is None:
            existing = Context(self._library, self._weights, self.bands[band], step_tokens=self._step_tokens, threads=1)
            self.contexts[band] = existing
            if not existing.can_remove_last:
                self.reuse.can_truncate = False
            if self.tiering is not None:
                self.tiering.opened(band, existing, self._rotation(existing.band.kv_dtype))
        return existing

    def _rotation(self, dtype: KvDtype) -> tuple[int, int] | None:
        """How many numbers of K, and of V, are rotated together before they are stored; None when that is not known.
        F16 is stored as it is."""
        if dtype == "f16":
            return 0, 0
        form = self.formats.of(dtype)
        return None if form is None else (form.k_rotation, form.v_rotation)

    def cannot_truncate(self, context: Context) -> None:
        """libllama could not take a stream's last tokens back: it is not asked to again."""
        context.can_remove_last = self.reuse.can_truncate = False

    def get(self, request_id: str) -> LiveSequence | None:
        """The live sequence with this id."""
        fetching = self.fetching.get(request_id)
        if fetching is not None:
            return fetching.sequence
        return self.waiting.get(request_id) or self.running.get(request_id)

    def urgent_seen_s(self, now_s: float) -> float:
        """When a sequence with a target was last alive, as of ``now_s``."""
        if self._urgent_alive:
            self._urgent_seen_s = now_s
        return self._urgent_seen_s

    # Coming and going

    def enter(self, sequence: LiveSequence, rates: ServiceRates, times: SourceTimes) -> None:
        """A new sequence begins to wait, for its KV on disk first where that is worth it."""
        self._urgent_alive += sequence.state.urgent
        if not self._fetch(sequence, times):
            self._wait(sequence, rates, resumed=False)

    def _fetch(self, sequence: LiveSequence, times: SourceTimes) -> bool:
        """Whether ``sequence`` waits for what is read of it from disk: not when nobody else is there, whom reading
        would keep waiting."""
        tiering, request = self.tiering, sequence.request
        alone = not (self.running or self.waiting or self.fetching)
        if tiering is None or alone or not self.reuse.can_truncate or not self.prefix.reusable(request):
            return False
        state = sequence.state
        dtype = self._dtype(state.known_tokens, state.limit_tokens, state.min_kv_dtype)
        if dtype is None:
            return False
        namespace = self.prefix.namespace(request)
        held = self.reuse.cached_tokens(namespace, request.prompt_tokens)
        worth_s = tiering.fetch(
            sequence.request_id,
            dtype,
            namespace,
            packed(request.prompt_tokens),
            held,
            times,
            converts=self.reuse.can_convert,
        )
        if worth_s is None:
            return False
        self.fetching[sequence.request_id] = Fetching(sequence, self._clock() + worth_s)
        return True

    def settle_fetched(self, rates: ServiceRates) -> None:
        """Before a step: sequences whose KV has come from disk, or did not come in time, wait for a stream. So does
        everybody when nobody else is there."""
        if not self.fetching or self.tiering is None:
            return
        alone, now_s = not (self.running or self.waiting), self._clock()
        for request_id, fetching in list(self.fetching.items()):
            if alone or now_s >= fetching.until_s or self.tiering.tiers.fetches.ready(request_id):
                del self.fetching[request_id]
                self._wait(fetching.sequence, rates, resumed=False)

    def _wait(self, sequence: LiveSequence, rates: ServiceRates, *, resumed: bool) -> None:
        self.waiting[sequence.request_id] = sequence
        namespace = self.prefix.namespace(sequence.request)
        group = sequence.state.lane
        self.reuse.wait(sequence.request_id, namespace, sequence.tokens, group=group, resumed=resumed)
        self.note_cached()
        self.queue.add(sequence.state, rates)

    def note_cached(self) -> None:
        """Bring up to date how much of each waiting prompt somebody holds."""
        for request_id, tokens in self.reuse.changes():
            sequence = self.waiting[request_id]
            # Memory that cannot be cut serves few prompts, and which ones is only found out when they begin.
            if self.reuse.can_truncate and self.prefix.reusable(sequence.request):
                state = sequence.state
                dtype = self._dtype(state.known_tokens, state.limit_tokens, state.min_kv_dtype)
                tokens = max(tokens, self._stored_tokens(dtype, *self.reuse.prompt(request_id)))
                sequence.state.cached_tokens = tokens

    def cached_tokens(self, request: Submit) -> int:
        """How much of a prompt that has not been taken in somebody holds, as ``note_cached`` would find."""
        if not self.reuse.can_truncate or not self.prefix.reusable(request):
            return 0
        namespace = self.prefix.namespace(request)
        tokens = self.reuse.cached_tokens(namespace, request.prompt_tokens)
        prompt = len(request.prompt_tokens)
        most = self.bands[-1].max_context_tokens if request.max_tokens is None else prompt + request.max_tokens
        dtype = self._dtype(prompt, most, request.min_kv_dtype)
        return max(tokens, self._stored_tokens(dtype, namespace, packed(request.prompt_tokens)))

    def _dtype(self, tokens: int, limit_tokens: int, least: KvDtype | None) -> KvDtype | None:
        """The precision of the band that a sequence will begin in; None when none holds it."""
        band = self.queue.band_for(tokens, limit_tokens, least)
        return None if band is None else self.bands[band].kv_dtype

    def _stored_tokens(self, dtype: KvDtype | None, namespace: Hashable, data: bytes) -> int:
        """How much of a packed prompt the stores could give to a band of ``dtype`` (None: there is none)."""
        if self.tiering is None or dtype is None:
            return 0
        return self.tiering.stored_tokens(dtype, namespace, data, converts=self.reuse.can_convert)

    def admit(self, sequence: LiveSequence, placement: Placement, kept_tokens: int, now_s: float) -> None:
        """A waiting sequence runs where it was placed; the stream holds its first ``kept_tokens`` tokens. What was
        parked of it is dropped. Raises ValueError when the stream is not free."""
        request_id, state, slot = sequence.request_id, sequence.state, placement.slot
        state.slot = self.slots.take(slot.band, request_id, slot.stream)
        del self.waiting[request_id]
        self.queue.take(state, now_s)
        parked = self.parking.get(request_id) if placement.source.kind == "restore" else None
        self.parking.drop(request_id)
        if self.tiering is not None and sequence.queue_wait_s is None:
            self.tiering.began(slot.band, *self.reuse.prompt(request_id))
        precision = None if parked is None else parked.precision
        self.reuse.began(request_id, placement, now_s, kept_tokens=kept_tokens, precision=precision)
        self._unfetch(request_id)
        state.computed_tokens, state.cached_tokens = kept_tokens, 0
        if sequence.queue_wait_s is None:
            sequence.queue_wait_s = max(0.0, now_s - sequence.request.arrived_s)
            sequence.cached_tokens = kept_tokens
        self.running[request_id] = sequence

    def save_before_loss(self, slot: Slot, times: SourceTimes) -> None:
        """What an ended sequence left in ``slot`` is about to go: the stores get what they lack of it, if there is
        time."""
        context = self.contexts[slot.band]
        if self.tiering is not None and context is not None:
            self.tiering.save_before_loss(slot, self.reuse, context, times, idle=not self.running)

    def account(self, sequence: LiveSequence) -> None:
        """Tell ``reuse`` what was computed of a running sequence. Asked for after prefill, at every whole block, and
        before its KV goes somewhere: every token would cost a step more than it is worth."""
        slot, computed = sequence.state.slot, sequence.state.computed_tokens
        assert slot is not None
        known = self.reuse.tokens(slot)
        if known < computed:
            self.reuse.computed(slot, sequence.tokens[known:computed])

    def evict(self, sequence: LiveSequence, rates: ServiceRates) -> None:
        """Make a running sequence wait again, its KV parked, and left in its stream until somebody needs that; where
        libllama does not hand it out, its tokens are computed again."""
        slot = sequence.state.slot
        assert slot is not None
        dropped: list[str] = []
        if sequence.state.computed_tokens:
            context = self.context(slot.band)
            try:
                data = context.save_stream(slot.stream)
            except EngineError:
                sequence.state.computed_tokens = 0
            else:
                parked = self.parked_state(slot, data, sequence.state.computed_tokens)
                to_disk = self.bands[slot.band].layout == "streaming"
                rank_s = sequence.state.rank_s or 0.0
                dropped = self.parking.park(sequence.request_id, parked, rank_s, to_disk=to_disk)
        self._leave_stream(sequence)
        del self.running[sequence.request_id]
        self._wait(sequence, rates, resumed=True)
        self._lose(dropped)

    def settle_parked(self) -> None:
        """Before a step: sequences whose parked KV could not be written to a file are computed again."""
        self._lose(self.parking.settle())

    def _lose(self, request_ids: Iterable[str]) -> None:
        """Nothing is parked of these any more."""
        for request_id in request_ids:
            self.waiting[request_id].state.computed_tokens = 0

    def parked_state(self, slot: Slot, data: bytearray | memoryview, tokens: int) -> ParkedState:
        """The bytes that libllama wrote of the ``tokens`` tokens in ``slot``, with what is needed to read them."""
        band = self.bands[slot.band]
        # A pool is one stream to libllama, whoever's cells are taken out of it.
        stream, streams = (0, 1) if band.pooled else (slot.stream, band.max_sequences)
        return ParkedState(data, stream, streams, tokens, band.kv_dtype, self.reuse.precision(slot))

    def load_state(self, band: int, stream: int, state: ParkedState) -> bool:
        """Fill an empty stream, converted where the band keeps KV at another precision. False when the state does not
        fit, cannot be converted, or libllama refuses it; the stream must then be cleared."""
        context, shape = self.context(band), self.bands[band]
        if state.tokens > shape.max_context_tokens:
            return False
        same = state.dtype == shape.kv_dtype
        data = state.for_context(_streams(shape)) if same else self._converted(state, shape)
        return data is not None and context.load_stream(stream, data)

    def _converted(self, state: ParkedState, shape: Band) -> bytearray | memoryview | None:
        started_s = self._clock()
        source, target = self.formats.of(state.dtype), self.formats.of(shape.kv_dtype)
        data = state.converted_for(_streams(shape), source, target)
        if data is None:
            self.reuse.can_convert = False  # this model's memory has another shape: it is not tried again
            return None
        self.reuse.convert_time.learn(state.tokens, self._clock() - started_s)
        self.conversions += 1
        return data

    def _leave_stream(self, sequence: LiveSequence, *, keep: bool = True) -> None:
        """Out of a stream, whose KV stays for others with ``keep``."""
        slot = sequence.state.slot
        assert slot is not None
        context = self.contexts[slot.band]
        if keep and self.prefix.enabled:
            self.account(sequence)
            self.reuse.ended(slot, self._clock())
        else:
            if context is not None:
                context.clear_stream(slot.stream)
            self.reuse.cleared(slot)
        self.slots.release(slot, sequence.request_id)
        sequence.state.slot = None

    def forget(self, sequence: LiveSequence, *, keep: bool = True) -> None:
        """Give back everything a sequence holds. ``keep``: the KV in its stream is sound and may serve others."""
        self._unfetch(sequence.request_id)
        if self.waiting.pop(sequence.request_id, None) is not None:
            self.queue.discard(sequence.state)
            self.parking.drop(sequence.request_id)
            self.reuse.gone(sequence.request_id)
        elif self.running.pop(sequence.request_id, None) is not None:
            self._leave_stream(sequence, keep=keep)
        self._urgent_alive -= sequence.state.urgent
        sequence.close()

    def _unfetch(self, request_id: str) -> None:
        """What was read from disk for it is not needed any more."""
        self.fetching.pop(request_id, None)
        if self.tiering is not None:
            self.tiering.tiers.fetches.release(request_id)

    def fail(self, sequences: list[LiveSequence], error: EngineError, outputs: list[SequenceOutput]) -> None:
        """End those of ``sequences`` that have not ended, with ``error``."""
        for sequence in sequences:
            if self.get(sequence.request_id) is sequence:
                outputs.append(sequence.output(finish="error", error=str(error)))
                self.forget(sequence, keep=False)

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
            BandPlan(
                band.max_context_tokens,
                band.max_sequences,
                self._budget.band_bytes(index),
                existing is not None,
                band.kv_dtype,
                band.layout,
            )
            for index, (band, existing) in enumerate(zip(self.bands, self.contexts, strict=True))
        ]

    def check_integrity(self) -> str | None:
        """None when slots, sequences, parked KV and libllama's own counts agree; else what is wrong."""
        problem = (
            self.slots.check_integrity()
            or self.queue.check_integrity()
            or self.parking.check_integrity({name: s.state.computed_tokens for name, s in self.waiting.items()})
            or self.reuse.check_integrity()
            or (None if self.tiering is None else self.tiering.tiers.check_integrity())
        )
        if problem is not None:
            return problem
        queued = {state.request_id for state in self.queue}
        if queued != set(self.waiting):
            return f"{len(queued)} sequences are in the queue, {len(self.waiting)} wait"
        if set(self.reuse.waiting_ids) != set(self.waiting):
            return f"{len(self.reuse.waiting_ids)} sequences wait for KV to reuse, {len(self.waiting)} wait"
        fetching = [each.sequence for each in self.fetching.values()]
        if any([sequence.request_id in self.waiting for sequence in fetching]):
            return "a sequence waits for its KV and for a stream at once"
        urgent = sum(s.state.urgent for s in [*self.waiting.values(), *self.running.values(), *fetching])
        if urgent != self._urgent_alive:
            return f"{urgent} urgent sequences are alive, {self._urgent_alive} are counted"
        owners = self.slots.owners()
        if len(owners) != len(self.running):
            return f"{len(owners)} streams are owned by {len(self.running)} running sequences"
        for sequence in self.running.values():
            slot = sequence.state.slot
            if slot is None or owners.get(slot) != sequence.request_id:
                return f"{sequence.request_id} runs in {slot}, which it does not own"
            held, computed = self._held(slot), sequence.state.computed_tokens
            if held != computed:
                return f"{sequence.request_id}: {computed} tokens computed, libllama holds {held}"
            if not 0 <= computed - self.reuse.tokens(slot) < KV_BLOCK_TOKENS:
                return f"{sequence.request_id}: {computed} tokens computed, {self.reuse.tokens(slot)} accounted for"
        for band, shape in enumerate(self.bands):
            for slot in [Slot(band, stream) for stream in range(shape.max_sequences)]:
                held, kept = self._held(slot), self.reuse.tokens(slot)
                if slot not in owners and held != kept:
                    return f"{slot} is free with {kept} tokens kept, libllama holds {held}"
        return None

    def _held(self, slot: Slot) -> int:
        context = self.contexts[slot.band]
        return context.stream_tokens(slot.stream) if context is not None else 0

    def close(self) -> None:
        """Free contexts and samplers."""
        fetching = [each.sequence for each in self.fetching.values()]
        for sequence in [*self.waiting.values(), *self.running.values(), *fetching]:
            self.forget(sequence)
        for context in self.contexts:
            if context is not None:
                context.close()
        self.close_stores()

    def close_stores(self) -> None:
        """Let go of everything outside this process."""
        self.parking.close()
        if self.tiering is not None:
            self.tiering.tiers.close()


def _streams(band: Band) -> int:
    """How many streams libllama has in a band's context."""
    return 1 if band.pooled else band.max_sequences
