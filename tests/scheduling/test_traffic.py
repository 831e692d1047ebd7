"""What the latest requests were like."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.traffic import Traffic, TrafficWindow

REQUESTS = st.lists(
    st.tuples(st.integers(0, 200_000), st.sampled_from("abc"), st.booleans(), st.booleans()), min_size=1, max_size=60
)


@given(REQUESTS, st.integers(1, 20))
def test_the_view_is_of_the_latest_requests_and_no_others(
    requests: list[tuple[int, str, bool, bool]], size: int
) -> None:
    """Equal to counting the last ``size`` of them anew."""
    window = TrafficWindow(size)
    for total_tokens, lane, has_target, stream in requests:
        window.note(total_tokens, lane, has_target, stream)
    lengths, lanes, targets, streams = zip(*requests[-size:], strict=True)
    mean = statistics.fmean(lengths)
    view = window.view()
    assert view.requests == len(lengths)
    assert view.lanes == len(set(lanes))
    assert view.with_targets == pytest.approx(statistics.fmean(targets))
    assert view.streaming == pytest.approx(statistics.fmean(streams))
    assert view.length_spread == pytest.approx(statistics.pstdev(lengths) / mean if mean else 0.0)


def test_nothing_seen_is_the_default_view() -> None:
    """As a scheduler state without traffic has it."""
    assert TrafficWindow().view() == Traffic()


def test_a_view_is_made_once_per_change() -> None:
    """A step that follows another without an arrival pays nothing."""
    window = TrafficWindow()
    window.note(100, "chat", True, True)
    first = window.view()
    assert window.view() is first
    window.note(300, "chat", True, False)
    assert window.view() is not first
    assert window.view() == Traffic(2, 1.0, 0.5, 0.5, 1)


def test_requests_of_equal_length_have_no_spread_at_all() -> None:
    """Exactly none: rounding must not look like variety, however many there were and however long."""
    window = TrafficWindow(100)
    for _ in range(1000):
        window.note(131_071, "documents", False, False)
    assert window.view().length_spread == 0.0


def test_a_window_of_nothing_is_refused() -> None:
    """It could never say anything."""
    with pytest.raises(ValueError, match="at least 1"):
        TrafficWindow(0)
