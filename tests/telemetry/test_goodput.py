"""Whether a request met its SLO, and what is counted of that."""

from __future__ import annotations

import pytest

from headrace.lanes.lane import SLO
from headrace.telemetry.goodput import Goodput, met_slo
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.timing import RequestTiming

WHOLE = SLO(p99_ttft_s=1.0, p99_tpot_s=0.1, p99_e2e_s=3.0)


def timing(*times_s: float) -> RequestTiming:
    """Of a request that came at 0."""
    found = RequestTiming(0.0)
    for now_s in times_s:
        found.output(0, 1, now_s)
    return found


@pytest.mark.parametrize(
    ("times_s", "good"),
    [
        ((1.0, 1.1, 1.2), True),  # at the limit is within it
        ((1.1, 1.2), False),  # TTFT
        ((0.5, 1.0), False),  # TPOT
        ((0.9, *(1.0 + 0.1 * n for n in range(22))), False),  # E2E
        ((0.5,), True),  # one token has no TPOT
    ],
)
def test_an_answer_is_good_when_it_met_every_target(times_s: tuple[float, ...], good: bool) -> None:
    assert met_slo(WHOLE, "ok", timing(*times_s), times_s[-1]) is good


def test_a_slow_reader_does_not_make_an_answer_late() -> None:
    """E2E ends with the last token, not with the connection."""
    assert met_slo(WHOLE, "ok", timing(0.5, 0.55), 60.0) is True


def test_without_targets_every_answer_is_good() -> None:
    assert met_slo(SLO(), "ok", timing(500.0, 900.0), 900.0) is True


@pytest.mark.parametrize("outcome", ["shed", "error"])
def test_what_was_shed_or_failed_is_a_violation(outcome: str) -> None:
    assert met_slo(SLO(), outcome, None, 0.0) is False


def test_what_the_client_did_wrong_says_nothing() -> None:
    assert met_slo(WHOLE, "rejected", None, 0.0) is None


def test_what_the_client_gave_up_says_something_only_when_it_was_late() -> None:
    """Somebody who goes away after the target has waited for too long; before it, they changed their mind."""
    assert met_slo(WHOLE, "aborted", timing(), 0.9) is None
    assert met_slo(WHOLE, "aborted", timing(), 1.1) is False
    assert met_slo(WHOLE, "aborted", timing(0.5, 0.55), 2.9) is None
    assert met_slo(WHOLE, "aborted", timing(0.5, 0.55), 3.1) is False
    assert met_slo(WHOLE, "aborted", None, 9.0) is None


def test_metrics_count_good_and_violating_requests_by_lane() -> None:
    metrics = Metrics("1")
    for outcome, slo in (("ok", WHOLE), ("shed", WHOLE), ("rejected", WHOLE), ("ok", None)):
        metrics.request_ended("chat", outcome, prompt_tokens=600, timing=timing(0.5), ended_s=1.0, slo=slo)
    text = metrics.exposition().decode()
    assert 'headrace_requests_good_total{lane="chat"} 1.0' in text
    assert 'headrace_requests_violated_total{lane="chat"} 1.0' in text
    assert metrics.goodput == Goodput(arrived=0, long_prompts=2, good={"chat": 1}, violated={"chat": 1})
