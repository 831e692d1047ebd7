"""From measured passes to curves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.simulate.calibrate.fit import MeasuredPass, fit, medians_of, spread


@given(
    st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1.0), min_size=1, max_size=8),
    st.floats(0, 1e-4),
)
@settings(deadline=None)
def test_what_was_made_by_the_formula_is_found_again(curve: dict[int, float], reach_s: float) -> None:
    """Each number of rows at three reaches: the curve and the slope come out."""
    passes = [
        MeasuredPass(rows, reach, row_s + reach_s * reach) for rows, row_s in curve.items() for reach in (0, 500, 4000)
    ]
    found = fit(passes)
    assert [rows for rows, _ in found.curve] == sorted(curve)
    for one in passes:
        assert found.of(one.rows, one.reach) == pytest.approx(one.took_s, rel=1e-6)
    assert max(abs(error) for error in found.errors) < 1e-6


def test_stalls_do_not_move_a_median() -> None:
    """One pass in five takes ten times as long, and the curve stays."""
    passes = [MeasuredPass(4, 100, taken) for taken in (0.01, 0.01, 0.1, 0.0101, 0.0099)]
    assert fit(passes).of(4, 100) == pytest.approx(0.01)
    assert medians_of(passes) == [MeasuredPass(4, 100, 0.01, 5)]


def test_no_slope_comes_out_negative() -> None:
    """Longer contexts that happened to be quicker: the slope is 0, not below."""
    found = fit([MeasuredPass(1, 0, 0.011), MeasuredPass(1, 1000, 0.010)])
    assert found.reach_s == 0
    assert found.of(1, 0) == pytest.approx(0.0105, rel=0.01)


def test_the_spread_is_that_of_the_middle() -> None:
    """Logarithms of a normal distribution with 0.1, and two stalls: found to a tenth of it."""
    draw = random.Random(1)
    errors = [draw.lognormvariate(0, 0.1) - 1 for _ in range(4000)] + [20.0, 30.0]
    assert spread(errors) == pytest.approx(0.1, rel=0.1)
    assert spread([0.1]) == 0


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing was measured"):
        fit([])
