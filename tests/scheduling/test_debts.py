"""Who is in debt, and for how long: nobody who asks for no more than its part, and a flood until it is served."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.debts import DEBT_LIMIT_S, SERVABLE, Debts, Owner, water_level

FLOOD, MODEST = ("a", None), ("b", None)


def flooded(seconds: float, *, tenants: tuple[Owner, ...] = (FLOOD, MODEST), modest: float = 0.2) -> Debts:
    """Every second the first owner asks for two seconds of work, the last for ``modest``; both always wait, and are
    served all the time."""
    debts = Debts()
    for owner in tenants:
        debts.waits(owner, 0.0)
    for tick in range(int(seconds * 10)):
        now_s = tick / 10
        debts.arrived(tenants[0], 0.2, now_s, 1.0)
        debts.arrived(tenants[-1], modest / 10, now_s, 1.0)
        for owner in tenants:
            debts.admitted(owner, now_s)
        debts.refresh(now_s, {})
    return debts


def test_a_flood_is_in_debt_and_who_stays_within_its_part_is_not() -> None:
    """Although both wait."""
    debts = flooded(10.0)
    assert debts.indebted == {FLOOD}
    assert MODEST not in debts.debts_s


@pytest.mark.parametrize("modest", [0.4 * SERVABLE, 0.45 * SERVABLE])
def test_whoever_asks_for_just_less_than_half_beside_a_flood_has_no_debt(modest: float) -> None:
    assert MODEST not in flooded(30.0, modest=modest).debts_s


def test_a_tenant_that_floods_is_in_debt_and_the_others_of_its_lane_are_not() -> None:
    flooder, other = ("a", "x"), ("a", "y")
    assert flooded(10.0, tenants=(flooder, other)).indebted == {flooder}


def test_who_is_alone_has_no_debt() -> None:
    """Nobody waits for its sake."""
    assert not flooded(30.0, tenants=(FLOOD,)).debts_s


def test_the_debt_lasts_until_the_flood_would_be_served() -> None:
    """Twenty seconds of asking for 2 s per second leave 40 - 20 * SERVABLE + 4 of the modest one's seconds at SERVABLE
    a second."""
    debts = flooded(20.0)
    left_s = (2.2 - SERVABLE) * 20.0 / SERVABLE
    lasts = []
    for tick in range(int(left_s) * 20):
        now_s = 20.0 + tick / 10
        debts.admitted(FLOOD, now_s)
        debts.arrived(MODEST, 0.0, now_s, 1.0)
        debts.refresh(now_s, {})
        lasts.append(FLOOD in debts.indebted)
    # What its deadlines allow and the threshold are a few seconds of it.
    assert sum(lasts) / 10 == pytest.approx(left_s, abs=8.0)
    assert not lasts[-1]


def test_when_nothing_waits_everything_is_forgiven() -> None:
    debts = flooded(10.0)
    debts.waits_no_more(FLOOD)
    debts.waits_no_more(MODEST)
    debts.refresh(10.2, {})
    assert not debts.debts_s and not debts.indebted


def test_work_that_is_withdrawn_was_not_asked_for() -> None:
    debts = flooded(10.0)
    debts.withdrawn(FLOOD, 20.0)
    debts.refresh(10.2, {})
    assert not debts.debts_s


def test_without_an_admission_a_debt_ends() -> None:
    """After ``DEBT_LIMIT_S``, however much was asked for: whoever is not served is not starved."""
    debts = flooded(60.0)
    for tick in range(int(DEBT_LIMIT_S * 10) + 5):
        debts.arrived(MODEST, 0.02, 60.0 + tick / 10, 1.0)
        debts.refresh(60.0 + tick / 10, {})
    assert FLOOD not in debts.debts_s


def test_a_heavier_lane_has_a_larger_part() -> None:
    """Both ask for as much; with a weight of 9 it is within its part, with 1 it is not."""
    debts = Debts()
    for owner in (FLOOD, MODEST):
        debts.waits(owner, 0.0)
    for tick in range(200):
        for owner in (FLOOD, MODEST):
            debts.arrived(owner, 0.05, tick / 10, 1.0)
            debts.admitted(owner, tick / 10)
        debts.refresh(tick / 10, {"a": 9.0})
    assert debts.indebted == {MODEST}


@given(
    asked=st.lists(st.tuples(st.floats(0, 10), st.sampled_from([0.5, 1.0, 4.0])), max_size=8),
    capacity=st.floats(0.01, 20),
)
def test_the_water_level_gives_out_the_capacity_or_what_is_asked_for(
    asked: list[tuple[float, float]], capacity: float
) -> None:
    level = water_level(asked, capacity)
    total = sum(work for work, _ in asked)
    if level == math.inf:
        assert total <= capacity + 1e-9
    else:
        assert sum(min(work, level * weight) for work, weight in asked) == pytest.approx(min(total, capacity))
