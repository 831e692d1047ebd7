"""Measured step times."""

from __future__ import annotations

import pytest

from headrace.scheduling.cost import prefill_pairs
from headrace.simulate.step_times import SMOLLM2_2_THREADS, MeasuredTimes, Scaled


def test_points_are_met_and_lines_are_between_and_beyond_them() -> None:
    """Between two points, and after the last in the last direction."""
    times = MeasuredTimes(
        [(1, 10.0), (3, 20.0), (5, 24.0)], context_s=1e-3, pair_s=1e-4, copy_s_per_token=1e-5, source="here"
    )
    seen = [times.call_s(rows) for rows in (0, 1, 2, 3, 4, 5, 7, 3000)]
    assert seen == pytest.approx([0.0, 0.010, 0.015, 0.020, 0.022, 0.024, 0.028, 0.024 + 2995 * 0.002])
    assert times.call_s(1, 5, 7) == pytest.approx(0.010 + 0.005 + 0.0007)
    assert times.move_s(100, 0) == pytest.approx(1e-3)


def test_the_measured_machine_gains_by_batches_up_to_its_knee() -> None:
    """What the figures say: 16 rows give over twice one row's rate, 32 hardly more than 16; a chunk of 512 takes
    near half a second, and attention makes a late chunk dearer than an early one. (The line through the measured times
    gives 3.3 times and 1.12 times; a fifth more is what "hardly" means here.)"""
    rate = {rows: rows / SMOLLM2_2_THREADS.call_s(rows) for rows in (1, 16, 32)}
    assert rate[16] > 2 * rate[1] and rate[32] < 1.2 * rate[16]
    early, late = (SMOLLM2_2_THREADS.call_s(512, 0, prefill_pairs(done, 512)) for done in (0, 1536))
    assert 0.43 < early < late


def test_a_scaled_machine_is_slower_in_everything() -> None:
    """For beliefs that are wrong by a factor."""
    slow = Scaled(SMOLLM2_2_THREADS, 2.0)
    assert slow.call_s(7, 100, 20) == pytest.approx(2 * SMOLLM2_2_THREADS.call_s(7, 100, 20))
    assert slow.move_s(10, 0) == pytest.approx(2 * SMOLLM2_2_THREADS.move_s(10, 0))
