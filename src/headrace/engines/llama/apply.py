"""The part of a plan before its forward passes: victims, moves, admissions, promotions."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engines.llama.live import LiveSequence
from headrace.engines.llama.parking import ParkedState
from headrace.engines.llama.residents import Residents
from headrace.messages.engine import SequenceOutput
from headrace.scheduling.cost import CostModel
from headrace.scheduling.order import ServiceRates
from headrace.scheduling.step import StepPlan


class Applier:
    """Carries plans out on the residents, and counts. Sequences keep their KV through all of it; where libllama does
    not let it travel, their tokens are computed again."""

    def __init__(self, residents: Residents, clock: Callable[[], float]) -> None:
        self._residents = residents
        self._clock = clock
        self.moves = 0
        self.victims = 0

    def apply(
        self,
        plan: StepPlan,
        now_s: float,
        model: CostModel,
        rates: Callable[[], ServiceRates],
        outputs: list[SequenceOutput],
    ) -> None:
        """Victims, moves, admissions, promotions, in this order. Sequences that cannot be carried on (no memory for
        their band's context) end with an error."""
        residents = self._residents
        for request_id in plan.victims:
            residents.evict(residents.running[request_id], rates())
            self.victims += 1
        for move in plan.moves:
            sequence = residents.running[move.request_id]
            with residents.ending_on_error(sequence, outputs):
                self._move(sequence, move.stream, model)
        for admission in plan.admissions:
            sequence = residents.admit(admission.request_id, admission.band, now_s)
            parked = residents.parking.take(admission.request_id)
            if parked is not None:
                with residents.ending_on_error(sequence, outputs):
                    self._load(sequence, parked)
        for promotion in plan.promotions:
            promoted = residents.running.get(promotion.request_id)
            if promoted is not None:  # it may have failed while this plan was being applied
                with residents.ending_on_error(promoted, outputs):
                    self._promote(promoted, promotion.band)

    def _move(self, sequence: LiveSequence, stream: int, model: CostModel) -> None:
        """To another stream of the same band."""
        started_s = self._clock()
        old = sequence.state.slot
        assert old is not None
        context = self._residents.context(old.band)
        tokens = sequence.state.computed_tokens
        data = context.save_stream(old.stream, reuse=True) if tokens else None
        sequence.state.slot = self._residents.slots.move(old, stream, sequence.request_id)
        context.clear_stream(old.stream)
        if data is not None:
            if not context.load_stream(stream, data):
                context.clear_stream(stream)
                sequence.state.computed_tokens = 0
            model.learn_move(old.band, self._clock() - started_s, tokens)
        self.moves += 1

    def _load(self, sequence: LiveSequence, parked: ParkedState) -> None:
        """Fill the stream that the sequence has got. Raises EngineError when its context cannot be created."""
        slot = sequence.state.slot
        assert slot is not None
        context = self._residents.context(slot.band)
        data = parked.for_context(context.band.max_sequences)
        fits = sequence.state.computed_tokens <= context.band.max_context_tokens
        if not fits or data is None or not context.load_stream(slot.stream, data):
            context.clear_stream(slot.stream)
            sequence.state.computed_tokens = 0

    def _promote(self, sequence: LiveSequence, band: int) -> None:
        """To a longer band. Raises EngineError when the band's context cannot be created."""
        residents = self._residents
        old = sequence.state.slot
        assert old is not None
        source = residents.context(old.band)
        residents.context(band)  # before anything is given up
        state = ParkedState(
            source.save_stream(old.stream, reuse=True),
            old.stream,
            source.band.max_sequences,
            sequence.state.computed_tokens,
        )
        source.clear_stream(old.stream)
        residents.slots.release(old, sequence.request_id)
        sequence.state.slot = residents.slots.take(band, sequence.request_id)
        self._load(sequence, state)
