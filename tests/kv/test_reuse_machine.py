"""The account against streams that really hold tokens, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kv.reuse import PrefixReuse
from headrace.kv.sources import Placement
from headrace.scheduling.sequence import Slot
from tests.kv.sequences_of_runs import SEQUENCES, common_length
from tests.kv.streams import BANDS, TIMES


class Streams:
    """libllama's part: which tokens the KV of each stream belongs to."""

    def __init__(self) -> None:
        self.tokens: dict[Slot, list[int]] = {
            Slot(b, s): [] for b, band in enumerate(BANDS) for s in range(band.max_sequences)
        }

    def carry_out(self, placement: Placement, parked: list[int]) -> None:
        """What the engine does with a placement."""
        source, slot = placement.source, placement.slot
        if source.kind in ("copy", "carry"):
            assert source.holder is not None and source.holder != slot
            if source.kind == "copy":
                assert source.holder.band == slot.band
            held = self.tokens[source.holder]
            assert len(held) <= BANDS[slot.band].max_context_tokens
            self.tokens[slot] = list(held)
        elif source.kind == "restore":
            self.tokens[slot] = list(parked)
        elif source.kind == "compute":
            self.tokens[slot] = []
        else:
            assert source.kind == "take_over" and source.holder == slot
        assert len(self.tokens[slot]) >= source.tokens
        del self.tokens[slot][source.tokens :]


