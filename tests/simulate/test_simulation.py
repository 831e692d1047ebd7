"""One clock, one seed: what happens when."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from headrace.simulate.simulation import Event, Simulation, SimulationError


def noted(seen: list[str], name: str) -> Callable[[float], Iterable[Event]]:
    def happen(now_s: float) -> Iterable[Event]:
        seen.append(f"{name}@{now_s:g}")
        return ()

    return happen


def test_events_happen_by_time_then_rank_then_in_the_order_put_in() -> None:
    """Whoever reacts to everything that happened at a time takes a higher rank and comes last."""
    simulation, seen = Simulation(), list[str]()
    simulation.add(Event(2.0, noted(seen, "late")), Event(1.0, noted(seen, "reacts"), rank=1))
    simulation.add(Event(1.0, noted(seen, "first")), Event(1.0, noted(seen, "second")))
    simulation.run()
    assert seen == ["first@1", "second@1", "reacts@1", "late@2"]


def test_an_event_returns_the_events_that_follow_from_it() -> None:
    """A part needs no access to the simulation, only to what it was told."""
    simulation, seen = Simulation(), list[float]()

    def tick(now_s: float) -> Iterable[Event]:
        seen.append(now_s)
        return (Event(now_s + 1, tick),) if now_s < 3 else ()

    simulation.add(Event(0.0, tick))
    simulation.run()
    assert seen == [0, 1, 2, 3] and simulation.now_s == 3


def test_nothing_happens_in_the_past() -> None:
    """A part that asks for it has a bug, and time never goes back."""
    simulation = Simulation(start_s=5.0)
    with pytest.raises(SimulationError, match="too late"):
        simulation.add(Event(4.0, noted([], "never")))
    with pytest.raises(SimulationError, match="too late"):
        simulation.add(Event(float("nan"), noted([], "never")))


def test_a_run_stops_at_its_time_and_goes_on_from_there() -> None:
    """Events at the limit itself still happen; the clock stands at the limit."""
    simulation, seen = Simulation(), list[str]()
    simulation.add(*(Event(at_s, noted(seen, "x")) for at_s in (1.0, 2.0, 3.0)))
    simulation.run(until_s=2.0)
    assert seen == ["x@1", "x@2"] and simulation.now_s == 2.0 and simulation.next_s == 3.0
    simulation.run(until_s=2.5)
    assert len(seen) == 2 and simulation.now_s == 2.5
    simulation.run(most=1)
    assert len(seen) == 3


def test_random_sources_depend_on_the_seed_and_their_name_alone() -> None:
    """A part that draws more often moves no other part's draws."""
    first, second = Simulation(seed=7), Simulation(seed=7)
    first.random("other").random()
    assert first.random("engine").random() == second.random("engine").random()
    assert first.random("engine").random() != first.random("other").random()
    assert first.random("engine").random() != Simulation(seed=8).random("engine").random()
