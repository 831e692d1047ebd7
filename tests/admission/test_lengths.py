"""Output lengths, learned per lane."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.admission.lengths import WINDOW, OutputLength, OutputLengths


def learned(*lengths: int, typical: int = 100, cut: bool = False) -> OutputLengths:
    found = OutputLengths()
    for tokens in lengths:
        found.learn("a", tokens, typical, cut=cut)
    return found


def test_until_something_was_seen_the_lanes_typical_length_is_expected() -> None:
    assert OutputLengths().expect("a", 32) == OutputLength(32, 32)
    assert OutputLengths().learned() == {}


def test_a_few_answers_replace_the_typical_length() -> None:
    found = learned(*[10] * 20, typical=500)
    assert 10 <= found.expect("a", 500).expected_tokens <= 35
    assert found.expect("b", 7) == OutputLength(7, 7)


def test_later_answers_count_for_more() -> None:
    assert learned(*[10] * 100, *[200] * 60).expect("a", 1).expected_tokens > 180


def test_nine_of_ten_are_no_longer_than_the_likely_length() -> None:
    length = learned(*range(1, 101), typical=1).expect("a", 1)
    assert length.likely_tokens in (90, 91)


def test_an_answer_cut_by_its_limit_says_only_that_answers_are_at_least_so_long() -> None:
    found = learned(*[100] * 5)
    found.learn("a", 10, 100, cut=True)
    assert found.expect("a", 100).expected_tokens == 100
    found.learn("a", 900, 100, cut=True)
    assert found.expect("a", 100).expected_tokens > 150


def test_a_limit_bounds_what_is_expected() -> None:
    assert OutputLength(50, 90).within(60) == OutputLength(50, 60)
    assert OutputLength(50, 90).within(8) == OutputLength(8, 8)
    assert OutputLength(50, 90).within(None) == OutputLength(50, 90)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=3 * WINDOW), st.integers(1, 5000))
def test_what_is_expected_lies_within_what_was_seen(lengths: list[int], typical: int) -> None:
    found = learned(*lengths, typical=typical)
    length = found.expect("a", typical)
    assert min(*lengths, typical) - 1 <= length.expected_tokens <= max(*lengths, typical) + 1
    latest = sorted(lengths[-WINDOW:])
    assert length.expected_tokens <= length.likely_tokens <= max(latest[-1], length.expected_tokens)
    # Ceil and floor of the rank may differ by one place.
    assert sum(tokens <= length.likely_tokens for tokens in latest) >= 0.9 * len(latest) - 1
