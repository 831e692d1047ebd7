"""The cheapest way to begin: against a search through all of them, and one property at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.sources import (
    Candidate,
    CarryTime,
    Placement,
    SourceTimes,
    StreamChoice,
    place,
    stream_choices,
)
from headrace.scheduling.bands import Band
from headrace.scheduling.cost import CostModel, prefill_pairs
from headrace.scheduling.sequence import Slot

BANDS = (Band(2048, 8), Band(8192, 4))


@dataclass(frozen=True)
class Linear:
    """A machine whose times are lines: so much a row, a pair, a call, a copy."""

    row_s: float = 2e-3
    pair_s: float = 1e-7
    call_overhead_s: float = 5e-3
    copy_s: float = 0.035

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return self.call_overhead_s + rows * self.row_s + pairs * self.pair_s

    def move_s(self, tokens: int, band: int) -> float:
        return self.copy_s


LINEAR = st.builds(
    Linear,
    row_s=st.floats(1e-5, 1e-2),
    pair_s=st.floats(0, 1e-6),
    call_overhead_s=st.floats(0, 1e-2),
    copy_s=st.floats(0, 5),
)
TIMES = st.builds(
    SourceTimes,
    steps=LINEAR,
    carry_s_per_token=st.floats(0, 1e-2),
    chunk_tokens=st.sampled_from((64, 512)),
    copies=st.booleans(),
)
CANDIDATES = st.lists(
    st.builds(
        lambda band, stream, tokens, more, take_s: Candidate(
            Slot(band, stream), tokens, tokens + more, take_s if band == 0 else None
        ),
        st.integers(0, 1),
        st.integers(0, 7),
        st.integers(0, 2000),
        st.integers(0, 2000),
        st.none() | st.floats(0, 3),
    ),
    max_size=6,
    unique_by=lambda candidate: candidate.slot,
).map(lambda found: sorted(found, key=lambda candidate: -candidate.tokens))
CHOICES = st.lists(
    st.builds(StreamChoice, st.integers(0, 7), st.floats(0, 3)), min_size=1, max_size=5, unique_by=lambda c: c.stream
).map(lambda choices: sorted(choices, key=lambda choice: (choice.cost_s, choice.stream)))


def sums(
    candidates: list[Candidate], choices: list[StreamChoice], prompt: int, times: SourceTimes, parked: int
) -> dict[tuple[str, Slot | None, int], tuple[float, float]]:
    """Own time and what others lose, for every (way, holder, stream) that there is. What has something parked begins
    with that, or with as much."""
    ways: dict[tuple[str, Slot | None, int], tuple[float, float]] = {}
    least = min(parked, prompt - 1)
    for choice in choices:
        if least:
            restore_s = times.carry_s(parked) / 2 + times.compute_s(least, prompt)
            ways["restore", None, choice.stream] = (restore_s, choice.cost_s)
        else:
            ways["compute", None, choice.stream] = (times.compute_s(0, prompt), choice.cost_s)
    for candidate in candidates:
        tokens = min(candidate.tokens, prompt - 1)
        if tokens < max(1, least):
            continue
        rest_s = times.compute_s(tokens, prompt)
        if candidate.take_s is not None:
            ways["take_over", candidate.slot, candidate.slot.stream] = (rest_s, candidate.take_s)
        for choice in choices:
            if candidate.slot == Slot(0, choice.stream):
                continue
            if times.copies and candidate.slot.band == 0:
                copy_s = times.steps.move_s(candidate.length, 0)
                ways["copy", candidate.slot, choice.stream] = (rest_s + copy_s, choice.cost_s)
            if candidate.length <= BANDS[0].max_context_tokens:
                ways["carry", candidate.slot, choice.stream] = (
                    rest_s + times.carry_s(candidate.length),
                    choice.cost_s,
                )
    return ways


@given(CANDIDATES, CHOICES, st.integers(1, 2047), TIMES, st.integers(0, 1500))
def test_no_way_is_cheaper_than_the_chosen_one(
    candidates: list[Candidate], choices: list[StreamChoice], prompt: int, times: SourceTimes, parked: int
) -> None:
    """Against a search through every way and every stream: the sum is the least (of equal ones any), the chosen way
    is one that there is, and but for what was parked it is never slower than computing everything."""
    placed = place(candidates, choices, prompt_tokens=prompt, band=0, bands=BANDS, times=times, parked_tokens=parked)
    ways = sums(candidates, choices, prompt, times, parked)
    all_s = times.compute_s(0, prompt)
    useful = {way: (own, others) for way, (own, others) in ways.items() if way[1] is None or own < all_s}
    own_s, others_s = useful[placed.source.kind, placed.source.holder, placed.slot.stream]
    assert own_s + others_s == pytest.approx(min(own + others for own, others in useful.values()), abs=1e-9)
    assert placed.source.own_s == pytest.approx(own_s)
    assert placed.source.own_s <= all_s or placed.source.kind == "restore"
    assert placed.source.saved_s == pytest.approx(max(0.0, all_s - own_s), abs=1e-9)
    assert 0 <= placed.source.tokens <= prompt - 1 and placed.slot.band == 0


@given(st.integers(1, 2046), st.integers(0, 2047), TIMES, st.sampled_from(("take_over", "copy", "carry")))
def test_more_in_common_never_takes_longer(tokens: int, more: int, times: SourceTimes, way: str) -> None:
    """One holder, one way at a time: with a longer common prefix of the same holder the predicted time does not
    rise."""
    slot = Slot(1, 0) if way == "carry" else Slot(0, 3)

    def own_s(common: int) -> float:
        candidate = Candidate(slot, common, 2048, 0.0 if way == "take_over" else None)
        return place(
            [candidate], [StreamChoice(0, 0.0)], prompt_tokens=2048, band=0, bands=BANDS, times=times
        ).source.own_s

    # Times of calls are sums of floats: equal up to rounding.
    assert own_s(min(2047, tokens + more)) <= own_s(tokens) + 1e-9


@given(CANDIDATES, CHOICES, st.integers(1, 2047), TIMES, st.floats(0, 5))
def test_a_dearer_copy_is_not_chosen_where_a_cheaper_one_was_not(
    candidates: list[Candidate], choices: list[StreamChoice], prompt: int, times: SourceTimes, dearer_s: float
) -> None:
    """Raising the price of a copy never brings one about, and never makes the whole cheaper."""
    assert isinstance(times.steps, Linear)
    dear = replace(times, steps=replace(times.steps, copy_s=times.steps.copy_s + dearer_s))
    cheap_placed = place(candidates, choices, prompt_tokens=prompt, band=0, bands=BANDS, times=times)
    dear_placed = place(candidates, choices, prompt_tokens=prompt, band=0, bands=BANDS, times=dear)
    assert dear_placed.source.kind != "copy" or cheap_placed.source.kind == "copy"
    if cheap_placed.source.kind != "copy":
        assert dear_placed == cheap_placed


@given(st.integers(0, 8000), st.integers(1, 8000), st.sampled_from((64, 100, 512)))
def test_the_time_to_compute_is_that_of_its_chunks(start: int, tokens: int, chunk: int) -> None:
    """For the engine's own cost model the closed form equals the sum over chunks, but for whole pairs lost in the
    average (less than one a chunk)."""
    model = CostModel()
    times = SourceTimes(model, 0.0, chunk)
    total_s, position, chunks = 0.0, start, 0
    while position < start + tokens:
        rows = min(chunk, start + tokens - position)
        total_s += model.call_s(rows, 0, prefill_pairs(position, rows))
        position += rows
        chunks += 1
    one_pair_s = model.call_s(64, 0, 1000) - model.call_s(64, 0, 999)
    assert times.compute_s(start, start + tokens) == pytest.approx(total_s, abs=chunks * one_pair_s + 1e-9)
    assert times.compute_s(start, start) == 0.0


def simple(candidate: Candidate, choices: list[StreamChoice], prompt: int = 1000) -> Placement:
    return place(
        [candidate],
        choices,
        prompt_tokens=prompt,
        band=0,
        bands=BANDS,
        times=SourceTimes(Linear(), 1e-5, 512),
    )


def test_a_few_common_tokens_do_not_cost_somebody_else_a_long_context() -> None:
    """Five tokens of a chat template in common: the resident, worth a second, stays, and the empty stream is used. A
    resident of which nothing else is lost is taken."""
    empty = [StreamChoice(4, 0.0)]
    assert simple(Candidate(Slot(0, 2), 5, 900, take_s=1.0), empty).source.kind != "take_over"
    taken = simple(Candidate(Slot(0, 2), 900, 900, take_s=0.0), empty)
    assert taken.source.kind == "take_over" and taken.slot == Slot(0, 2) and taken.source.tokens == 900


def test_the_last_prompt_token_is_always_computed() -> None:
    """A prompt that is held whole begins with all but its last token; a prompt of one token is computed."""
    assert simple(Candidate(Slot(0, 2), 1000, 1500, take_s=0.0), [StreamChoice(4, 0.0)]).source.tokens == 999
    one = simple(Candidate(Slot(0, 2), 1, 1500, take_s=0.0), [StreamChoice(4, 0.0)], prompt=1)
    assert one.source.kind == "compute" and one.source.tokens == 0


class Steep:
    """A machine on which half a prompt takes longer than the whole, for a kernel that likes full batches."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return 1.0 if rows == 512 else 2.0

    def move_s(self, tokens: int, band: int) -> float:
        return 0.0


