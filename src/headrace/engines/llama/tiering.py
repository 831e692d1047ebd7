"""Between streams and the stores of KV blocks (``kv.tiers``): what is saved of streams, and when; what fills them.

Saving copies a stream's state out of libllama, which takes the engine's thread: about 12 ms for 1,900 tokens of a small
model. It is done between steps, for a bounded time before each while sequences run, and freely while none does.
Everything after the copy is a worker's (``kv.tiers.worker``). Files are read between steps for as bounded a time; what
takes longer is read beside the steps while its sequence waits (``fetch``).

Which states can be cut into blocks is found out when a context is created, from one that it writes
(``state_blocks``). Where they cannot, the stores stay empty for that context.

Blocks keep the precision of the band that they came from, which is part of their address. A stream of a coarser band is
filled with finer blocks, converted, where they go further than those of its own precision; coarser ones never fill a
finer band.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from headrace.engines.llama.parking import ParkedState
from headrace.engines.llama.state_blocks import StateLayout, join_blocks, split_state
from headrace.errors import EngineError
from headrace.kv.precision import KV_DTYPES, KvDtype, at_least
from headrace.kv.sources import StoredPrefix
from headrace.kv.tiers.address import Fingerprint, Namespace, root_address
from headrace.kv.tiers.block_tree import BlockKind
from headrace.kv.tiers.load_times import Rate
from headrace.kv.token_blocks import KV_BLOCK_TOKENS, token_count
from headrace.messages.engine import TierLoad

if TYPE_CHECKING:
    from collections.abc import Hashable

    from headrace.engines.llama.context import Context
    from headrace.kv.reuse import PrefixReuse
    from headrace.kv.sources import SourceTimes
    from headrace.kv.tiers.kv_tiers import KvTiers
    from headrace.scheduling.bands import Band
    from headrace.scheduling.sequence import Slot

COPY_S: Final = 0.02
"""The most that is copied before a step while sequences run, by prediction, or half of the last step's time if that is
more. A stream that takes longer is saved when nothing runs, or not at all."""
_COPY_S_PER_BYTE: Final = 1 / 4e9
_BUFFERS: Final = 2
"""Buffers that are kept for the next copies: memory that was never touched costs more than the copy."""
MOST_BUFFER_BYTES: Final = int(COPY_S / _COPY_S_PER_BYTE)
"""Of each: what can be copied before a step of others. Larger ones, for long contexts, are given back to the system."""
_PROBE_TOKENS: Final = 1


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a context's states are cut, what its blocks are called, and how precise they are."""

    layout: StateLayout
    kind: BlockKind
    dtype: KvDtype


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where libllama puts a stream into a state: at ``stream`` of ``streams``."""

    stream: int
    streams: int


def _frame(band: Band, stream: int = 0) -> _Frame:
    """A pool is one stream to libllama, whoever's cells are taken out of it."""
    return _Frame(0, 1) if band.pooled else _Frame(stream, band.max_sequences)


