"""Reuse against streams that really hold tokens: what a placement promises is there, whatever came before."""

from __future__ import annotations

import pytest

from headrace.kv.reuse import PrefixReuse
from headrace.kv.sources import Placement
from headrace.scheduling.bands import Band
from headrace.scheduling.sequence import Slot
from tests.kv.streams import BANDS, TIMES


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
