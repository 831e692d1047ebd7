"""Timing of a request's tokens, and what becomes of it in the metrics."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.telemetry.metrics import Metrics
from headrace.telemetry.timing import ITL_BUCKETS_S, RequestTiming


def timing_of(*times_s: float, arrived_s: float = 0.0) -> RequestTiming:
    timing = RequestTiming(arrived_s)
    for now_s in times_s:
        timing.output(0, 1, now_s)
    return timing


def test_ttft_and_tpot() -> None:
    timing = timing_of(1.0, 1.2, 1.4, arrived_s=0.5)
    assert timing.ttft_s == pytest.approx(0.5)
    assert timing.tpot_s == pytest.approx(0.2)
    assert timing.gap_count == 2


def test_one_token_has_no_tpot() -> None:
    timing = timing_of(1.0)
    timing.output(0, 0, 9.0)
    assert timing.tpot_s is None
    assert timing.tokens == 1


def test_gaps_are_within_a_sequence() -> None:
    timing = RequestTiming(0.0)
    timing.output(0, 1, 1.0)
    timing.output(1, 1, 5.0)
    timing.output(0, 1, 5.5)
    assert (timing.gap_count, timing.gap_sum_s) == (1, 4.5)


def test_several_tokens_in_one_output_share_its_gap() -> None:
    timing = RequestTiming(0.0)
    timing.output(0, 1, 1.0)
    timing.output(0, 4, 2.0)
    assert timing.tpot_s == pytest.approx(0.25)


def test_a_restart_forgets() -> None:
    timing = timing_of(1.0, 2.0)
    timing.restart()
    assert (timing.first_s, timing.tokens, timing.tpot_s, sum(timing.gap_buckets)) == (None, 0, None, 0)


def test_the_itl_histogram_is_a_right_histogram() -> None:
    metrics = Metrics("1")
    gaps = [0.0005, ITL_BUCKETS_S[0], 0.3, 100.0]
    times = [1.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    for _ in range(2):
        metrics.request_ended("a", "ok", prompt_tokens=1, timing=timing_of(*times), ended_s=200.0)
    families = {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}
    samples = families["headrace_itl_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    assert buckets["+Inf"] == 8
    assert buckets["10.0"] == 6
    assert list(buckets.values()) == sorted(buckets.values())
    assert [sample.value for sample in samples if sample.name.endswith("_count")] == [8]
    assert [sample.value for sample in samples if sample.name.endswith("_sum")] == [pytest.approx(2 * sum(gaps))]


def test_a_request_that_never_reached_the_engine_counts_once() -> None:
    metrics = Metrics("1")
    metrics.request_ended(None, "rejected", prompt_tokens=0, timing=None, ended_s=1.0)
    text = metrics.exposition().decode()
    assert 'headrace_requests_total{lane="none",outcome="rejected"} 1.0' in text
    assert "headrace_e2e_seconds_count" not in text