class Tiering:
    """The stores of one engine. ``weights`` and ``build`` are those of ``kv.tiers.address.Fingerprint``."""

    def __init__(self, tiers: KvTiers, weights: bytes, build: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.tiers = tiers
        self._weights = weights
        self._build = build
        self._clock = clock
        self._shapes: dict[int, _Shape] = {}
        self._roots: dict[tuple[bytes, Hashable], bytes] = {}
        self.copy_s = 0.0
        self.spare_s = COPY_S
        self._copy_rate = Rate(_COPY_S_PER_BYTE)
        self._buffers: list[memoryview] = []

    # Contexts

    def opened(self, band: int, context: Context, rotation: tuple[int, int] | None) -> None:
        """A band's context was created: find out how its states are cut. ``rotation`` as in ``Fingerprint``; None: not
        known, so nothing of the band is stored."""
        layout = _probe(context) if context.can_remove_last and rotation is not None else None
        if layout is None or rotation is None:
            return
        fingerprint = Fingerprint(self._weights, self._build, layout.digest(), rotation=rotation).digest()
        kind = BlockKind(fingerprint, layout.block_bytes, layout.runs)
        self._shapes[band] = _Shape(layout, kind, context.band.kv_dtype)
        self.tiers.open(kind)
        if not self._buffers:
            most = layout.state_bytes(context.band.max_context_tokens, _frame(context.band).streams)
            self._make_buffer(min(most, MOST_BUFFER_BYTES))

    def _make_buffer(self, size: int) -> None:
        """Have a first buffer made and touched beside the steps."""

        def work() -> object:
            return np.full(size, 1, np.uint8).data

        self.tiers.beside(work, lambda made: self._give_back(cast(memoryview, made)))

    def _take_buffer(self, size: int) -> tuple[memoryview, bool]:
        """A buffer of at least ``size`` bytes, and whether it was touched before."""
        fitting = [buffer for buffer in self._buffers if len(buffer) >= size]
        if not fitting:
            return np.empty(size, np.uint8).data, False
        best = min(fitting, key=len)
        self._buffers = [buffer for buffer in self._buffers if buffer is not best]
        return best, True

    def _give_back(self, buffer: memoryview) -> None:
        """A buffer that nobody reads any more; the largest ones within the limit are kept."""
        kept = [each for each in (*self._buffers, buffer) if len(each) <= MOST_BUFFER_BYTES]
        self._buffers = sorted(kept, key=len)[-_BUFFERS:]

    def _root(self, kind: BlockKind, namespace: Hashable) -> bytes:
        key = (kind.fingerprint, namespace)
        root = self._roots.get(key)
        if root is None:
            root = root_address(kind.fingerprint, cast("Namespace", namespace))
            if len(self._roots) > 10_000:  # tenants come and go
                self._roots.clear()
            self._roots[key] = root
        return root

    # Waiting sequences

    def stored_tokens(self, dtype: KvDtype, namespace: Hashable, data: bytes, *, converts: bool) -> int:
        """How much of a prompt the stores could give to a band of precision ``dtype``, without the prompt's last token.
        ``converts`` here and below: whether finer KV can be converted."""
        best = 0
        for shape in self._usable(dtype, converts):
            best = max(best, self.tiers.stored_tokens(self._root(shape.kind, namespace), data))
        return min(best, max(0, token_count(data) - 1))

    def stored(
        self, band: int, namespace: Hashable, data: bytes, times: SourceTimes, *, idle: bool, converts: bool
    ) -> list[StoredPrefix]:
        """What a stream of ``band`` can be filled with, for the packed prompt ``data``: blocks of its own precision,
        and finer ones that go further. Not ``idle``: no more from disk than there is time for between two steps of
        others."""
        own = self._shapes.get(band)
        if own is None:
            return []
        most_disk_s = math.inf if idle else self.spare_s
        found = self.tiers.stored(self._root(own.kind, namespace), data, most_disk_s)
        held = self.tiers.stored_tokens(self._root(own.kind, namespace), data)
        other = self._finer(own, namespace, data, held) if converts else None
        if other is not None:
            for prefix in self.tiers.stored(self._root(other.kind, namespace), data, most_disk_s):
                if prefix.tokens > held:
                    load_s = prefix.load_s + times.convert_s_per_token * prefix.tokens
                    found.append(StoredPrefix(prefix.kind, prefix.tokens, load_s))
        return found

    def _finer(self, own: _Shape, namespace: Hashable, data: bytes, held_tokens: int) -> _Shape | None:
        """Of finer precisions the one of which most is stored, if that is more than ``held_tokens``."""
        best, most = None, held_tokens
        for shape in self._usable(own.dtype, converts=True):
            tokens = self.tiers.stored_tokens(self._root(shape.kind, namespace), data)
            if shape.dtype != own.dtype and tokens > most:
                best, most = shape, tokens
        return best

    def fetch(
        self,
        name: str,
        dtype: KvDtype,
        namespace: Hashable,
        data: bytes,
        held_tokens: int,
        times: SourceTimes,
        *,
        converts: bool,
    ) -> float | None:
        """Have what is on disk of a waiting prompt, which will begin in a band of precision ``dtype``, read beside the
        steps of others, where that is worth waiting for: ``held_tokens`` of it are in a stream. Returns the time, in
        seconds, that computing would take instead, after which waiting for the disk does not pay any more; None when
        nothing is read."""
        for shape in self._usable(dtype, converts):
            root = self._root(shape.kind, namespace)
            tokens, size = self.tiers.on_disk(root, data)
            compute_s = times.compute_s(held_tokens, tokens) if tokens > held_tokens else 0.0
            if shape.dtype != dtype:
                compute_s -= times.convert_s_per_token * tokens
            held_tokens = max(held_tokens, tokens)
            rates = self.tiers.times
            if size * rates.fetch["disk"].s_per_byte <= self.spare_s:
                continue  # quick enough to be done between two steps
            if size * rates.beside.s_per_byte < compute_s and self.tiers.fetch(name, root, data):
                return compute_s
        return None

    def _usable(self, dtype: KvDtype, converts: bool) -> Iterable[_Shape]:
        """Shapes whose blocks may fill a stream of ``dtype``, one of each kind: its own precision first, then, with
        ``converts``, the finer ones."""
        coarsest_first = sorted(self._shapes.values(), key=lambda shape: -KV_DTYPES.index(shape.dtype))
        fitting = [shape for shape in coarsest_first if at_least(shape.dtype, dtype)]
        found = {shape.kind.fingerprint: shape for shape in fitting if converts or shape.dtype == dtype}
        return found.values()

    def began(self, band: int, namespace: Hashable, data: bytes) -> None:
        """A sequence with the packed prompt ``data`` runs for the first time."""
        shape = self._shapes.get(band)
        if shape is not None:
            self.tiers.began(self._root(shape.kind, namespace), data)

    def fill(
        self,
        band: int,
        context: Context,
        namespace: Hashable,
        data: bytes,
        tokens: int,
        load: Callable[[ParkedState], bool],
    ) -> int:
        """Fill an empty stream of ``band``, through ``load``, with the first ``tokens`` tokens of ``data``, as
        ``stored`` offered them. Returns how many there are in the end: fewer when a block turned out to be damaged; 0,
        and the stream must be cleared, when libllama refuses or conversion fails."""
        own = shape = self._shapes[band]
        held = self.tiers.stored_tokens(self._root(own.kind, namespace), data)
        if tokens > held:
            shape = self._finer(own, namespace, data, held) or own
        if shape is not own:
            self.tiers.began(self._root(shape.kind, namespace), data)
        blocks = self.tiers.load(self._root(shape.kind, namespace), data, tokens)
        tokens = min(tokens, len(blocks) * KV_BLOCK_TOKENS)
        if not tokens:
            return 0
        started_s = self._clock()
        streams = _frame(context.band).streams
        state = context.scratch(shape.layout.state_bytes(tokens, streams))
        join_blocks(shape.layout, blocks, tokens=tokens, streams=streams, target=np.frombuffer(state, np.uint8))
        joined = ParkedState(state, 0, streams, tokens, shape.dtype, shape.dtype)
        if not load(joined):
            return 0
        if shape is own:
            self.tiers.times.join.learn(tokens * shape.layout.token_bytes, self._clock() - started_s)
        return tokens

    # Streams to be saved

    def save_due(
        self,
        reuse: PrefixReuse,
        context_of: Callable[[int], Context],
        times: SourceTimes,
        *,
        idle: bool,
        last_step_s: float = 0.0,
    ) -> None:
        """Between steps: save residents, as many as there is time for, one while ``idle``."""
        self.spare_s = left_s = max(COPY_S, last_step_s / 2)
        for slot in reuse.unsaved():
            cost_s = self._copy_cost_s(slot, reuse)
            if not idle and cost_s > left_s:
                # An estimate that forbids copying would never be corrected.
                self._copy_rate.s_per_byte = max(_COPY_S_PER_BYTE, 0.99 * self._copy_rate.s_per_byte)
                continue
            if not self._save(slot, reuse, context_of(slot.band), times):
                return  # the worker has enough
            left_s -= cost_s
            if idle:
                return

    def save_before_loss(
        self, slot: Slot, reuse: PrefixReuse, context: Context, times: SourceTimes, *, idle: bool
    ) -> None:
        """The resident in ``slot`` is about to go: last chance."""
        shape = self._shapes.get(slot.band)
        if shape is None or not reuse.storable(slot):
            return
        namespace, _, blocks = reuse.whole_blocks(slot)
        missing = self.tiers.missing(self._root(shape.kind, namespace), blocks)
        if not missing:
            return
        if not idle and self._copy_cost_s(slot, reuse) > self.spare_s:
            self.tiers.store.totals.count_unsaved("no_time", missing)
        elif not self._save(slot, reuse, context, times):
            self.tiers.store.totals.count_unsaved("queue_full", missing)

    def _save(self, slot: Slot, reuse: PrefixReuse, context: Context, times: SourceTimes) -> bool:
        """False when the worker has too much to do; the resident stays unsaved then."""
        shape = self._shapes.get(slot.band)
        namespace, group, blocks = reuse.whole_blocks(slot)
        if shape is None or not self.tiers.missing(self._root(shape.kind, namespace), blocks):
            reuse.saved(slot)
            return True
        tokens = reuse.tokens(slot)
        frame = _frame(context.band, slot.stream)
        size = shape.layout.state_bytes(tokens, frame.streams)
        if not self.tiers.has_room(size):
            return False
        started_s = self._clock()
        buffer, touched = self._take_buffer(size)
        data: memoryview | None
        try:
            data = context.save_stream(slot.stream, into=buffer)
        except EngineError:
            data = None
        state = None
        if data is not None:
            state = split_state(data, stream=frame.stream, streams=frame.streams, tokens=tokens)
        took_s = self._clock() - started_s
        self.copy_s += took_s
        if touched:
            self._copy_rate.learn(size, took_s)
        reuse.saved(slot)
        if state is None or state.layout != shape.layout:
            self.tiers.store.totals.count_unsaved("unreadable_state", len(blocks))
            self._give_back(buffer)
            return True
        return self.tiers.capture(
            shape.kind,
            self._root(shape.kind, namespace),
            blocks,
            state.block,
            group=group,
            compute_s=lambda depth: times.compute_s(depth * KV_BLOCK_TOKENS, (depth + 1) * KV_BLOCK_TOKENS),
            context_tokens=tokens,
            held_bytes=size,
            done=lambda: self._give_back(buffer),
        )

    def _copy_cost_s(self, slot: Slot, reuse: PrefixReuse) -> float:
        shape = self._shapes.get(slot.band)
        return 0.0 if shape is None else reuse.tokens(slot) * shape.layout.token_bytes * self._copy_rate.s_per_byte

    # Accounts

    def load(self) -> TierLoad:
        """For whoever watches."""
        tiers, store, totals = self.tiers, self.tiers.store, self.tiers.store.totals
        return TierLoad(
            ram_bytes=store.ram_bytes,
            ram_quota_bytes=store.ram_quota_bytes,
            ram_blocks=store.ram_blocks,
            disk_bytes=store.disk_bytes,
            disk_quota_bytes=store.disk_quota_bytes,
            disk_blocks=store.disk_blocks,
            queued=tiers.queued,
            queued_bytes=tiers.queued_bytes,
            fetched_bytes=tiers.fetches.bytes,
            ram_hit_tokens=totals.ram_hit_tokens,
            disk_hit_tokens=totals.disk_hit_tokens,
            stored=totals.stored,
            deduplicated=totals.deduplicated,
            written=totals.written,
            fetched=totals.fetched,
            ram_evicted=totals.ram_evicted,
            disk_evicted=totals.disk_evicted,
            copy_s=self.copy_s,
            bad=dict(totals.bad),
            unsaved=dict(totals.unsaved),
        )


def _probe(context: Context) -> StateLayout | None:
    """The layout of an empty context's states, from one of a single token; None when it is not known."""
    batch = context.batch
    batch.clear()
    batch.add_chunk([0] * _PROBE_TOKENS, 0, 0, last_output=True, all_outputs=False)
    try:
        context.decode()
        data = context.save_stream(0)
    except EngineError:
        return None
    finally:
        context.clear_stream(0)
    state = split_state(data, stream=0, streams=_frame(context.band).streams, tokens=_PROBE_TOKENS)
    return None if state is None else state.layout
