"""When an arrival is worth cutting a pass: only if that, and nothing less, saves its deadline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.cut import ArrivalFacts, RunningPass, first_token_s, saves_deadline

TIMES = st.floats(0, 100)


def test_it_cuts_exactly_while_the_deadline_lies_between_now_and_the_end() -> None:
    """With 0.1 s of its own and a pass that runs from 10 to 10.5 s: due from 10.1 s (met if cut now) to just before
    10.6 s (met without)."""
    running = RunningPass(ends_s=10.5, priority=5)
    verdicts = [
        saves_deadline(ArrivalFacts(deadline_s, 0), 10.0, running, 0.1)
        for deadline_s in (10.05, 10.1, 10.3, 10.59, 10.6, 11.0)
    ]
    assert verdicts == [False, True, True, True, False, False]


def test_nothing_to_save_nothing_cut() -> None:
    """No deadline, no room, or a pass past its predicted end."""
    running = RunningPass(ends_s=10.5, priority=5)
    assert saves_deadline(ArrivalFacts(10.3, 0), 10.0, running, 0.1)
    assert not saves_deadline(ArrivalFacts(None, 0), 10.0, running, 0.1)
    assert not saves_deadline(ArrivalFacts(10.3, 0, has_room=False), 10.0, running, 0.1)
    assert not saves_deadline(ArrivalFacts(10.9, 0), 10.7, running, 0.1)


def test_what_is_more_urgent_is_never_cut() -> None:
    """A better priority in the pass, or the same and due no later; one due later, or without a target, is."""
    arrival = ArrivalFacts(10.3, 5)

    def verdict(priority: int, deadline_s: float | None) -> bool:
        return saves_deadline(arrival, 10.0, RunningPass(10.5, priority, deadline_s), 0.1)

    assert not verdict(4, None) and not verdict(4, 20.0)
    assert not verdict(5, 10.3) and not verdict(5, 10.1)
    assert verdict(5, 10.4) and verdict(5, None) and verdict(6, 10.1)


@given(TIMES, TIMES, TIMES, TIMES, st.integers(0, 3), st.integers(0, 3), st.none() | TIMES)
def test_a_cut_always_turns_a_miss_into_a_hit(
    now_s: float, ends_s: float, own_s: float, due_s: float, priority: int, other: int, other_due_s: float | None
) -> None:
    """Whatever the numbers: cut now it is met, waited for it is missed."""
    running = RunningPass(ends_s, other, other_due_s)
    if saves_deadline(ArrivalFacts(due_s, priority), now_s, running, own_s):
        assert now_s + own_s <= due_s < ends_s + own_s
        assert priority < other or (priority == other and (other_due_s is None or other_due_s > due_s))


class Rows:
    """A pass takes 1 s, and 0.01 s for each row and each pair."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return 1.0 + rows / 100 + pairs / 100

    def move_s(self, tokens: int, band: int) -> float:
        return 0.0


def test_the_first_token_waits_for_what_is_not_cached_in_chunks_with_a_decode_before_each() -> None:
    """20 tokens in chunks of 16: two passes. With 8 or 19 of them cached: one, over the context that is there."""

    def own_s(cached_tokens: int) -> float:
        return first_token_s(20, cached_tokens, Rows(), chunk_tokens=16, decode_s=0.5)

    assert own_s(0) == pytest.approx((0.5 + 1 + 0.16 + 1.36) + (0.5 + 1 + 0.04 + 0.74))  # floats add up in any order
    assert own_s(8) == pytest.approx(0.5 + 1 + 0.12 + 1.74)
    assert own_s(19) == pytest.approx(0.5 + 1 + 0.01 + 0.20)
