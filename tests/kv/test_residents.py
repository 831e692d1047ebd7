"""What an idle stream is worth: how likely it is used again, learned by lane, forgotten with time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.group_chance import HALF_LIFE_S
from headrace.kv.residents import IdleResidents


def test_the_chance_halves_with_every_half_life_unused() -> None:
    """Recency counts, and a use makes a resident fresh again."""
    residents: IdleResidents[int] = IdleResidents()
    residents.keep(0, "chat", 0, now_s=0.0)
    fresh = residents.chance(0, 0.0)
    assert residents.chance(0, HALF_LIFE_S) == pytest.approx(fresh / 2)
    assert residents.chance(0, 3 * HALF_LIFE_S) == pytest.approx(fresh / 8)
    assert residents.use(0, 3 * HALF_LIFE_S) == 1
    assert residents.chance(0, 3 * HALF_LIFE_S) > fresh


@given(st.integers(0, 20), st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_chance_is_a_share_that_grows_with_hits_and_falls_with_age(hits: int, age_s: float, more_s: float) -> None:
    """Between 0 and 1; one more hit never lowers it, more time never raises it."""
    residents: IdleResidents[int] = IdleResidents()
    residents.keep(0, "", hits, 0.0)
    residents.keep(1, "", hits + 1, 0.0)
    assert 0.0 <= residents.chance(0, age_s) <= residents.chance(1, age_s) <= 1.0
    assert residents.chance(0, age_s + more_s) <= residents.chance(0, age_s)


def test_lanes_learn_apart_whether_their_residents_are_of_use() -> None:
    """After 100 captions that nobody asked for and 100 dialogues of which 80 came back, the first chances are about
    none and about 0.8 (within 0.1: some 49 residents are remembered, and the standard error of a share over so many is
    0.06)."""
    residents: IdleResidents[int] = IdleResidents()
    before = residents.first_chance("captions")
    for turn in range(100):
        residents.keep(0, "captions", 0, float(turn))
        residents.drop(0)
        residents.keep(0, "chat", 0, float(turn))
        if turn % 5:
            residents.use(0, float(turn))
            residents.use(0, float(turn))  # a second use of the same resident is no second resident
        residents.drop(0)
    assert before == 0.25
    assert residents.first_chance("captions") < 0.02
    assert residents.first_chance("chat") == pytest.approx(0.8, abs=0.1)
    assert residents.first_chance("never seen") == 0.25


def test_a_stream_keeps_one_resident_at_a_time() -> None:
    """Keeping a second one is an error of the caller; strangers are none."""
    residents: IdleResidents[int] = IdleResidents()
    residents.keep(3, "", 2, 1.0)
    with pytest.raises(ValueError, match="already"):
        residents.keep(3, "", 0, 2.0)
    assert 3 in residents and 4 not in residents and len(residents) == 1 and residents.holders() == [3]
    kept = residents.get(3)
    assert kept is not None and (kept.hits, kept.used_s, kept.used) == (2, 1.0, False)
    residents.drop(3)
    assert residents.get(3) is None
    with pytest.raises(KeyError):
        residents.drop(3)
