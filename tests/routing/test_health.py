"""Health from probes, results and progress."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.routing.health import Health, HealthSettings
from headrace.routing.order import rank

SETTINGS = HealthSettings(unhealthy_after=2, failures=3, rest_s=3.0, max_rest_s=12.0, progress_s=10.0)


def well() -> Health:
    health = Health(SETTINGS)
    health.probed(well=True)
    return health


def test_it_begins_as_not_well_and_one_probe_makes_it_well() -> None:
    health = Health(SETTINGS)
    assert health.cause(0.0) == "starting"
    health.probed(well=True)
    assert health.healthy(0.0)


def test_probes_that_fail_in_a_row_make_it_sick() -> None:
    health = well()
    for good, expected in ((False, None), (True, None), (False, None), (False, "probe"), (True, None)):
        health.probed(good)
        assert health.cause(0.0) == expected


def test_failed_requests_send_it_away_though_its_probe_answers_then_one_tries_it() -> None:
    health = well()
    for _ in range(3):
        assert health.healthy(0.0)
        health.failed(0.0)
    health.probed(well=True)
    assert health.cause(2.9) == "results"
    assert health.healthy(3.0)
    health.sent(3.0)
    assert not health.healthy(3.0), "a second request must wait for the trial"
    health.succeeded()
    assert health.healthy(3.0)


def test_each_trial_that_fails_makes_the_rest_longer_up_to_the_limit() -> None:
    health, now_s = well(), 0.0
    for _ in range(3):
        health.failed(now_s)
    for rest_s in (3.0, 6.0, 12.0, 12.0):
        assert not health.healthy(now_s + rest_s - 0.01)
        now_s += rest_s
        assert health.healthy(now_s)
        health.sent(now_s)
        health.failed(now_s)


def test_a_success_between_failures_makes_the_count_begin_anew() -> None:
    health = well()
    for _ in range(10):
        health.failed(0.0)
        health.failed(0.0)
        health.succeeded()
    assert health.healthy(0.0)


def test_streams_without_progress_make_it_sick_whatever_its_probe_says() -> None:
    health = well()
    health.watch(0.0, 3)
    health.progressed(5.0)
    assert not health.watch(14.0, 3)
    assert health.watch(15.0, 3)
    health.probed(well=True)
    assert health.cause(15.0) == "progress"
    health.progressed(16.0)
    assert health.healthy(16.0), "a token shows that it works"


def test_an_idle_replica_is_never_without_progress() -> None:
    health = well()
    assert not any(health.watch(float(second), 0) for second in range(100))


@given(st.lists(st.sampled_from(["good", "bad", "fail", "ok", "send", "none"]), max_size=60), st.integers(0, 1000))
def test_without_help_it_is_tried_again_within_the_longest_rest(steps: list[str], at_s: int) -> None:
    """Whatever happened: with a good probe and no trial under way, nobody has to come."""
    health = Health(SETTINGS)
    for step in steps:
        match step:
            case "good" | "bad":
                health.probed(step == "good")
            case "fail":
                health.failed(float(at_s))
            case "ok":
                health.succeeded()
            case "send":
                health.sent(float(at_s))
            case _:
                health.undecided()
    health.undecided()
    health.probed(well=True)
    assert health.healthy(at_s + SETTINGS.max_rest_s)


@given(st.integers(0, 100), st.integers(0, 100), st.floats(0, 1e6))
def test_nobody_waits_for_ever_behind_more_urgent_ones(urgent: int, patient: int, arrived_s: float) -> None:
    """Each point of priority is worth a second of waiting."""
    later_s = arrived_s + abs(urgent - patient) + 1
    assert rank(patient, arrived_s, None) < rank(urgent, later_s, None) or patient <= urgent
