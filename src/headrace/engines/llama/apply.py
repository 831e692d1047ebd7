"""The part of a plan before its forward passes: victims, moves, admissions, promotions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from headrace.engines.llama.live import LiveSequence
from headrace.engines.llama.placing import Placer
from headrace.engines.llama.residents import Residents
from headrace.errors import EngineError
from headrace.messages.engine import SequenceOutput
from headrace.scheduling.cost import CostModel
from headrace.scheduling.order import ServiceRates
from headrace.scheduling.sequence import Slot
from headrace.scheduling.step import StepPlan


class Applier:
    """Carries plans out on the residents, and counts. Sequences keep their KV through all of it; where libllama does
    not let it travel, their tokens are computed again."""

    def __init__(self, residents: Residents, clock: Callable[[], float]) -> None:
        self._residents = residents
        self._clock = clock
        self._placer = Placer(residents, clock)
        self.moves = 0
        self.victims = 0

    def apply(
        self,
        plan: StepPlan,
        now_s: float,
        model: CostModel,
        rates: Callable[[], ServiceRates],
        outputs: list[SequenceOutput],
        *,
        chunk_tokens: int,
    ) -> None:
        """Victims, moves, admissions, promotions, in this order. Sequences that cannot be carried on (no memory for
        their band's context) end with an error. ``chunk_tokens`` is how much of a prompt a step computes."""
        residents = self._residents
        for request_id in plan.victims:
            residents.evict(residents.running[request_id], rates())
            self.victims += 1
        for move in plan.moves:
            sequence = residents.running[move.request_id]
            with residents.ending_on_error(sequence, outputs):
                self._move(sequence, move.stream, now_s, model, chunk_tokens)
        for admission in plan.admissions:
            sequence = residents.waiting[admission.request_id]
            with residents.ending_on_error(sequence, outputs):
                self._placer.begin(sequence, admission.band, now_s, model, chunk_tokens)
        for promotion in plan.promotions:
            promoted = residents.running.get(promotion.request_id)
            if promoted is not None:  # it may have failed while this plan was being applied
                with residents.ending_on_error(promoted, outputs):
                    self._promote(promoted, promotion.band, now_s, model, chunk_tokens)

    def _move(self, sequence: LiveSequence, stream: int, now_s: float, model: CostModel, chunk_tokens: int) -> None:
        """To another stream of the same band. A resident there that is worth it comes here in exchange."""
        started_s = self._clock()
        residents, reuse = self._residents, self._residents.reuse
        old = sequence.state.slot
        assert old is not None
        context = residents.context(old.band)
        residents.account(sequence)
        tokens, carried = sequence.state.computed_tokens, sequence.state.computed_tokens
        resident: memoryview | None = None
        if reuse.worth_keeping(Slot(old.band, stream), now_s, model, chunk_tokens=chunk_tokens):
            with contextlib.suppress(EngineError):  # then it is given up
                resident = context.save_stream(stream)
                carried += reuse.tokens(Slot(old.band, stream))
        else:
            residents.save_before_loss(Slot(old.band, stream), reuse.times(model, chunk_tokens))
        data = context.save_stream(old.stream, reuse=True) if tokens else None
        new = sequence.state.slot = residents.slots.move(old, stream, sequence.request_id)
        context.clear_stream(old.stream)
        context.clear_stream(new.stream)
        if resident is None:
            reuse.moved(old, new)
        else:
            reuse.exchanged(old, new)
            if not context.load_stream(old.stream, resident):
                context.clear_stream(old.stream)
                reuse.cleared(old)
        if data is not None:
            if not context.load_stream(new.stream, data):
                self._restart(sequence)
            model.learn_move(old.band, self._clock() - started_s, carried)
        self.moves += 1

    def _restart(self, sequence: LiveSequence) -> None:
        """Its KV was lost: everything is computed again, in the stream where it is."""
        slot = sequence.state.slot
        assert slot is not None
        self._residents.context(slot.band).clear_stream(slot.stream)
        self._residents.reuse.restarted(slot)
        sequence.state.computed_tokens = 0

    def _promote(self, sequence: LiveSequence, band: int, now_s: float, model: CostModel, chunk_tokens: int) -> None:
        """To a longer band, converted where that one keeps KV at another precision and computing again would take
        longer. Raises EngineError when the band's context cannot be created."""
        residents = self._residents
        old = sequence.state.slot
        assert old is not None
        source, target = residents.context(old.band), residents.context(band)  # before anything is given up
        residents.account(sequence)
        tokens = sequence.state.computed_tokens
        new = residents.reuse.best_stream(band, tokens, now_s, model, chunk_tokens=chunk_tokens)
        residents.save_before_loss(new, residents.reuse.times(model, chunk_tokens))
        state = residents.parked_state(old, source.save_stream(old.stream, reuse=True), tokens)
        travels = state.dtype == residents.bands[band].kv_dtype or residents.reuse.conversion_pays(
            tokens, model, chunk_tokens=chunk_tokens
        )
        source.clear_stream(old.stream)
        target.clear_stream(new.stream)
        residents.slots.release(old, sequence.request_id)
        sequence.state.slot = residents.slots.take(band, sequence.request_id, new.stream)
        residents.reuse.moved(old, new)
        if tokens and not (travels and residents.load_state(band, new.stream, state)):
            self._restart(sequence)
