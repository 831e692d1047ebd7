"""The system as it ships, admission before ``hybrid``, on the virtual clock: a flood in one lane, or from one tenant,
costs the others next to nothing, at half of the capacity.

Mix, step times and streams are those of ``benchmarks.bursts``, whose larger run has the figures (at most two points of
attainment). With the few requests here the allowance is three: chance alone moves the difference of two counts of
some 250 requests by a point.
"""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks import bursts
from headrace.admission.parts import Parts
from headrace.simulate.requests import VirtualRequest

SEEDS = range(1, 5)
RATE = 1.175
"""Requests a second: half of what ``bursts.capacity`` finds."""


def lost(flooding: str, tenant: str | None) -> dict[str, float]:
    """By lane, what the usual requests of the others lose by a flood of ten times a lane's rate for a minute."""
    share = bursts.MIX[flooding].share
    flood = bursts.stream(
        "flood",
        flooding,
        f"burst(0, {(bursts.FLOOD - 1) * RATE * share}, at={bursts.STARTS_S}, length={bursts.FLOOD_S})",
        None if tenant is None else {tenant: 1.0},
    )
    usually = bursts.run_all(bursts.usual(RATE), "hybrid", SEEDS, True)
    flooded = bursts.run_all([*bursts.usual(RATE), flood], "hybrid", SEEDS, True)
    lanes = [lane for lane in bursts.MIX if lane != flooding or tenant is not None]
    return {
        lane: bursts.attainment(bursts.of(usually, partial(_is_of, lane)))
        - bursts.attainment(bursts.of(flooded, partial(_is_of, lane)))
        for lane in lanes
    }


def _is_of(lane: str, request: VirtualRequest) -> bool:
    return request.lane == lane


@pytest.mark.parametrize(("flooding", "tenant"), [("long", None), ("interactive", "flooder")])
def test_a_flood_costs_the_others_at_most_three_points(
    flooding: str, tenant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without parts it costs some lane five points and more."""
    assert max(lost(flooding, tenant).values()) <= 0.03
    monkeypatch.setattr(Parts, "excess_s", lambda *_, **__: None)
    monkeypatch.setattr(Parts, "let_in", lambda *_: None)
    assert max(lost(flooding, tenant).values()) > 0.05
