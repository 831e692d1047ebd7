"""Reuse against streams that really hold tokens: what a placement promises is there, whatever came before."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.kv.reuse import PrefixReuse
from headrace.kv.sources import Placement
from headrace.scheduling.bands import Band
from headrace.scheduling.sequence import Slot
from tests.kv.sequences_of_runs import SEQUENCES, common_length

BANDS = (Band(1024, 4), Band(4096, 2))


class Machine:
    """Predicted times of a slow processor: 2 ms a prefill token, 35 ms a copy."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return 0.005 + rows * 2e-3 + pairs * 1e-7

    def move_s(self, tokens: int, band: int) -> float:
        return 0.035


TIMES = Machine()


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


def run(
    reuse: PrefixReuse,
    name: str,
    prompt: list[int],
    *,
    tenant: str = "",
    group: str = "",
    now_s: float = 0.0,
    band: int = 0,
) -> Placement:
    """Admit a sequence and compute its prompt."""
    reuse.wait(name, tenant, prompt, group=group)
    placement = reuse.place(name, band, now_s, TIMES, chunk_tokens=256)
    reuse.began(name, placement, now_s)
    reuse.computed(placement.slot, prompt[placement.source.tokens :])
    return placement


def test_a_second_turn_takes_over_the_stream_of_the_first_and_computes_only_what_is_new() -> None:
    """Nothing else is lost by it, so nothing is copied; prompt and savings are counted."""
    reuse = PrefixReuse(BANDS)
    first = run(reuse, "turn 1", list(range(500)))
    reuse.computed(first.slot, range(500, 600))
    reuse.ended(first.slot, 1.0)
    second = run(reuse, "turn 2", list(range(600)) + [7] * 50, now_s=6.0)
    assert second.slot == first.slot
    assert (second.source.kind, second.source.tokens) == ("take_over", 600)
    assert second.source.own_s == pytest.approx(TIMES.call_s(50, 0, 50 * 600 + 50 * 51 // 2))
    totals = reuse.totals
    assert (totals.sequences, totals.prompt_tokens, totals.cached_tokens, totals.evicted) == (2, 1150, 600, 0)
    assert totals.hit_rate == pytest.approx(600 / 1150) and totals.begun == {"compute": 1, "take_over": 1}
    assert totals.saved_s == second.source.saved_s > 0


def test_two_conversations_of_one_application_share_its_system_prompt_by_copy() -> None:
    """The first still runs: its stream is copied, and cut to the 400 tokens that both have."""
    reuse = PrefixReuse(BANDS)
    system = list(range(400))
    first = run(reuse, "a", system + [1] * 300)
    second = run(reuse, "b", system + [2] * 300)
    assert second.slot == Slot(0, 1) and second.source.holder == first.slot
    assert second.source.kind in ("copy", "carry") and second.source.tokens == 400


def test_a_conversation_that_waits_for_its_user_survives_a_flood_of_captions() -> None:
    """Captions end, their residents are worth little, and they give way to one another; the dialogue's 700 tokens stay
    although they are older."""
    reuse = PrefixReuse(BANDS)
    dialogue = [5] * 700
    reuse.ended(run(reuse, "chat", dialogue, group="chat").slot, 0.0)
    for number in range(40):
        caption = run(reuse, f"c{number}", [1000 + number] * 100, group="captions", now_s=0.5 * number)
        reuse.ended(caption.slot, 0.5 * number)
    assert reuse.totals.evicted >= 40 - BANDS[0].max_sequences
    back = run(reuse, "chat again", [*dialogue, 6], group="chat", now_s=25.0)
    assert (back.source.kind, back.source.tokens) == ("take_over", 700)


def test_of_two_alike_residents_the_one_that_was_used_longer_ago_goes() -> None:
    """Recency decides where nothing else does."""
    reuse = PrefixReuse((Band(1024, 2),))
    old = run(reuse, "old", [1] * 300)
    new = run(reuse, "new", [2] * 300)
    reuse.ended(new.slot, 0.0)
    reuse.ended(old.slot, 60.0)
    placed = run(reuse, "third", [3] * 300, now_s=61.0)
    assert placed.slot == new.slot and reuse.totals.evicted == 1


def test_what_others_hold_too_is_no_reason_to_keep_a_resident() -> None:
    """A system prompt of 512 tokens in two streams is lost with neither: the one of 552 tokens goes before one that
    has 300 of its own."""
    reuse = PrefixReuse((Band(1024, 3),))
    system = [9] * 512
    prompts = ([*system, *[0] * 200], [*system, *[1] * 40], [2] * 300)
    slots = [run(reuse, f"r{n}", prompt).slot for n, prompt in enumerate(prompts)]
    for slot in slots:
        reuse.ended(slot, 1.0)
    placed = run(reuse, "other", [8] * 300, now_s=2.0)
    assert placed.slot == slots[1]


def test_only_uses_of_what_is_a_residents_own_count_for_it() -> None:
    """Turns of a conversation add up over the streams' owners. Copies of a system prompt that two residents hold
    say nothing about either."""
    reuse = PrefixReuse((Band(1024, 4),))
    talk = [3] * 200
    for turn in range(3):
        slot = run(reuse, f"turn {turn}", talk, now_s=float(turn)).slot
        reuse.ended(slot, float(turn))
        talk = [*talk, *[turn] * 50]
    kept = reuse._residents.get(slot)
    assert kept is not None and kept.hits == 2
    system = [9] * 512
    slots = [run(reuse, f"r{n}", [*system, *[n] * 200], now_s=3.0).slot for n in range(2)]
    for slot in slots:
        reuse.ended(slot, 3.0)
    copied = run(reuse, "other", [*system, 7], now_s=4.0)
    assert copied.source.tokens == 512 and copied.source.holder in slots
    assert [resident.hits for slot in slots if (resident := reuse._residents.get(slot))] == [0, 0]


def test_an_idle_stream_of_another_band_is_read_and_not_taken() -> None:
    """Its stream is of another length: the prefix is carried over, and the resident stays."""
    reuse = PrefixReuse(BANDS)
    idle = run(reuse, "a", [1] * 600, band=0).slot
    reuse.ended(idle, 0.0)
    longer = run(reuse, "b", [1] * 600 + [2] * 600, band=1, now_s=1.0)
    assert (longer.source.kind, longer.source.holder, longer.source.tokens) == ("carry", idle, 600)
    assert longer.slot == Slot(1, 0) and reuse.residents == 1


def test_a_prefix_apart_from_the_live_streams_is_carried_next_to_them_when_that_is_cheap() -> None:
    """Streams 0 and 1 are live and 2 is empty; 600 tokens rest in 3. Computed from there, every step would need a pass
    more; carrying them to stream 2 takes 7 ms, the move that would follow 35."""
    reuse = PrefixReuse((Band(1024, 4),))
    slots = [run(reuse, f"r{n}", [n] * 600).slot for n in range(4)]
    reuse.cleared(slots[2])
    reuse.ended(slots[3], 0.0)
    placed = run(reuse, "next", [3] * 600 + [9], now_s=1.0)
    assert (placed.slot, placed.source.kind, placed.source.holder) == (slots[2], "carry", slots[3])


def test_a_move_onto_a_resident_of_no_worth_ends_it() -> None:
    """One move, one eviction, and the old stream is empty."""
    reuse = PrefixReuse((Band(1024, 2),))
    idle, live = run(reuse, "idle", [1] * 300).slot, run(reuse, "live", [2] * 400).slot
    reuse.ended(idle, 0.0)
    reuse.moved(live, idle)
    assert (reuse.tokens(idle), reuse.tokens(live), reuse.residents, reuse.totals.evicted) == (400, 0, 0, 1)
    assert reuse.check_integrity() is None


def test_a_move_onto_a_valuable_resident_exchanges_the_two() -> None:
    """What is worth more than the carry lives on in the stream that the sequence left; empty streams keep nothing."""
    reuse = PrefixReuse((Band(1024, 3),))
    idle, live = run(reuse, "idle", [1] * 600).slot, run(reuse, "live", [2] * 300).slot
    reuse.ended(idle, 0.0)
    assert reuse.worth_keeping(idle, 1.0, TIMES, chunk_tokens=256)
    assert not reuse.worth_keeping(idle, 1e5, TIMES, chunk_tokens=256)  # nobody comes back after a day
    assert not reuse.worth_keeping(Slot(0, 2), 1.0, TIMES, chunk_tokens=256)
    reuse.exchanged(live, idle)
    assert (reuse.tokens(idle), reuse.tokens(live), reuse.residents) == (300, 600, 1)
    assert reuse.check_integrity() is None
    back = run(reuse, "again", [1] * 600 + [3], now_s=2.0)
    assert (back.slot, back.source.kind) == (live, "take_over")
    with pytest.raises(ValueError, match="somebody runs"):
        reuse.exchanged(live, idle)


def test_a_model_that_cannot_drop_tokens_reuses_whole_sequences_only() -> None:
    """A resident that begins the prompt is taken; one that goes on otherwise is not cut."""
    reuse = PrefixReuse(BANDS, can_truncate=False)
    reuse.ended(run(reuse, "a", [1] * 300).slot, 0.0)
    assert run(reuse, "differs", [1] * 299 + [2] * 50).source.kind == "compute"
    continued = run(reuse, "goes on", [1] * 300 + [2] * 50)
    assert (continued.source.kind, continued.source.tokens) == ("take_over", 300)
    reuse.ended(continued.slot, 1.0)
    assert run(reuse, "again", [1] * 300 + [2] * 50).source.kind == "compute"


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed() -> None:
    """Logits at every position need every position computed."""
    reuse = PrefixReuse(BANDS)
    reuse.ended(run(reuse, "a", [1] * 300).slot, 0.0)
    reuse.wait("echo", "", [1] * 300)
    placement = reuse.place("echo", 0, 1.0, TIMES, chunk_tokens=256, reusable=False)
    assert placement.source.kind == "compute" and placement.slot == Slot(0, 1)


def test_a_victim_returns_to_its_stream_or_is_read_back_and_is_no_saving() -> None:
    """While its KV is still in place nothing is read; when it is gone, the copy in RAM is. Neither counts as cached:
    the engine computed those tokens for this very sequence."""
    reuse = PrefixReuse((Band(1024, 2),))
    known = [4] * 600
    slot = run(reuse, "v", known).slot
    reuse.ended(slot, 1.0)
    reuse.wait("v", "", [*known, 5], resumed=True)
    assert reuse.place("v", 0, 2.0, TIMES, chunk_tokens=256, parked_tokens=600).source.kind == "take_over"
    reuse.cleared(slot)
    restored = reuse.place("v", 0, 2.0, TIMES, chunk_tokens=256, parked_tokens=600)
    assert (restored.source.kind, restored.source.tokens) == ("restore", 600)
    before = (reuse.totals.sequences, reuse.totals.prompt_tokens, reuse.totals.cached_tokens)
    reuse.began("v", restored, 2.0)
    assert (reuse.totals.sequences, reuse.totals.prompt_tokens, reuse.totals.cached_tokens) == before
    assert reuse.totals.begun["restore"] == 1 and reuse.tokens(restored.slot) == 600


def test_integrity_names_streams_that_are_nobodys_or_twice_somebodys() -> None:
    """The self-check can fail."""
    reuse = PrefixReuse(BANDS)
    slot = run(reuse, "a", [1] * 300).slot
    reuse._residents.keep(slot, "", 0, 0.0)
    assert "at once" in (reuse.check_integrity() or "")
    reuse = PrefixReuse(BANDS)
    slot = run(reuse, "a", [1] * 300).slot
    reuse._live[0].clear()
    assert "hold something" in (reuse.check_integrity() or "")
    reuse = PrefixReuse(BANDS)
    run(reuse, "a", [1] * 300)
    reuse._tree._blocks += 1
    assert "counted" in (reuse.check_integrity() or "")
    with pytest.raises(ValueError, match="somebody runs"):
        reuse.moved(Slot(0, 0), Slot(0, 0))
