"""The circuit breaker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.control.breaker import Breaker, BreakerConfig, Transition, p99

CONFIG = BreakerConfig()


def feed(breaker: Breaker, ttft_s: float | None, seconds: int, begin_s: float = 0.0) -> list[Transition]:
    """One request every 0.1 s."""
    found = []
    for index in range(seconds * 10):
        transition = breaker.record(ttft_s, begin_s + index * 0.1)
        if transition is not None:
            found.append(transition)
    return found


def opened() -> tuple[Breaker, float]:
    breaker = Breaker(CONFIG)
    (transition,) = feed(breaker, 0.8, 12)
    return breaker, transition.at_s


def test_it_opens_when_the_p99s_of_ten_windows_average_above_half_a_second() -> None:
    breaker, at_s = opened()
    assert breaker.state == "open" and breaker.cap == 4
    assert 10.0 <= at_s <= 11.5


def test_it_stays_closed_just_below() -> None:
    breaker = Breaker(CONFIG)
    assert feed(breaker, 0.5, 60) == [] and breaker.cap is None


def test_one_slow_window_is_averaged_away() -> None:
    breaker = Breaker(CONFIG)
    feed(breaker, 0.1, 20)
    assert feed(breaker, 3.0, 1, begin_s=20.0) == []
    assert feed(breaker, 0.1, 20, begin_s=21.0) == []


def test_requests_that_fail_in_a_row_open_it_at_once() -> None:
    breaker = Breaker(CONFIG)
    transitions = [breaker.record(None, 0.1 * index) for index in range(5)]
    assert transitions[:4] == [None] * 4 and transitions[4] is not None


def test_after_the_cool_down_a_few_probes_close_it() -> None:
    breaker, at_s = opened()
    assert breaker.permit(at_s + 4.9) == "no"
    for _ in range(3):
        assert breaker.permit(at_s + 5.0) == "probe"
        breaker.probing()
    assert breaker.permit(at_s + 5.0) == "no", "no more than three at once"
    ends = [breaker.record(0.1, at_s + 5.2, probe=True) for _ in range(3)]
    assert ends[:2] == [None, None] and ends[2] is not None and ends[2].after == "closed"
    assert breaker.permit(at_s + 5.2) == "normal"


def test_a_slow_probe_opens_it_again_for_longer() -> None:
    breaker, at_s = opened()
    for cool_down_s in (5.0, 10.0, 15.0, 15.0):
        assert breaker.permit(at_s + cool_down_s - 0.01) == "no"
        assert breaker.permit(at_s + cool_down_s) == "probe"
        breaker.probing()
        at_s += cool_down_s
        transition = breaker.record(2.0, at_s, probe=True)
        assert transition is not None and transition.after == "open"


def test_a_probe_that_its_client_gave_up_makes_room_for_another() -> None:
    breaker, at_s = opened()
    for _ in range(20):
        assert breaker.permit(at_s + 6.0) == "probe"
        breaker.probing()
        breaker.gave_up(probe=True)
    assert breaker.state == "half_open"


def test_switched_off_it_lets_everything_pass() -> None:
    breaker = Breaker(BreakerConfig(enabled=False))
    assert feed(breaker, None, 60) == [] and breaker.permit(100.0) == "normal"


@given(
    st.lists(st.tuples(st.floats(0, 3), st.none() | st.floats(0, 2), st.booleans()), max_size=200),
)
def test_without_a_person_it_is_closed_again_within_thirty_seconds(
    history: list[tuple[float, float | None, bool]],
) -> None:
    """Whatever happened before: once requests are fast, the longest cool-down and its probes are all it takes."""
    breaker, now_s = Breaker(CONFIG), 0.0
    for step_s, ttft_s, gives_up in history:
        now_s += step_s
        permit = breaker.permit(now_s)
        if permit == "no":
            continue
        if permit == "probe":
            breaker.probing()
        if gives_up:
            breaker.gave_up(probe=permit == "probe")
        else:
            breaker.record(ttft_s, now_s, probe=permit == "probe")
    healed_s = now_s
    while breaker.state != "closed":
        now_s += 0.1
        assert now_s - healed_s < 30.0
        permit = breaker.permit(now_s)
        if permit == "probe":
            breaker.probing()
            breaker.record(0.05, now_s, probe=True)


@given(st.lists(st.floats(0, 100), min_size=1))
def test_the_p99_is_a_sample_that_99_of_100_do_not_exceed(samples: list[float]) -> None:
    value = p99(samples)
    assert value in samples
    assert sum(sample <= value for sample in samples) >= 0.99 * len(samples)
