"""Deadlines and output limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.lanes.deadline import deadline_s, effective_slo, output_limit
from headrace.lanes.lane import SLO, Lane


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (SLO(), None),
        (SLO(p99_tpot_s=0.01), None),
        (SLO(p99_ttft_s=0.5), 100.5),
        (SLO(p99_e2e_s=2.0), 102.0),
        (SLO(p99_ttft_s=0.5, p99_e2e_s=2.0), 100.5),
        (SLO(p99_ttft_s=3.0, p99_e2e_s=2.0), 102.0),
    ],
)
def test_the_deadline_is_arrival_plus_the_first_target_that_can_be_missed(slo: SLO, expected: float | None) -> None:
    assert deadline_s(Lane(slo=slo), 100.0) == expected


def test_a_requests_own_targets_replace_the_lanes_one_by_one() -> None:
    lane = Lane(slo=SLO(p99_ttft_s=0.5, p99_e2e_s=2.0))
    own = SLO(p99_ttft_s=5.0, p99_tpot_s=0.1)
    assert effective_slo(lane, own) == SLO(p99_ttft_s=5.0, p99_tpot_s=0.1, p99_e2e_s=2.0)
    assert deadline_s(lane, 100.0, own) == 102.0
    assert deadline_s(lane, 100.0, None) == 100.5


@pytest.mark.parametrize(
    ("lane", "requested", "room", "expected"),
    [
        (Lane(), None, 500, 500),
        (Lane(default_max_tokens=64), None, 500, 64),
        (Lane(default_max_tokens=64), None, 10, 10),
        (Lane(default_max_tokens=64), 200, 500, 200),
        (Lane(max_tokens=100), 200, 500, 100),
        (Lane(max_tokens=100), None, 500, 100),
        (Lane(max_tokens=100), 0, 500, 0),
        (Lane(), 5, -3, 0),
    ],
)
def test_output_is_what_was_asked_within_the_cap_and_the_room(
    lane: Lane, requested: int | None, room: int, expected: int
) -> None:
    assert output_limit(lane, requested, room) == expected


_CAPS = st.none() | st.integers(1, 100)


@settings(deadline=None)
@given(_CAPS, _CAPS, st.none() | st.integers(0, 200), st.integers(-10, 200))
def test_no_limit_is_ever_exceeded(cap: int | None, default: int | None, requested: int | None, room: int) -> None:
    limit = output_limit(Lane(max_tokens=cap, default_max_tokens=default), requested, room)
    assert 0 <= limit <= max(0, room)
    assert cap is None or limit <= cap
    assert requested is None or limit <= requested