class EngineMachine(RuleBasedStateMachine):
    """An engine with two bands goes through its whole life by the calls that ``core`` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.reuse = PrefixReuse(BANDS, copies=True)
        self.streams = Streams()
        self.waiting: dict[str, tuple[str, list[int]]] = {}
        self.running: dict[str, tuple[str, list[int], Slot]] = {}
        self.idle: dict[Slot, str] = {}
        self.cached: dict[str, int] = {}
        self.parked: dict[str, list[int]] = {}
        self.prompt_tokens = self.cached_tokens = 0
        self.now_s = 0.0
        self.count = 0

    def take(self, slot: Slot) -> None:
        assert slot not in [at for _, _, at in self.running.values()]
        self.idle.pop(slot, None)

    @rule(tenant=st.sampled_from(("a", "b")), tokens=SEQUENCES.filter(bool))
    def submit(self, tenant: str, tokens: list[int]) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.reuse.wait(name, tenant, tokens, group=tenant)
        self.waiting[name] = (tenant, tokens)
        with pytest.raises(ValueError, match="waits already"):
            self.reuse.wait(name, tenant, tokens)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), band=st.integers(0, 1), refused=st.booleans(), now_s=st.floats(0, 100))
    def admit(self, data: st.DataObject, band: int, refused: bool, now_s: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        self.now_s += now_s
        live = [slot for _, _, slot in self.running.values() if slot.band == band]
        if len(live) == BANDS[band].max_sequences:
            with pytest.raises(ValueError, match="no stream"):
                self.reuse.place(name, band, self.now_s, TIMES, chunk_tokens=256)
            return
        tenant, tokens = self.waiting[name]
        if len(tokens) > BANDS[band].max_context_tokens:
            return
        resumed, parked = name in self.parked, self.parked.get(name, [])
        placement = self.reuse.place(name, band, self.now_s, TIMES, chunk_tokens=256, parked_tokens=len(parked))
        again = self.reuse.place(name, band, self.now_s, TIMES, chunk_tokens=256, parked_tokens=len(parked))
        assert placement == again
        del self.waiting[name]
        self.parked.pop(name, None)
        source = placement.source
        if source.holder is not None:
            owner = self.idle.get(source.holder) or next(t for t, _, at in self.running.values() if at == source.holder)
            assert owner == tenant
        self.take(placement.slot)
        self.streams.carry_out(placement, parked)
        kept = source.tokens
        if refused and source.kind in ("copy", "carry"):
            self.streams.tokens[placement.slot] = []
            kept = 0
        assert self.streams.tokens[placement.slot] == tokens[:kept] and kept < len(tokens)
        self.reuse.began(name, placement, self.now_s, kept_tokens=kept)
        self.running[name] = (tenant, tokens, placement.slot)
        self.cached.pop(name, None)
        if not resumed:
            self.prompt_tokens += len(tokens)
            self.cached_tokens += kept

    @precondition(lambda self: self.running)
    @rule(data=st.data(), generated=SEQUENCES)
    def compute(self, data: st.DataObject, generated: list[int]) -> None:
        """The rest of the prompt, and output after it as far as the band goes."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        tenant, tokens, slot = self.running[name]
        room = BANDS[slot.band].max_context_tokens - len(tokens)
        tokens = tokens + generated[: max(0, room)]
        held = self.streams.tokens[slot]
        new = tokens[len(held) :]
        self.streams.tokens[slot] = held + new
        self.reuse.computed(slot, new)
        self.running[name] = (tenant, tokens, slot)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        tenant, _, slot = self.running.pop(name)
        self.reuse.ended(slot, self.now_s)
        if self.streams.tokens[slot]:
            self.idle[slot] = tenant

    @precondition(lambda self: self.running)
    @rule(data=st.data(), in_place=st.booleans())
    def victim(self, data: st.DataObject, in_place: bool) -> None:
        """It gives up its stream, its KV in RAM (and in the stream, for as long as nobody needs it), and waits with
        all that it knows."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        tenant, tokens, slot = self.running.pop(name)
        self.parked[name] = list(self.streams.tokens[slot])
        if not in_place:
            self.reuse.cleared(slot)
            self.streams.tokens[slot] = []
        else:
            self.reuse.ended(slot, self.now_s)
        if self.streams.tokens[slot]:
            self.idle[slot] = tenant
        self.reuse.wait(name, tenant, tokens, group=tenant, resumed=True)
        self.waiting[name] = (tenant, tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), band=st.integers(0, 1), lost=st.booleans())
    def move(self, data: st.DataObject, band: int, lost: bool) -> None:
        """A promotion or a compaction."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        tenant, tokens, old = self.running[name]
        free = BANDS[band].max_sequences - sum(slot.band == band for _, _, slot in self.running.values())
        if not free or len(self.streams.tokens[old]) > BANDS[band].max_context_tokens:
            return
        new = self.reuse.best_stream(band, len(tokens), self.now_s, TIMES, chunk_tokens=256)
        if new in self.idle and self.reuse.worth_keeping(new, self.now_s, TIMES, chunk_tokens=256):
            if len(self.streams.tokens[new]) > BANDS[old.band].max_context_tokens:
                return
            self.idle[old] = self.idle.pop(new)
            self.reuse.exchanged(old, new)
            self.streams.tokens[new], self.streams.tokens[old] = self.streams.tokens[old], self.streams.tokens[new]
        else:
            self.take(new)
            self.reuse.moved(old, new)
            self.streams.tokens[new], self.streams.tokens[old] = self.streams.tokens[old], []
        if lost:
            self.reuse.restarted(new)
            self.streams.tokens[new] = []
        self.running[name] = (tenant, tokens, new)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        slot = self.running.pop(name)[2]
        self.reuse.cleared(slot)
        self.streams.tokens[slot] = []

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[name]
        self.cached.pop(name, None)
        self.parked.pop(name, None)
        self.reuse.gone(name)
        self.reuse.gone(name)

    @invariant()
    def accounts_agree_with_the_streams(self) -> None:
        assert self.reuse.check_integrity() is None
        for slot, tokens in self.streams.tokens.items():
            assert self.reuse.tokens(slot) == len(tokens)
        assert self.reuse.residents == len(self.idle)
        assert self.reuse.resident_tokens == sum(len(self.streams.tokens[slot]) for slot in self.idle)
        assert self.reuse.totals.prompt_tokens == self.prompt_tokens
        assert self.reuse.totals.cached_tokens == self.cached_tokens

    @invariant()
    def waiting_sequences_know_what_they_could_begin_with(self) -> None:
        self.cached.update(self.reuse.changes())
        owners = {**self.idle, **{slot: tenant for tenant, _, slot in self.running.values()}}
        for name, (tenant, prompt) in self.waiting.items():
            held = [self.streams.tokens[slot] for slot, owner in owners.items() if owner == tenant]
            longest = max([common_length(prompt, tokens) for tokens in held], default=0)
            assert self.cached[name] == min(longest // 128 * 128, len(prompt) - 1)


TestEngine = EngineMachine.TestCase


TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
