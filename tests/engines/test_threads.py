"""How many threads: always between one and the most, given up for neighbours, taken back with patience."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.llama.threads import (
    CROWDED_CORES,
    FIRST_HOLD_S,
    MAX_HOLD_S,
    ROOM_CORES,
    WINDOW_S,
    CpuReading,
    ThreadState,
    _quota_cores,
    check_threads,
    decide,
    usable_cores,
)
from headrace.errors import ConfigError


def run(cores: int, use: list[float], *, max_threads: int | None = None) -> list[ThreadState]:
    """States after each window in which others used ``use`` cores."""
    most = max_threads or cores
    states = [ThreadState(most)]
    for number, other_cores in enumerate(use):
        reading = CpuReading((number + 1) * WINDOW_S, other_cores)
        states.append(decide(states[-1], reading, cores=cores, max_threads=most))
    return states


@given(st.integers(1, 16), st.integers(1, 16), st.lists(st.floats(0, 16), max_size=60))
def test_threads_stay_between_one_and_the_most_and_change_one_at_a_time(
    cores: int, max_threads: int, use: list[float]
) -> None:
    """Whatever the neighbours do; the hold stays within its limits."""
    states = run(cores, use, max_threads=max_threads)
    for before, after in zip(states, states[1:], strict=False):
        assert 1 <= after.threads <= max_threads
        assert abs(after.threads - before.threads) <= 1
        assert FIRST_HOLD_S <= after.hold_s <= MAX_HOLD_S


@given(st.integers(1, 16), st.floats(0, 16), st.floats(0, 1e6), st.integers(1, 16))
def test_it_is_pure(cores: int, other: float, at_s: float, threads: int) -> None:
    """Same state and reading, same answer."""
    state, reading = ThreadState(threads), CpuReading(at_s, other)
    assert decide(state, reading, cores=cores, max_threads=16) == decide(state, reading, cores=cores, max_threads=16)
    assert state == ThreadState(threads)


@given(st.integers(2, 16), st.floats(0, CROWDED_CORES), st.integers(1, 80))
def test_light_use_by_others_costs_no_thread(cores: int, other: float, windows: int) -> None:
    """A gateway and its clients on all cores leave the threads alone."""
    assert all(state.threads == cores for state in run(cores, [other] * windows))


@given(st.integers(2, 16), st.integers(1, 20))
def test_one_crowded_window_costs_no_thread_two_in_a_row_do(cores: int, quiet: int) -> None:
    """A blip between quiet windows is nothing."""
    blips = run(cores, ([1.0] + [0.0] * quiet) * 3)
    assert all(state.threads == cores for state in blips)
    assert run(cores, [1.0, 1.0])[-1].threads == cores - 1


@given(st.integers(2, 16), st.integers(1, 16))
def test_neighbours_that_fill_cores_end_with_one_thread_for_each_core_left(cores: int, busy: int) -> None:
    """They show as the cores that they have; at least one thread is left, and it settles."""
    states = run(cores, [float(busy)] * (2 * cores + 4))
    left = max(1, cores - busy)
    assert [state.threads for state in states[-3:]] == [left] * 3


@pytest.mark.parametrize(
    ("what", "other_cores", "threads"),
    [
        ("idle machine", 0.0, 2),
        ("gateway and clients, measured at up to 0.35", 0.35, 2),
        ("a neighbour that gets half a core beside a spinning thread", 0.5, 1),
        ("a neighbour that has its core", 0.95, 1),
        ("two neighbours", 1.9, 1),
    ],
)
def test_measured_cases_on_two_cores(what: str, other_cores: float, threads: int) -> None:
    """The cases of the module's docstring: where a second thread pays and where it does not."""
    assert run(2, [other_cores] * 3)[-1].threads == threads, what


def test_a_thread_comes_back_when_the_neighbour_has_gone_and_the_hold_is_over() -> None:
    """Not before, however quiet it is; at once after."""
    down = run(2, [1.0, 1.0])[-1]
    assert down.threads == 1 and down.not_before_s == 2 * WINDOW_S + FIRST_HOLD_S
    early = CpuReading(down.not_before_s - 0.01, 0.0)
    assert decide(down, early, cores=2, max_threads=2).threads == 1
    due = CpuReading(down.not_before_s, 0.0)
    assert decide(down, due, cores=2, max_threads=2).threads == 2
    occupied = CpuReading(down.not_before_s, ROOM_CORES + 0.01)
    assert decide(down, occupied, cores=2, max_threads=2).threads == 1


def test_each_wrong_return_doubles_the_hold() -> None:
    """A neighbour that is busy whenever a thread came back costs less and less: over ten minutes it is
    tried some thirty times and not four hundred."""
    state, raised, holds = ThreadState(2), 0, []
    for window in range(int(600 / WINDOW_S)):
        other = 1.0 if state.threads == 2 else 0.0  # the worst case: quiet only while it is given way to
        after = decide(state, CpuReading(window * WINDOW_S, other), cores=2, max_threads=2)
        raised += after.threads > state.threads
        if after.threads < state.threads:
            holds.append(after.hold_s)
        state = after
    assert holds[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    assert raised <= 600 / MAX_HOLD_S + 6


def test_a_return_that_lasted_forgives_the_past() -> None:
    """A neighbour that comes again much later is met with the first hold."""
    long_ago = ThreadState(2, 1, raised_s=0.0, hold_s=16.0)
    assert decide(long_ago, CpuReading(100.0, 1.0), cores=2, max_threads=2).hold_s == FIRST_HOLD_S


def test_threads_asked_for_are_checked() -> None:
    """None means all that may be used; less than one cannot compute."""
    assert check_threads(3) == 3
    assert check_threads(None) == usable_cores() >= 1
    with pytest.raises(ConfigError, match=r"engine\.threads: 0 threads"):
        check_threads(0)


@pytest.mark.parametrize(
    ("content", "cores"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("50000 100000\n", 0.5), ("nonsense", None), ("", None)],
)
def test_a_control_groups_quota(tmp_path: Path, content: str, cores: float | None) -> None:
    """cgroup v2 writes quota and period; anything else means that there is nothing to respect."""
    path = tmp_path / "cpu.max"
    path.write_text(content)
    assert _quota_cores(path) == cores
    assert _quota_cores(tmp_path / "missing") is None
