"""Traffic for the virtual clock."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.simulate.arrivals import RequestStream, feed, requests_of
from headrace.simulate.requests import Targets, VirtualRequest
from headrace.simulate.simulation import Event, Simulation, SimulationError

CHAT = RequestStream("chat", "interactive", "poisson(5)", "uniform(10, 50)", "uniform(5, 20)", 10, Targets(ttft_s=0.5))
DOCUMENTS = RequestStream("documents", "long", "poisson(1)", "fixed(900)", "fixed(200)")


def test_adding_a_stream_moves_no_other_one() -> None:
    """Runs with and without a flood hold the same other requests, to the nanosecond."""
    alone = requests_of([CHAT], seed=3, duration_s=20, longest_tokens=1024)
    both = requests_of([DOCUMENTS, CHAT], seed=3, duration_s=20, longest_tokens=1024)
    assert len(alone) > 50
    assert [request for request in both if request.lane == "interactive"] == alone
    assert both == sorted(both, key=lambda request: request.arrived_s)


def test_a_seed_gives_a_load_and_another_one_another() -> None:
    """Reproducible, and not always the same."""
    draw = [requests_of([CHAT], seed=seed, duration_s=20, longest_tokens=1024) for seed in (3, 3, 4)]
    assert draw[0] == draw[1] != draw[2]


def test_requests_carry_what_their_stream_says() -> None:
    """Lane, priority, targets; deadlines count from the arrival; tenants come by weight."""
    stream = RequestStream(
        **{name: getattr(CHAT, name) for name in CHAT.__struct_fields__ if name != "tenants"},
        tenants={"a": 3.0, "b": 1.0},
    )
    requests = requests_of([stream], seed=1, duration_s=200, longest_tokens=1024)
    first = requests[0]
    assert (first.lane, first.priority, first.request_id) == ("interactive", 10, "chat-0")
    assert first.deadline_s == first.arrived_s + 0.5 and first.finish_by_s is None
    # 1,000 draws with a chance of 0.75: five standard deviations are 0.07.
    share = sum(request.tenant == "a" for request in requests) / len(requests)
    assert abs(share - 0.75) < 0.07


def test_prompts_are_cut_to_what_fits_with_their_output() -> None:
    """No request is one that no engine could hold."""
    stream = RequestStream("huge", "long", "constant(1)", "fixed(5000)", "fixed(4000)")
    for request in requests_of([stream], seed=1, duration_s=5, longest_tokens=1000):
        assert request.prompt_tokens + request.output_tokens < 1000 and request.output_tokens == 500


def test_arrivals_without_times_of_their_own_are_refused() -> None:
    """A closed loop waits for answers, which nobody has yet; a text that means nothing names its stream."""
    for arrivals, error, words in (
        ("closed(4)", SimulationError, "chat.*no times"),
        ("sometimes(4)", ConfigError, "chat"),
    ):
        stream = RequestStream("chat", "x", arrivals, "fixed(5)", "fixed(5)")
        with pytest.raises(error, match=words):
            requests_of([stream], seed=1, duration_s=5, longest_tokens=100)


def test_requests_are_fed_at_their_times() -> None:
    """One event after the other: the queue never holds more than the next arrival."""
    simulation, seen = Simulation(), list[tuple[str, float]]()

    def submit(request: VirtualRequest, now_s: float) -> tuple[Event, ...]:
        seen.append((request.request_id, now_s))
        return ()

    requests = requests_of([CHAT], seed=3, duration_s=5, longest_tokens=1024)
    simulation.add(*feed(requests, submit))
    simulation.run()
    assert seen == [(request.request_id, request.arrived_s) for request in requests]
    assert feed([], submit) == ()
