"""Who may enter a KV budget: by the length that sequences are expected to end with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.admissible import Room, admissible
from headrace.scheduling.bands import Band
from headrace.scheduling.batch_room import BatchRoom
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.memory import MemoryLimits, MemoryRoom, projected_tokens
from headrace.scheduling.order import WaitingQueue
from headrace.scheduling.sequence import SequenceState, Slot
from headrace.scheduling.step import SchedulerState
from headrace.scheduling.view import view_of

LIMITS = MemoryLimits(budget_tokens=32768, long_most_tokens=27852, long_tokens=8192)


def sequence(name: str, prompt: int, *, output: int = 100, computed: int = 0) -> SequenceState:
    return SequenceState(name, prompt, prompt + output, 0, 0.0, expected_tokens=output, computed_tokens=computed)


def test_a_sequence_counts_with_the_length_that_it_is_expected_to_end_with() -> None:
    """In whole blocks of 128; once it is longer than expected, a block more than it has, but never beyond its limit."""
    one = SequenceState("a", 1000, 2000, 0, 0.0, expected_tokens=100)
    assert projected_tokens(one) == 1152
    one.known_tokens = 1100
    assert projected_tokens(one) == 1280
    one.known_tokens = 1990
    assert projected_tokens(one) == 2048


@given(st.integers(1, 20000), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_a_projection_holds_what_is_there_and_never_shrinks_as_it_grows(
    prompt: int, limit: int, expected: int, generated: int
) -> None:
    one = SequenceState("a", prompt, prompt + limit, 0, 0.0, expected_tokens=expected)
    before = projected_tokens(one)
    one.known_tokens = prompt + min(generated, limit)
    assert projected_tokens(one) >= max(before, one.known_tokens)


def test_long_ones_leave_the_last_part_to_short_ones() -> None:
    room = MemoryRoom(LIMITS, [sequence("d1", 12500), sequence("d2", 12500)])
    assert not room.fits(sequence("d3", 12500))
    assert room.fits(sequence("short", 3000))
    for number in range(2):
        room.take(sequence(f"short{number}", 3000))
    assert not room.fits(sequence("short", 3000))
    room.give_back(sequence("d1", 12500))
    assert room.fits(sequence("short", 3000))


def test_what_was_parked_comes_back_only_when_there_is_more_than_a_little_room() -> None:
    room = MemoryRoom(LIMITS, [sequence("a", 7900), sequence("b", 7900)])
    assert room.fits(sequence("fresh", 12500))
    assert not room.fits(sequence("parked", 12500, computed=12000))
    lost = sequence("its KV could not be kept", 12500)
    lost.made_way = True
    assert not room.fits(lost)


def test_when_nobody_runs_anybody_may_enter() -> None:
    assert MemoryRoom(LIMITS, []).fits(sequence("giant", 40000, computed=39000))


def state(running: list[SequenceState], waiting: list[SequenceState], now_s: float = 0.0) -> SchedulerState:
    for number, one in enumerate(running):
        one.slot = Slot(0, number)
    return SchedulerState(
        now_s=now_s,
        bands=(Band(32768, 8),),
        free_streams=(8 - len(running),),
        waiting=waiting,
        running=running,
        knobs=SchedulingKnobs(),
        memory=LIMITS,
    )


def test_streams_that_are_free_are_not_given_beyond_the_budget() -> None:
    """By every strategy's room; short ones pass documents that wait."""
    waiting = [sequence(f"d{number}", 12500) for number in range(5)] + [sequence("short", 500)]
    now = state([], waiting)
    entered = [one.request_id for one, _ in admissible(waiting, Room(now), now)]
    assert entered == ["d0", "d1", "short"]


def test_the_hybrid_strategys_room_keeps_the_budget_too() -> None:
    now = state([sequence("d0", 12500), sequence("d1", 12500)], [])
    room = BatchRoom(now, view_of(now), WaitingQueue(now.bands, now.knobs), 1.0)
    assert not room.lets_in(sequence("d2", 12500), 0)
    assert room.lets_in(sequence("short", 500), 0)
    room.give_back(now.running[0])
    assert room.lets_in(sequence("d2", 12500), 0)


def test_nobody_waits_for_ever_behind_smaller_ones() -> None:
    """After a minute what the oldest needs is kept free; others enter only beside it, and it enters when it fits."""
    old = sequence("old", 30000)
    young = SequenceState("young", 3000, 3100, 0, 61.0, expected_tokens=100)
    for now_s, enters in ((59.0, ["young"]), (61.0, [])):
        now = state([sequence("running", 3000)], [old, young], now_s)
        assert [one.request_id for one, _ in admissible([old, young], Room(now), now)] == enters
    tiny = SequenceState("tiny", 10, 20, 0, 61.0, expected_tokens=10)
    small = state([sequence("running", 3000)], [sequence("old", 29000), tiny], 61.0)
    assert [one.request_id for one, _ in admissible([tiny], Room(small), small)] == ["tiny"]
    alone = state([], [old, young], 61.0)
    assert [one.request_id for one, _ in admissible([young, old], Room(alone), alone)] == ["young"]
