"""Predictions are compared with what happened, and corrected by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.admission.accuracy import MEMORY, MOST_CORRECTION, Accuracy
from headrace.admission.predict import Prediction

ONE = Prediction(1.0, 1.0)


def test_without_experience_a_prediction_stands() -> None:
    accuracy = Accuracy()
    assert accuracy.corrected("a", ONE) == ONE
    assert accuracy.errors() == {}


def test_a_lane_that_takes_twice_as_long_as_predicted_is_predicted_so() -> None:
    accuracy = Accuracy()
    for _ in range(60):
        accuracy.first_token("a", 1.0, 2.0)
        accuracy.decoded("a", 1.0, 0.5)
    corrected = accuracy.corrected("a", ONE)
    left = MEMORY**60  # of what both sums began with, as if it had been predicted rightly
    assert corrected.ttft_s == pytest.approx((0.05 * left + 2.0 * (1 - left)) / (0.05 * left + 1 - left))
    assert corrected.decode_s == pytest.approx((0.05 * left + 0.5 * (1 - left)) / (0.05 * left + 1 - left))
    assert accuracy.corrected("b", ONE) == ONE
    # The first was off by all of itself and later ones by ever less: 5 % of the first is left, and as much of the rest.
    assert accuracy.errors()["a"] < 0.1


def test_long_waits_count_for_more_than_short_ones() -> None:
    accuracy = Accuracy()
    for _ in range(50):
        accuracy.first_token("a", 0.01, 0.03)
        accuracy.first_token("a", 2.0, 2.0)
    # The ratio of the sums, (0.03 + 2) / (0.01 + 2); the latest answer, a long one, weighs 5 % more than its neighbour.
    assert accuracy.corrected("a", ONE).ttft_s == pytest.approx(2.03 / 2.01, rel=0.001)


def test_sheds_take_a_correction_back() -> None:
    accuracy = Accuracy()
    for _ in range(60):
        accuracy.first_token("a", 1.0, 3.0)
    wrong = accuracy.corrected("a", ONE).ttft_s
    for _ in range(150):
        accuracy.shed("a")
    accuracy.shed("unknown")
    left = 0.98**150  # each shed takes 2 % of the excess
    assert accuracy.corrected("a", ONE).ttft_s == pytest.approx(1 + (wrong - 1) * left)
    assert wrong > 2.5  # after 60 answers 5 % of the beginning is left: 2.99


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), max_size=50))
def test_a_correction_is_bounded_whatever_happens(answers: list[tuple[float, float]]) -> None:
    accuracy = Accuracy()
    for predicted_s, happened_s in answers:
        accuracy.first_token("a", predicted_s, happened_s)
        accuracy.decoded("a", predicted_s, happened_s)
    corrected = accuracy.corrected("a", ONE)
    for seconds in (corrected.ttft_s, corrected.decode_s):
        assert 1 / MOST_CORRECTION - 1e-9 <= seconds <= MOST_CORRECTION + 1e-9
    assert all(0 <= error <= 1 for error in accuracy.errors().values())
