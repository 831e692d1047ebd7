"""A sequence gets a stream and, where it pays, the KV of its first tokens: taken over, carried, or restored."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engines.llama.context import Context
from headrace.engines.llama.live import LiveSequence
from headrace.engines.llama.parking import ParkedState
from headrace.engines.llama.residents import Residents
from headrace.errors import EngineError
from headrace.kv.sources import Placement, SourceTimes, StoredPrefix
from headrace.scheduling.cost import CostModel
from headrace.scheduling.sequence import Slot


class Placer:
    """Carries out what ``PrefixReuse.place`` chooses. Where libllama refuses, a sequence begins with nothing."""

    def __init__(self, residents: Residents, clock: Callable[[], float]) -> None:
        self._residents = residents
        self._clock = clock

    def begin(self, sequence: LiveSequence, band: int, now_s: float, model: CostModel, chunk_tokens: int) -> None:
        """From now on a waiting sequence runs in ``band``. Raises EngineError when the band's context cannot be
        created, in which case it waits on; ValueError when no stream is free."""
        residents = self._residents
        context = residents.context(band)
        parked = self._parked(sequence, band, model, chunk_tokens)
        placement = residents.reuse.place(
            sequence.request_id,
            band,
            now_s,
            model,
            chunk_tokens=chunk_tokens,
            parked_tokens=0 if parked is None else parked.tokens,
            reusable=residents.prefix.reusable(sequence.request),
            stored=self._stored(sequence.request_id, band, residents.reuse.times(model, chunk_tokens)),
        )
        residents.save_before_loss(placement.slot, residents.reuse.times(model, chunk_tokens))
        kept_tokens = self._fill(context, placement, parked, sequence.request_id)
        residents.admit(sequence, placement, kept_tokens, now_s)

    def _parked(self, sequence: LiveSequence, band: int, model: CostModel, chunk_tokens: int) -> ParkedState | None:
        """What is parked of it; None when nothing is, when its file is damaged, when it cannot be converted to the
        band's precision, and when reading or converting it would take longer than computing."""
        residents = self._residents
        parking, request_id = residents.parking, sequence.request_id
        tokens = parking.tokens(request_id)
        if not tokens:
            return None
        times = SourceTimes(model, residents.reuse.carry_time.s_per_token, chunk_tokens)
        read_s = parking.read_s(request_id)
        if read_s > 0 and read_s + times.restore_s(tokens) > times.compute_s(0, tokens):
            return None
        parked = parking.get(request_id)
        if parked is None or parked.dtype == residents.bands[band].kv_dtype:
            return parked
        pays = residents.reuse.conversion_pays(tokens, model, chunk_tokens=chunk_tokens)
        return parked if pays else None

    def _stored(self, request_id: str, band: int, times: SourceTimes) -> list[StoredPrefix]:
        """What the stores have of a prompt. Nothing where memory cannot be cut: it cannot be put together either."""
        tiering, reuse = self._residents.tiering, self._residents.reuse
        if tiering is None or not reuse.can_truncate:
            return []
        idle = not self._residents.running
        return tiering.stored(band, *reuse.prompt(request_id), times, idle=idle, converts=reuse.can_convert)

    def _fill(self, context: Context, placement: Placement, parked: ParkedState | None, request_id: str) -> int:
        """How many of the first tokens the stream holds afterwards; nothing else is in it."""
        stream, source = placement.slot.stream, placement.source
        if source.kind != "take_over":
            context.clear_stream(stream)
        match source.kind:
            case "take_over":
                there = True
            case "carry":
                assert source.holder is not None
                there = self._carry(source.holder, placement.slot)
            case "restore":
                assert parked is not None
                there = self._residents.load_state(placement.slot.band, stream, parked)
            case "ram" | "disk":
                return self._load(context, placement, request_id)
            case _:
                return 0
        if there and self._cut(context, stream, source.tokens):
            return source.tokens
        context.clear_stream(stream)
        return 0

    def _load(self, context: Context, placement: Placement, request_id: str) -> int:
        """Fill the cleared stream from the stores; how many tokens it holds then."""
        residents, slot = self._residents, placement.slot
        assert residents.tiering is not None
        namespace, data = residents.reuse.prompt(request_id)

        def load(state: ParkedState) -> bool:
            return residents.load_state(slot.band, slot.stream, state)

        tokens = residents.tiering.fill(slot.band, context, namespace, data, placement.source.tokens, load)
        if not tokens:
            context.clear_stream(slot.stream)
        return tokens

    def _carry(self, holder: Slot, slot: Slot) -> bool:
        """Fill a stream with the state of another one, whoever runs in it."""
        residents = self._residents
        started_s = self._clock()
        owner = residents.slots.owner(holder)
        if owner is not None:
            residents.account(residents.running[owner])
        source, held = residents.context(holder.band), residents.reuse.tokens(holder)
        if holder.band == slot.band and residents.bands[slot.band].pooled:
            source.share(holder.stream, slot.stream, held)
            return True
        try:
            data = source.save_stream(holder.stream, reuse=True)
        except EngineError:
            return False
        loaded = residents.load_state(slot.band, slot.stream, residents.parked_state(holder, data, held))
        if residents.bands[holder.band].kv_dtype == residents.bands[slot.band].kv_dtype:
            residents.reuse.carry_time.learn(held, self._clock() - started_s)
        return loaded

    def _cut(self, context: Context, stream: int, tokens: int) -> bool:
        """Leave the first ``tokens`` tokens of a stream. False when they are not all there, or libllama cannot; the
        stream is then to be cleared."""
        held = context.stream_tokens(stream)
        if held <= tokens:
            return held == tokens
        if not context.begins_at_0(stream):
            return False
        if context.take_back(stream, tokens):
            return True
        self._residents.cannot_truncate(context)
        return False
