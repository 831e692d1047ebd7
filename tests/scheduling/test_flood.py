"""A flood under ``hybrid`` on the virtual clock: it delays itself."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from headrace.scheduling.bands import Band
from headrace.scheduling.debts import Debts
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.simulate.requests import Targets, VirtualRequest
from headrace.simulate.simulation import Event
from headrace.simulate.step_times import SMOLLM2_2_THREADS
from tests.scheduling.test_properties import every
from tests.simulate.rig import Rig

SECONDS = 60.0


def served(lane: str, tenant: str, priority: int) -> list[bool]:
    """Whether each of a modest tenant's requests was good, beside a flood. The flooder asks for twice what the engine
    can do, at the most urgent priority; the modest one sends a request of some 0.5 s of work every 5 s, a sixth of its
    part."""
    rig = Rig([Band(1024, 16)], times=SMOLLM2_2_THREADS, knobs=SchedulingKnobs(strategy="hybrid"))

    def flood(number: int, now_s: float) -> Iterable[Event]:
        targets = Targets(ttft_s=1.0, tpot_s=0.1)
        request = VirtualRequest(
            f"f{number}", now_s, 100, 30, lane="short", tenant="flooder", priority=0, targets=targets
        )
        return rig.engine.submit(request, now_s)

    def modest(number: int, now_s: float) -> Iterable[Event]:
        request = VirtualRequest(
            f"m{number}", now_s, 400, 20, lane=lane, tenant=tenant, priority=priority, targets=Targets(ttft_s=3.0)
        )
        return rig.engine.submit(request, now_s)

    rig.simulation.add(every(0.1, SECONDS, flood), every(5.0, SECONDS, modest))
    rig.run(until_s=SECONDS)
    assert len(rig.engine.waiting) > 50, "the engine keeps up: this is no flood"
    rig.run()
    return [rig.record(f"m{number}").good for number in range(12)]


@pytest.mark.parametrize(("lane", "tenant", "priority"), [("short", "a", 0), ("long", "b", 50)])
def test_a_flood_of_urgent_requests_leaves_a_modest_tenant_its_deadlines(
    lane: str, tenant: str, priority: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same lane or of a less urgent one: from the first request on, all of them meet their deadline of 3 s. Were
    debts never brought up to now, all after the first would miss it."""
    assert all(served(lane, tenant, priority))
    monkeypatch.setattr(Debts, "refresh", lambda *_: None)
    assert served(lane, tenant, priority) == [True] + [False] * 11
