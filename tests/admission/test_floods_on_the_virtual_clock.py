"""The system as it ships, admission before ``hybrid``, on the virtual clock: a flood in one lane, or from one tenant,
costs the others at most two points of attainment, at half of the capacity.

Mix, step times and streams are those of ``benchmarks.bursts``, whose larger run has figures by lane. Here the others'
requests, some 1,200, are taken together: of one lane's 250, chance alone moves the difference by a point.
"""

from __future__ import annotations

import pytest

from benchmarks import bursts
from headrace.admission.parts import Parts

SEEDS = range(1, 5)
RATE = 1.175
"""Requests a second: half of what ``bursts.capacity`` finds."""


def lost(flooding: str, tenant: str | None) -> float:
    """What the others' usual requests lose by a flood of ten times a lane's rate for a minute."""
    share = bursts.MIX[flooding].share
    flood = bursts.stream(
        "flood",
        flooding,
        f"burst(0, {(bursts.FLOOD - 1) * RATE * share}, at={bursts.STARTS_S}, length={bursts.FLOOD_S})",
        None if tenant is None else {tenant: 1.0},
    )
    usually, flooded = (
        bursts.attainment(
            bursts.of(
                bursts.run_all(streams, "hybrid", SEEDS, True),
                lambda request: request.lane != flooding or tenant is not None,
            )
        )
        for streams in (bursts.usual(RATE), [*bursts.usual(RATE), flood])
    )
    return usually - flooded


@pytest.mark.parametrize(("flooding", "tenant"), [("long", None), ("interactive", "flooder")])
def test_a_flood_costs_the_others_at_most_two_points(
    flooding: str, tenant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without parts it costs them three points and more."""
    assert lost(flooding, tenant) <= 0.02
    monkeypatch.setattr(Parts, "excess_s", lambda *_, **__: None)
    monkeypatch.setattr(Parts, "let_in", lambda *_: None)
    assert lost(flooding, tenant) > 0.03
