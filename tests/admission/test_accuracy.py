"""Predictions are compared with what happened, and corrected by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.admission.accuracy import MOST_CORRECTION, Accuracy
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
    # After 60 answers 5 % of the beginning is left, which was right by assumption.
    corrected = accuracy.corrected("a", ONE)
    assert corrected.ttft_s == pytest.approx(2.0, rel=0.05)
    assert corrected.decode_s == pytest.approx(0.5, rel=0.05)
    assert accuracy.corrected("b", ONE) == ONE
    assert accuracy.errors()["a"] < 0.2


def test_long_waits_count_for_more_than_short_ones() -> None:
    accuracy = Accuracy()
    for _ in range(50):
        accuracy.first_token("a", 0.01, 0.03)
        accuracy.first_token("a", 2.0, 2.0)
    assert accuracy.corrected("a", ONE).ttft_s == pytest.approx(1.0, abs=0.05)


def test_sheds_take_a_correction_back() -> None:
    accuracy = Accuracy()
    for _ in range(60):
        accuracy.first_token("a", 1.0, 3.0)
    wrong = accuracy.corrected("a", ONE).ttft_s
    for _ in range(150):
        accuracy.shed("a")
    accuracy.shed("unknown")
    assert wrong > 2.5
    assert accuracy.corrected("a", ONE).ttft_s < 1.2


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
