"""One account of whose KV is in which stream, and what waiting sequences can begin with.

The engine tells what happens to streams (``began``, ``computed``, ``ended``, ``moved``, ``cleared``) and asks where a
sequence goes (``place``). Nothing here touches libllama: a placement is data, and the engine says afterwards what
came of it. A stream is live (somebody runs in it), a resident (it keeps an ended sequence's KV), or empty; for the
scheduler the latter two are free.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace.kv.precision import KvDtype, at_least, coarser
from headrace.kv.prefix_tree import PrefixTree, Watch
from headrace.kv.residents import IdleResidents
from headrace.kv.sources import (
    CONVERT_S_PER_TOKEN,
    Candidate,
    CarryTime,
    Placement,
    Source,
    SourceKind,
    SourceTimes,
    StoredPrefix,
    StreamChoice,
    apart,
    place,
    stream_choices,
)
from headrace.scheduling.bands import Band
from headrace.scheduling.sequence import Slot
from headrace.scheduling.step import StepTimes


@dataclass(slots=True)
class ReuseTotals:
    """Since the engine started. Of sequences that began for the first time: ``sequences``, their ``prompt_tokens``,
    and ``cached_tokens`` that did not have to be computed, which by prediction saved ``saved_s``. ``begun`` counts all
    beginnings by source, ``evicted`` the residents that gave way to somebody who did not use them."""

    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    saved_s: float = 0.0
    begun: dict[SourceKind, int] = field(default_factory=dict)
    evicted: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that did not have to be computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    watch: Watch[Slot]
    group: str
    resumed: bool


@dataclass(frozen=True, slots=True)
class _Live:
    group: str
    hits: int


class PrefixReuse:
    """The streams of all bands by the tokens they hold. Not thread-safe: the engine's thread owns it.

    ``can_truncate`` is False for models whose memory cannot drop a sequence's last tokens (recurrent and hybrid
    ones): there only a holder whose whole sequence begins the prompt is of use. It may be found out late. ``copies``
    says whether the engine copies streams inside libllama (``sources``).

    **Precision.** KV that once was coarser than its band keeps (its sequence came up from a band of less precision)
    stays worn until it is computed again. A sequence begins only with KV that is at least as precise as the band that
    it enters, so that a band's answers are what its precision gives. ``can_convert``: whether the engine can turn KV of
    one precision into another; without it, nothing is carried between bands that differ.
    """

    def __init__(self, bands: Sequence[Band], *, can_truncate: bool = True, copies: bool = False) -> None:
        self.can_truncate = can_truncate
        self._bands = tuple(bands)
        self._copies = copies
        self._tree: PrefixTree[Slot] = PrefixTree()
        self._residents: IdleResidents[Slot] = IdleResidents()
        self._waiting: dict[str, _Waiting] = {}
        self._live: list[dict[int, _Live]] = [{} for _ in bands]
        self._worn: dict[Slot, KvDtype] = {}
        self.can_convert = True
        self.carry_time = CarryTime()
        self.convert_time = CarryTime(CONVERT_S_PER_TOKEN)
        self.totals = ReuseTotals()

    # ----------------------------------------------------------------------------------------------- waiting

    def wait(
        self, request_id: str, namespace: Hashable, tokens: Iterable[int], *, group: str = "", resumed: bool = False
    ) -> None:
        """A sequence waits for a stream. ``tokens`` are all that it knows: a victim (``resumed``) waits with what it
        has generated, too. ``group`` (the lane) is what its chance of being used again is learned by. Raises
        ValueError when it waits already."""
        if request_id in self._waiting:
            raise ValueError(f"{request_id} waits already")
        self._waiting[request_id] = _Waiting(self._tree.watch(request_id, namespace, tokens), group, resumed)

    def gone(self, request_id: str) -> None:
        """A waiting sequence was given up. One that does not wait is ignored."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._tree.unwatch(waiting.watch)

    def changes(self) -> list[tuple[str, int]]:
        """Waiting sequences with the tokens that they could begin with, in whole blocks: those for which it may have
        changed since the last call, new ones among them."""
        return [(watch.name, watch.cached_tokens) for watch in self._tree.take_moved()]

    def cached_tokens(self, namespace: Hashable, tokens: Iterable[int]) -> int:
        """The tokens that a sequence could begin with if it waited, in whole blocks."""
        return self._tree.cached_tokens(namespace, tokens)

    def prompt(self, request_id: str) -> tuple[Hashable, bytes]:
        """Namespace and packed tokens of a waiting sequence. Raises KeyError when it does not wait."""
        watch = self._waiting[request_id].watch
        return watch.namespace, watch.data

    # --------------------------------------------------------------------------------------------- placement

    def place(
        self,
        request_id: str,
        band: int,
        now_s: float,
        times: StepTimes,
        *,
        chunk_tokens: int,
        parked_tokens: int = 0,
        reusable: bool = True,
        stored: Sequence[StoredPrefix] = (),
    ) -> Placement:
        """Where a waiting sequence begins in ``band``, and with what; ``stored`` is what the stores have of its prompt.
        Changes nothing: ``began`` does. Not ``reusable``: every prompt token must be computed (its log-probabilities
        are wanted). Raises ValueError when the band has no free stream, KeyError when it does not wait."""
        watch = self._waiting[request_id].watch
        source_times = self.times(times, chunk_tokens)
        gap_s = times.move_s(watch.tokens, band)
        return place(
            self._candidates(watch, band, now_s, source_times, gap_s) if reusable else (),
            self._choices(band, now_s, source_times, gap_s),
            prompt_tokens=watch.tokens,
            band=band,
            bands=self._bands,
            times=source_times,
            parked_tokens=parked_tokens,
            stored=stored if reusable else (),
        )

    def best_stream(self, band: int, tokens: int, now_s: float, times: StepTimes, *, chunk_tokens: int) -> Slot:
        """The stream for a running sequence of ``tokens`` that moves up to ``band``. Raises ValueError when the band
        has no free stream."""
        source_times = self.times(times, chunk_tokens)
        choices = self._choices(band, now_s, source_times, times.move_s(tokens, band))
        if not choices:
            raise ValueError(f"band {band} has no stream that nobody runs in")
        return Slot(band, choices[0].stream)

    def worth_keeping(self, slot: Slot, now_s: float, times: StepTimes, *, chunk_tokens: int) -> bool:
        """Whether the resident in ``slot``, which somebody is to move to, is worth more than being carried to another
        stream. False for an empty stream."""
        if slot not in self._residents:
            return False
        source_times = self.times(times, chunk_tokens)
        return self._loss_s(slot, 0, now_s, source_times) > source_times.carry_s(self._tree.tokens(slot))

    def times(self, times: StepTimes, chunk_tokens: int) -> SourceTimes:
        """What every way of getting a prefix takes, as predicted now."""
        return SourceTimes(
            times, self.carry_time.s_per_token, chunk_tokens, self._copies, self.convert_time.s_per_token
        )

    def _choices(self, band: int, now_s: float, times: SourceTimes, gap_s: float) -> list[StreamChoice]:
        worth_s = {
            slot.stream: self._loss_s(slot, 0, now_s, times) for slot in self._residents.holders() if slot.band == band
        }
        return stream_choices(self._bands[band].max_sequences, self._live[band], worth_s, gap_s)

    def _candidates(
        self, watch: Watch[Slot], band: int, now_s: float, times: SourceTimes, gap_s: float
    ) -> Iterator[Candidate]:
        for match in self._tree.matches(watch):
            slot, length = match.holder, self._tree.tokens(match.holder)
            if not self.can_truncate and min(match.tokens, watch.tokens - 1) < length:
                continue
            if not self._precise_enough(slot, band):
                continue
            take_s = None
            if slot.band == band and slot in self._residents:
                gap = gap_s if apart(slot.stream, self._live[band]) else 0.0
                take_s = self._loss_s(slot, match.tokens, now_s, times) + gap
            yield Candidate(slot, match.tokens, length, take_s)

    def _precise_enough(self, slot: Slot, band: int) -> bool:
        """Whether a sequence that enters ``band`` may begin with what is in ``slot``."""
        wanted = self._bands[band].kv_dtype
        if self._bands[slot.band].kv_dtype != wanted and not self.can_convert:
            return False
        return at_least(self.precision(slot), wanted)

    def conversion_pays(self, tokens: int, times: StepTimes, *, chunk_tokens: int) -> bool:
        """Whether turning the KV of ``tokens`` into another precision is predicted to take less than computing it."""
        source_times = self.times(times, chunk_tokens)
        return self.can_convert and source_times.convert_s_per_token * tokens < source_times.compute_s(0, tokens)

    def _loss_s(self, slot: Slot, kept_tokens: int, now_s: float, times: SourceTimes) -> float:
        """Time that is expected to be lost when a resident loses all after its first ``kept_tokens``."""
        length = self._tree.tokens(slot)
        from_tokens = max(self._tree.shared_tokens(slot), kept_tokens)
        if from_tokens >= length:
            return 0.0
        return self._residents.chance(slot, now_s) * times.compute_s(from_tokens, length)

    # --------------------------------------------------------------------------------------------- what happens

    def began(
        self,
        request_id: str,
        placement: Placement,
        now_s: float,
        *,
        kept_tokens: int | None = None,
        precision: KvDtype | None = None,
    ) -> None:
        """The sequence runs in ``placement.slot``, which holds its first ``kept_tokens`` tokens (None: as planned;
        0 when libllama refused), of ``precision`` where that is coarser than the band's. A resident that was there and
        is not its source is gone."""
        waiting = self._waiting.pop(request_id)
        slot, source = placement.slot, placement.source
        kept = source.tokens if kept_tokens is None else kept_tokens
        hits = self._use(source, kept, now_s)
        if source.kind == "take_over":
            self._residents.drop(slot)
            self._tree.truncate(slot, kept)
        else:
            self.cleared(slot)
            self._tree.add_prefix(slot, waiting.watch, kept)
        if kept and precision is not None:
            self._wear(slot, precision)
        self._live[slot.band][slot.stream] = _Live(waiting.group, hits if source.kind == "take_over" else 0)
        self._count(source, waiting, kept)
        self._tree.unwatch(waiting.watch)

    def _use(self, source: Source, kept: int, now_s: float) -> int:
        """Note that a resident was of use; its hits so far."""
        resident = self._residents.get(source.holder) if source.holder is not None else None
        if resident is None or source.holder is None:
            return 0
        if kept > self._tree.shared_tokens(source.holder):
            return self._residents.use(source.holder, now_s)
        return resident.hits

    def _count(self, source: Source, waiting: _Waiting, kept: int) -> None:
        totals = self.totals
        kind: SourceKind = source.kind if kept else "compute"
        totals.begun[kind] = totals.begun.get(kind, 0) + 1
        if not waiting.resumed:
            totals.sequences += 1
            totals.prompt_tokens += waiting.watch.tokens
            totals.cached_tokens += kept
            totals.saved_s += source.saved_s if kept else 0.0

    def computed(self, slot: Slot, tokens: Iterable[int]) -> None:
        """The KV of ``tokens`` was added to a live stream."""
        self._tree.extend(slot, tokens)

    def _wear(self, slot: Slot, precision: KvDtype) -> None:
        if coarser(precision, self._bands[slot.band].kv_dtype) != self._bands[slot.band].kv_dtype:
            self._worn[slot] = precision

    def precision(self, slot: Slot) -> KvDtype:
        """The coarsest precision that the KV in ``slot`` went through."""
        return self._worn.get(slot, self._bands[slot.band].kv_dtype)

    def ended(self, slot: Slot, now_s: float) -> None:
        """Nobody runs in the stream any more, and its KV stays where it is: it is a resident from now on."""
        live = self._live[slot.band].pop(slot.stream)
        if self._tree.tokens(slot):
            self._residents.keep(slot, live.group, live.hits, now_s)
        else:
            self._tree.remove(slot)
            self._worn.pop(slot, None)

    def moved(self, old: Slot, new: Slot) -> None:
        """A live sequence and all its KV are now in ``new``; ``old`` is empty. A resident that was in ``new`` is
        gone. Raises ValueError when somebody runs in ``new``."""
        if new.stream in self._live[new.band]:
            raise ValueError(f"somebody runs in {new}")
        precision = self.precision(old)
        self.cleared(new)
        self._tree.rename(old, new)
        self._worn.pop(old, None)
        self._wear(new, precision)
        self._live[new.band][new.stream] = self._live[old.band].pop(old.stream)

    def exchanged(self, old: Slot, new: Slot) -> None:
        """A live sequence is now in ``new``, and the resident that was there in ``old``. Raises ValueError when
        somebody runs in ``new``, KeyError when it keeps nothing."""
        if new.stream in self._live[new.band]:
            raise ValueError(f"somebody runs in {new}")
        self._residents.rename(new, old)
        self._tree.exchange(old, new)
        worn = {one: self._worn.pop(other) for one, other in ((old, new), (new, old)) if other in self._worn}
        self._worn |= worn
        self._live[new.band][new.stream] = self._live[old.band].pop(old.stream)

    def restarted(self, slot: Slot) -> None:
        """A live stream lost its KV, and its sequence is computed again in it."""
        self._tree.truncate(slot, 0)
        self._worn.pop(slot, None)

    def cleared(self, slot: Slot) -> None:
        """The stream is empty, whatever was in it. Nothing happens when it was."""
        self._live[slot.band].pop(slot.stream, None)
        self._worn.pop(slot, None)
        if slot in self._residents:
            self._residents.drop(slot)
            self.totals.evicted += 1
        if slot in self._tree:
            self._tree.remove(slot)

    # ------------------------------------------------------------------------------------------ for the stores

    def unsaved(self) -> list[Slot]:
        """Residents that the stores (``kv.tiers``) have not been shown and may have, longest idle first."""
        return [slot for slot in self._residents.holders() if self.storable(slot) and not self._residents.saved(slot)]

    def storable(self, slot: Slot) -> bool:
        """Whether the stream keeps an ended sequence's KV, as precise as its band keeps it: the stores tell blocks
        apart by what a band keeps, not by what they went through before."""
        return slot in self._residents and slot not in self._worn

    def saved(self, slot: Slot) -> None:
        """The stores have what they want of the resident in ``slot``. Raises KeyError when there is none."""
        self._residents.save(slot)

    def whole_blocks(self, slot: Slot) -> tuple[Hashable, str, list[bytes]]:
        """Namespace, group and the packed tokens of every whole block of the resident in ``slot``. Raises KeyError when
        there is none."""
        resident = self._residents.get(slot)
        if resident is None:
            raise KeyError(slot)
        return self._tree.namespace(slot), resident.group, self._tree.whole_blocks(slot)

    # ------------------------------------------------------------------------------------------------ accounts

    def tokens(self, slot: Slot) -> int:
        """Tokens whose KV is in ``slot``; 0 when it is empty."""
        return self._tree.tokens(slot) if slot in self._tree else 0

    def held(self) -> list[tuple[Slot, int]]:
        """Every stream that holds something, or somebody runs in, with its tokens."""
        return [(slot, self._tree.tokens(slot)) for slot in self._tree.holders()]

    def shared_tokens(self, slot: Slot) -> int:
        """Of the tokens in ``slot``, those in whole blocks that another stream holds too; 0 when it is empty."""
        return self._tree.shared_tokens(slot) if slot in self._tree else 0

    @property
    def waiting_ids(self) -> list[str]:
        """Who waits for a stream."""
        return list(self._waiting)

    @property
    def resident_slots(self) -> list[Slot]:
        """Streams that keep an ended sequence's KV."""
        return self._residents.holders()

    @property
    def resident_tokens(self) -> int:
        """Tokens that residents hold."""
        return sum([self._tree.tokens(slot) for slot in self._residents.holders()])

    @property
    def residents(self) -> int:
        """Streams that keep an ended sequence's KV."""
        return len(self._residents)

    def check_integrity(self) -> str | None:
        """None when the tree is sound and every holder is either live or a resident; else what is wrong."""
        problem = self._tree.check_integrity()
        if problem is not None:
            return problem
        live = {Slot(band, stream) for band, streams in enumerate(self._live) for stream in streams}
        idle = set(self._residents.holders())
        if live & idle:
            return f"live and a resident at once: {sorted(live & idle, key=lambda s: (s.band, s.stream))}"
        if not set(self._worn) <= live | idle:
            return f"{sorted(self._worn, key=lambda s: (s.band, s.stream))} are worn, some of them empty"
        if live | idle != set(self._tree.holders()):
            return f"{len(live)} live and {len(idle)} idle streams, but {len(self._tree)} hold something"
        return None
