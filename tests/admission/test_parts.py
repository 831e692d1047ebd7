"""Parts of the engine at the door: a flood is shed, and whoever asks for what it usually asks for is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.admission.parts import SERVABLE, Parts, allowed_s

Owner = tuple[str, str | None]
CHAT, TITLES = ("chat", "a"), ("titles", "a")


def asked(
    parts: Parts,
    rates: Mapping[Owner, Callable[[float], float]],
    seconds: float,
    *,
    work_s: float = 0.1,
    weights: Mapping[str, float] | None = None,
) -> dict[Owner, list[tuple[float, float | None]]]:
    """Every owner asks evenly for so much work a second at a time, in requests of ``work_s``; all that was let in
    always waits. For each: when, and what it was told."""
    told: dict[Owner, list[tuple[float, float | None]]] = {owner: [] for owner in rates}
    pending = dict.fromkeys(rates, 0.0)
    waiting: dict[str, frozenset[str | None]] = {}
    for lane, tenant in rates:
        waiting[lane] = waiting.get(lane, frozenset()) | {tenant}
    for tick in range(int(seconds * 10)):
        now_s = tick / 10
        if parts.due(now_s):
            parts.refresh(now_s, waiting)
        for owner, rate in rates.items():
            pending[owner] += rate(now_s) / 10
            while pending[owner] >= work_s:
                pending[owner] -= work_s
                weight = (weights or {}).get(owner[0], 1.0)
                excess_s = parts.excess_s(owner, weight, work_s, allowed_s(1.0, 1.0))
                told[owner].append((now_s, excess_s))
                if excess_s is None:
                    parts.let_in(owner, work_s)
    return told


def let_in(told: list[tuple[float, float | None]], from_s: float = 0.0, to_s: float = 1e9) -> float:
    """The share that was let in."""
    chosen = [excess_s is None for at_s, excess_s in told if from_s <= at_s < to_s]
    return sum(chosen) / len(chosen)


def floods(usual: float, flood: float, at_s: float = 60.0, length_s: float = 60.0) -> Callable[[float], float]:
    return lambda now_s: flood if at_s <= now_s < at_s + length_s else usual


def test_a_lane_that_asks_for_ten_times_its_usual_is_shed_and_the_other_is_not() -> None:
    """After the first seconds the flood gets about what it usually asks for."""
    told = asked(Parts(), {CHAT: floods(0.2, 2.0), TITLES: lambda _: 0.2}, 180.0)
    assert let_in(told[TITLES]) == 1.0
    assert let_in(told[CHAT], 0.0, 60.0) == 1.0
    assert 0.05 < let_in(told[CHAT], 70.0, 120.0) < 0.25


def test_a_lane_is_let_in_again_soon_after_its_flood() -> None:
    told = asked(Parts(), {CHAT: floods(0.2, 2.0, length_s=10.0), TITLES: lambda _: 0.2}, 180.0)
    assert let_in(told[CHAT], 62.0, 70.0) < 0.8
    assert let_in(told[CHAT], 110.0) == 1.0


def test_within_what_the_engine_can_serve_nobody_is_shed() -> None:
    """Whatever its usual was: three times as much, and room for it."""
    told = asked(Parts(), {CHAT: floods(0.1, 0.3), TITLES: lambda _: 0.2}, 180.0)
    assert let_in(told[CHAT]) == let_in(told[TITLES]) == 1.0


def test_of_a_flooded_lane_only_the_tenant_that_floods_is_shed() -> None:
    flooder, other = ("chat", "flooder"), ("chat", "other")
    told = asked(Parts(), {flooder: floods(0.0, 2.0), other: lambda _: 0.1, TITLES: lambda _: 0.2}, 120.0)
    assert let_in(told[other]) == let_in(told[TITLES]) == 1.0
    assert let_in(told[flooder], 70.0) < 0.3


def test_a_tenant_that_floods_the_only_lane_is_shed() -> None:
    flooder, other = ("chat", "flooder"), ("chat", "other")
    told = asked(Parts(), {flooder: floods(0.0, 4.0), other: lambda _: 0.1}, 120.0)
    assert let_in(told[other]) == 1.0
    assert 0.05 < let_in(told[flooder], 80.0) < 0.4


def test_whoever_is_alone_is_never_beyond_its_part() -> None:
    """Nobody feels it; whether it would be late is the prediction's to say."""
    assert let_in(asked(Parts(), {CHAT: floods(0.1, 5.0)}, 120.0)[CHAT]) == 1.0


def test_an_excess_is_let_in_while_the_engine_has_nothing_to_do() -> None:
    parts = Parts()
    asked(parts, {CHAT: floods(0.2, 5.0), TITLES: lambda _: 0.2}, 100.0)
    assert parts.excess_s(CHAT, 1.0, 0.1, 3.0) is not None
    assert parts.excess_s(CHAT, 1.0, 0.1, 3.0, idle=True) is None


def test_shares_of_lasting_contention_are_those_of_the_weights() -> None:
    """Both ask for more than the engine can do, for a quarter of an hour, one with three times the weight."""
    told = asked(Parts(), {CHAT: lambda _: 2.0, TITLES: lambda _: 2.0}, 900.0, weights={"chat": 3.0, "titles": 1.0})
    heavy, light = (let_in(told[owner], 600.0) for owner in (CHAT, TITLES))
    assert light > 0.05
    assert heavy / light == pytest.approx(3.0, rel=0.15)


def test_retry_after_is_when_its_part_has_room() -> None:
    """Whoever comes back a tenth of a second after that (what is served is counted so often) and asks for nothing in
    between is let in."""
    parts = Parts()
    asked(parts, {CHAT: floods(0.2, 3.0), TITLES: lambda _: 0.2}, 90.0)
    excess_s = parts.excess_s(CHAT, 1.0, 0.1, 3.0)
    assert excess_s is not None
    parts.refresh(90.1 + excess_s, {"chat": frozenset({"a"})})
    assert parts.excess_s(CHAT, 1.0, 0.1, 3.0) is None


def test_a_tenant_that_asks_no_more_is_forgotten() -> None:
    parts = Parts()
    for number in range(1000):
        parts.excess_s(("chat", f"t{number}"), 1.0, 0.1, 3.0)
    parts.refresh(0.0, {})
    parts.refresh(300.0, {})
    assert sum(len(lane.tenants) for lane in parts._lanes.values()) == 0


def _steady(rate: float, _: float) -> float:
    return rate


@given(rates=st.lists(st.floats(0.0, SERVABLE / 4), min_size=2, max_size=4))
def test_nobody_is_shed_while_all_ask_for_less_than_the_engine_can_serve(rates: list[float]) -> None:
    """Together, steadily, from the first moment."""
    lanes: dict[tuple[str, str | None], Callable[[float], float]] = {
        (f"lane{number}", None): partial(_steady, rate) for number, rate in enumerate(rates)
    }
    for told in asked(Parts(), lanes, 30.0).values():
        assert all(excess_s is None for _, excess_s in told)