def test_nobody_waits_longer_for_a_cached_prefix_than_for_computing_it() -> None:
    """Not even where that would spare others more than it costs."""
    placed = place(
        [Candidate(Slot(0, 2), 256, 256, take_s=0.0)],
        [StreamChoice(4, 5.0)],
        prompt_tokens=512,
        band=0,
        bands=BANDS,
        times=SourceTimes(Steep(), 0.0, 512),
    )
    assert placed.source.kind == "compute" and placed.source.own_s == 1.0


def test_what_does_not_fit_the_band_is_not_carried_into_it() -> None:
    """libllama writes a stream's whole state: 3,000 tokens do not go into a stream of 2,048."""
    fits = simple(Candidate(Slot(1, 0), 900, 2048), [StreamChoice(4, 0.0)])
    assert fits.source.kind == "carry" and fits.source.holder == Slot(1, 0)
    assert simple(Candidate(Slot(1, 0), 900, 2049), [StreamChoice(4, 0.0)]).source.kind == "compute"


def test_a_stream_is_not_copied_onto_itself() -> None:
    """When the only free stream is the resident's own, it is taken over or its sequence computed."""
    only = [StreamChoice(2, 0.7)]
    assert simple(Candidate(Slot(0, 2), 500, 900, take_s=0.3), only).source.kind == "take_over"
    assert simple(Candidate(Slot(0, 2), 500, 900, take_s=None), only).source.kind == "compute"
    with pytest.raises(ValueError, match="no stream"):
        simple(Candidate(Slot(0, 2), 500, 900), [])


def test_empty_streams_go_first_lowest_first_then_the_resident_worth_least() -> None:
    """On a band where nobody runs."""
    order = stream_choices(6, (), {0: 0.5, 3: 0.1, 4: 0.2}, gap_s=0.035)
    assert [choice.stream for choice in order] == [1, 2, 5, 3, 4, 0]


def test_beside_live_streams_a_worthless_resident_goes_before_a_gap_and_a_worthy_one_stays() -> None:
    """Streams 3 and 4 are live: 2 and 5 touch them. A resident worth less than a move gives way, one worth more does
    not."""
    order = stream_choices(8, {3, 4}, {2: 0.01, 5: 0.05}, gap_s=0.035)
    assert [choice.stream for choice in order] == [2, 0, 1, 6, 7, 5]


def test_carrying_is_learned_by_the_token() -> None:
    """After twenty carries of another speed the prediction is that speed; an empty stream teaches nothing."""
    carry = CarryTime()
    for _ in range(20):
        carry.learn(1000, 0.05)
    assert carry.s_per_token == pytest.approx(5e-5, rel=0.01)  # 0.7 ** 20 of the prior is left
    carry.learn(0, 1.0)
    assert carry.s_per_token == pytest.approx(5e-5, rel=0.01)
