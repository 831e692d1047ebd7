"""The rate of prompts follows what first tokens show."""

from __future__ import annotations

import pytest

from headrace.routing.prompt_rate import learned_rate


def test_the_first_prompt_counts_whole_and_later_ones_by_a_fifth() -> None:
    assert learned_rate(0.0, 1000, 2.0) == 500.0
    assert learned_rate(500.0, 1000, 1.0) == pytest.approx(600.0)


def test_short_prompts_and_times_of_nothing_teach_nothing() -> None:
    assert learned_rate(500.0, 63, 0.001) == 500.0
    assert learned_rate(500.0, 1000, 0.0) == 500.0
