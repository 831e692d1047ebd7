"""Levels of KV memory: monotone, with hysteresis; whom they move, and when there is room again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.watermarks import LEVELS, KvLevel, Marks, cold_sequences, drain_s, nearly_done, next_level
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.memory import projected_tokens
from headrace.scheduling.sequence import SequenceState

MARKS = Marks()
shares = st.floats(0, 2)


@st.composite
def marks(draw: st.DrawFn) -> Marks:
    gap = draw(st.floats(0.01, 0.2))
    warn = gap + draw(st.floats(0.01, 1))
    refuse = warn + gap + draw(st.floats(0, 0.5))
    return Marks(warn, refuse, refuse + gap + draw(st.floats(0, 0.5)), gap)


def rank(level: KvLevel) -> int:
    return LEVELS.index(level)


def sequence(
    name: str,
    prompt: int,
    *,
    priority: int = 0,
    output: int = 100,
    generated: int = 0,
    deadline_s: float | None = None,
    arrived_s: float = 0.0,
) -> SequenceState:
    state = SequenceState(name, prompt, prompt + output, priority, arrived_s, deadline_s, expected_tokens=output)
    if generated:
        state.known_tokens = prompt + generated
        state.computed_tokens = state.known_tokens - 1
    return state


def prefill_s(start: int, end: int) -> float:
    return 1e-3 * (end - start)


def names(sequences: list[SequenceState]) -> list[str]:
    return [one.request_id for one in sequences]


@pytest.mark.parametrize(
    ("promised", "held", "level"),
    [(0.69, 0.69, "normal"), (0.70, 0.5, "warn"), (0.85, 0.5, "refuse"), (3.0, 0.94, "refuse"), (1.0, 0.95, "move")],
)
def test_levels_begin_at_their_marks(promised: float, held: float, level: KvLevel) -> None:
    """Promises warn and refuse; only what is held moves anybody."""
    assert next_level("normal", held, promised, MARKS) == level


@pytest.mark.parametrize("level", LEVELS[1:])
def test_a_level_is_left_the_gap_below_its_mark(level: KvLevel) -> None:
    mark = MARKS.of(level)
    inside, outside = mark - MARKS.gap + 0.001, mark - MARKS.gap - 0.001
    assert next_level(level, inside, inside, MARKS) == level
    assert rank(next_level(level, outside, outside, MARKS)) < rank(level)


@given(st.sampled_from(LEVELS), shares, shares, st.floats(0, 1), st.floats(0, 1), marks())
def test_more_memory_never_means_a_lower_level(
    level: KvLevel, held: float, waiting: float, more_held: float, more_waiting: float, used: Marks
) -> None:
    before = next_level(level, held, held + waiting, used)
    after = next_level(level, held + more_held, held + more_held + waiting + more_waiting, used)
    assert rank(after) >= rank(before)


@given(st.sampled_from(LEVELS), shares, shares, marks())
def test_the_same_memory_again_changes_nothing(level: KvLevel, held: float, waiting: float, used: Marks) -> None:
    once = next_level(level, held, held + waiting, used)
    assert next_level(once, held, held + waiting, used) == once


@given(marks(), st.sampled_from(LEVELS), st.floats(0, 1.5), st.lists(st.floats(0, 0.99), min_size=2, max_size=40))
def test_what_wiggles_within_the_gap_changes_the_level_at_most_once(
    used: Marks, level: KvLevel, low: float, wiggles: list[float]
) -> None:
    """Once it has been seen: from where it is then it goes one level up or down, and never back."""
    seen = [level]
    for wiggle in wiggles:
        share = low + wiggle * used.gap
        seen.append(next_level(seen[-1], share, share, used))
    ranks = [rank(one) for one in seen[1:]]
    assert ranks in (sorted(ranks), sorted(ranks, reverse=True))
    assert len(set(ranks)) <= 2  # marks are a gap apart at least: one of them lies within the wiggle at most


@pytest.mark.parametrize(
    ("warn", "refuse", "move", "gap"),
    [
        (0.7, 0.7, 0.95, 0.05),
        (0.9, 0.85, 0.95, 0.05),
        (0.7, 0.85, 0.95, 0.2),
        (0.04, 0.85, 0.95, 0.05),
        (0.7, 0.85, 0.95, 0),
    ],
)
def test_marks_that_are_no_ladder_are_refused(warn: float, refuse: float, move: float, gap: float) -> None:
    with pytest.raises(ValueError, match="gap"):
        Marks(warn, refuse, move, gap)
    with pytest.raises(ValueError, match="gap"):
        SchedulingKnobs(kv_warn=warn, kv_refuse=refuse, kv_move=move, kv_gap=gap)


def test_the_least_urgent_move_first_and_of_those_the_longest() -> None:
    running = [
        sequence("urgent", 9000, priority=0, deadline_s=1.0),
        sequence("shorter", 9000, priority=20),
        sequence("longer", 12000, priority=20),
        sequence("middle", 15000, priority=10),
    ]
    assert names(cold_sequences(running, 1, long_tokens=8192, most_tokens=20000)) == ["longer"]
    assert names(cold_sequences(running, 10**6, long_tokens=8192, most_tokens=20000)) == ["longer", "shorter", "middle"]


def test_urgent_short_ones_and_those_about_to_finish_and_those_too_large_to_come_back_stay() -> None:
    running = [
        sequence("chat", 100, priority=10, deadline_s=1.0),
        sequence("ending", 9000, priority=90, generated=85),
        sequence("begun", 9000, priority=90, generated=10),
        sequence("giant", 19000, priority=90),
    ]
    assert nearly_done(running[1]) and not nearly_done(running[2])
    assert names(cold_sequences(running, 10**6, long_tokens=8192, most_tokens=18000)) == ["begun"]


@given(
    st.lists(st.tuples(st.integers(1, 20000), st.integers(0, 5), st.booleans()), max_size=12), st.integers(-10, 60000)
)
def test_no_more_move_than_are_needed_and_somebody_stays(shapes: list[tuple[int, int, bool]], excess: int) -> None:
    running = [
        sequence(f"s{n}", prompt, priority=priority, deadline_s=1.0 if urgent else None)
        for n, (prompt, priority, urgent) in enumerate(shapes)
    ]
    cold = cold_sequences(running, excess, long_tokens=8192, most_tokens=10**6)
    assert len(cold) < max(1, len(running)) and len(set(names(cold))) == len(cold)
    assert sum([projected_tokens(one) for one in cold[:-1]]) < max(1, excess)
    if excess <= 0:
        assert not cold


def test_room_comes_when_enough_sequences_have_ended() -> None:
    """1 ms a prompt token, 10 ms a decode step: the first ends after 1 s + 1 s, the second after 3 s + 1 s."""
    running = [sequence("a", 1000), sequence("b", 2000)]

    def drain(excess: int, waiting: list[SequenceState]) -> float:
        return drain_s(running, waiting, excess, prefill_s=prefill_s, decode_step_s=1e-2)

    assert drain(0, []) == 0.0
    assert drain(1, []) == pytest.approx(2.0)
    assert drain(1153, []) == pytest.approx(4.0)
    assert drain(10**6, [sequence("c", 1000)]) == pytest.approx(5.0)


@given(st.lists(st.integers(1, 20000), min_size=1, max_size=8), st.integers(1, 60000), st.integers(0, 60000))
def test_more_excess_never_drains_sooner(prompts: list[int], excess: int, more: int) -> None:
    running = [sequence(f"s{n}", prompt) for n, prompt in enumerate(prompts)]
    first = drain_s(running, [], excess, prefill_s=prefill_s, decode_step_s=1e-2)
    assert 0 < first <= drain_s(running, [], excess + more, prefill_s=prefill_s, decode_step_s=1e-2)
