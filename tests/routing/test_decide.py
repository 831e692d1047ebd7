"""The choice of a replica."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from headrace.routing.decide import ReplicaView, RouteDecision, RouteRequest, RouteSettings, route

views = st.builds(
    ReplicaView,
    name=st.just(""),
    zone=st.sampled_from([None, "a", "b"]),
    weight=st.floats(0.01, 100),
    healthy=st.booleans(),
    draining=st.booleans(),
    admits=st.booleans(),
    in_flight=st.integers(0, 20),
    limit=st.integers(0, 20),
    max_context_tokens=st.sampled_from([0, 1000, 100_000]),
    waiting_tokens=st.integers(0, 100_000),
    prefill_tokens_per_s=st.sampled_from([0.0, 500.0, 10_000.0]),
    kv_share=st.none() | st.floats(0, 1),
)
fleets = st.lists(views, max_size=8).map(
    lambda found: [replace(view, name=f"r{index}") for index, view in enumerate(found)]
)
requests = st.builds(
    RouteRequest,
    prompt_tokens=st.integers(1, 200_000),
    output_tokens=st.integers(0, 5000),
    matched_tokens=st.dictionaries(st.sampled_from([f"r{n}" for n in range(8)]), st.integers(0, 200_000)),
    session=st.none() | st.sampled_from(["r0", "r1", "gone"]),
    session_tokens=st.integers(0, 100_000),
    avoid=st.frozensets(st.sampled_from([f"r{n}" for n in range(8)])),
)


def choose(request: RouteRequest, fleet: list[ReplicaView], zone: str | None = None, seed: int = 0) -> RouteDecision:
    return route(request, fleet, RouteSettings(own_zone=zone), Random(seed))


@given(requests, fleets, st.sampled_from([None, "a"]), st.integers(0, 3))
def test_who_is_chosen_can_serve_it_and_nobody_is_only_when_nobody_can(
    request: RouteRequest, fleet: list[ReplicaView], zone: str | None, seed: int
) -> None:
    """Well, not draining, let in by its breaker, with room, and long enough; and it was not tried while another is."""

    def can(view: ReplicaView) -> bool:
        needed = request.prompt_tokens + request.output_tokens
        fits = not view.max_context_tokens or needed <= view.max_context_tokens
        return fits and view.healthy and not view.draining and view.admits and view.in_flight < view.limit

    decision = choose(request, fleet, zone, seed)
    able = {view.name for view in fleet if can(view)}
    if decision.replica is None:
        assert not able
        return
    assert decision.replica in able
    assert decision.replica not in request.avoid or able <= request.avoid
    assert 0 <= decision.cached_tokens < max(1, request.prompt_tokens)


@given(requests, fleets)
def test_the_same_state_and_draw_give_the_same_decision(request: RouteRequest, fleet: list[ReplicaView]) -> None:
    assert choose(request, fleet) == choose(request, list(fleet))


def idle(name: str, **changes: object) -> ReplicaView:
    return replace(ReplicaView(name, limit=8, prefill_tokens_per_s=1000.0), **changes)  # type: ignore[arg-type]


def test_the_replica_that_holds_the_prefix_is_cheapest_until_its_queue_costs_more() -> None:
    """2,000 tokens held are worth two seconds of waiting there, not three."""
    request = RouteRequest(prompt_tokens=2100, matched_tokens={"warm": 2000})
    assert choose(request, [idle("cold"), idle("warm", waiting_tokens=1000)]).replica == "warm"
    assert choose(request, [idle("cold"), idle("warm", waiting_tokens=3000)]).replica == "cold"


def test_a_session_stays_while_it_pays() -> None:
    request = RouteRequest(prompt_tokens=3000, session="home", session_tokens=2900)
    assert choose(request, [idle("away"), idle("home", waiting_tokens=2000)]) == RouteDecision(
        "home", "session", 2.1, 2900
    )
    assert choose(request, [idle("away"), idle("home", waiting_tokens=4000)]).replica == "away"


def test_the_own_zone_is_preferred_and_others_take_over() -> None:
    here, there = idle("here", zone="a"), idle("there", zone="b")
    request = RouteRequest(prompt_tokens=10)
    assert choose(request, [here, there], "a").replica == "here"
    assert choose(request, [replace(here, healthy=False), there], "a").replica == "there"
    assert choose(request, [replace(here, in_flight=8), there], "a").replica == "there"


def test_full_kv_memory_costs_and_memory_that_is_not_known_does_not() -> None:
    request = RouteRequest(prompt_tokens=10)
    assert choose(request, [idle("full", kv_share=1.0), idle("unknown")]).replica == "unknown"


def test_ties_are_spread_and_go_to_the_less_loaded_of_two() -> None:
    """Over many draws everybody gets some, and the most loaded of all never wins against anybody."""
    fleet = [idle(f"r{load}", in_flight=load) for load in range(4)]
    chosen = [choose(RouteRequest(prompt_tokens=10), fleet, seed=seed).replica for seed in range(200)]
    assert set(chosen) == {"r0", "r1", "r2"}
    assert chosen.count("r0") > chosen.count("r1") > chosen.count("r2")


def test_the_reason_why_nobody_can_take_it() -> None:
    request = RouteRequest(prompt_tokens=100)
    assert choose(request, []).reason == "no_replicas"
    assert choose(request, [idle("a", max_context_tokens=50)]).reason == "too_long"
    assert choose(request, [idle("a", healthy=False)]).reason == "unhealthy"
    assert choose(request, [idle("a", draining=True)]).reason == "unhealthy"
    assert choose(request, [idle("a", admits=False)]).reason == "breaker"
    assert choose(request, [idle("a", in_flight=8)]).reason == "full"
