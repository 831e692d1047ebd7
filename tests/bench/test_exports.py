"""The summary as JSON, in vLLM's shape, as CSV, as text; the timeline; units."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.bench.records import RequestRecord, RunInfo
from headrace.bench.report.csv_report import GROUP_COLUMNS, LATENCY_COLUMNS, groups_csv, latencies_csv
from headrace.bench.report.text_report import print_summary
from headrace.bench.report.timeline import timeline
from headrace.bench.report.units import show_number, show_percent, show_range, show_seconds, show_share
from headrace.bench.report.vllm_json import vllm_result
from headrace.bench.results.columns import build_columns
from headrace.bench.results.figures import METRICS, Summary
from headrace.bench.results.summary import summarise
from headrace.bench.results.summary_json import from_json, to_json
from headrace.errors import ConfigError
from tests.bench.bench_records import answered, failed, run_info, synthetic_run

SLOS = {"chat": {"ttft_s": 0.5}, "docs": {"ttft_s": 1.5}}


def _summary(**changes: Any) -> Summary:
    info, records = synthetic_run(np.random.default_rng(1), duration_s=60.0, shed_share=0.02, slos=SLOS, **changes)
    return summarise(info, records)


# Our JSON.


def test_json_says_what_it_is_and_comes_back_whole() -> None:
    summary = _summary()
    text = to_json(summary)
    assert from_json(text) == summary
    plain = json.loads(text)
    assert (plain["format"], plain["version"]) == ("headrace-bench-summary", 1)
    assert plain["lanes"][0]["latencies"]["ttft_s"]["percentiles"]["p99.9"] is None, "a percentile that is none is null"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "is no summary of headrace bench"),
        (b'{"format": "other"}', "format 'other'"),
        (b'{"format": "headrace-bench-summary", "version": 99}', "version 99; this headrace reads version 1"),
        (b'{"format": "headrace-bench-summary", "version": 1}', "missing required field"),
        (b"not json", "is no summary"),
    ],
)
def test_json_that_is_no_summary_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_json(text, where="a.json")
    assert str(caught.value).startswith("a.json: ")


# vLLM's shape.


def _vllm_run() -> tuple[RunInfo, list[RequestRecord]]:
    records = [
        answered(0, 500, ttft_ms=9000),  # warm-up
        answered(1, 1000, ttft_ms=100, gaps_ms=(100, 200)),
        answered(2, 2000, ttft_ms=300, gaps_ms=(100,), output_tokens=5),
        answered(3, 3000, ttft_ms=200),
        failed(4, 4000, "shed", status=429),
        failed(5, 5000, "rejected", malformed="no_body", status=400),
    ]
    return run_info(warmup_s=1.0, slos=SLOS, label="ours"), records


def test_vllms_fields_have_vllms_definitions() -> None:
    result = vllm_result(build_columns(*_vllm_run()), burstiness=1.0)
    exact: dict[str, object] = {
        "date": "20260102-030405",
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": "ours",
        "model_id": "m",
        "num_prompts": 4,
        "burstiness": 1.0,
        "max_concurrency": None,
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 9,
        "max_concurrent_requests": 1,
    }
    assert {name: result[name] for name in exact} == exact
    # The window opens at 1 s; the last request ended at 4.001 s.
    duration = 3.001
    close = {
        "request_rate": 4 / 9,
        "duration": duration,
        "request_throughput": 3 / duration,
        "request_goodput": 3 / duration,
        "output_throughput": 9 / duration,
        "total_token_throughput": 39 / duration,
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "std_ttft_ms": np.std([100, 300, 200]),
        "p99_ttft_ms": 298,  # interpolated: 200 + 0.98 * 100
        "mean_tpot_ms": (150 + 25) / 2,  # the single token has none
        "mean_itl_ms": 400 / 3,  # gaps between chunks
        "mean_e2el_ms": 1000 / 3,
    }
    assert {name: result[name] for name in close} == pytest.approx(close)
    assert "ttfts" not in result


def test_vllms_details_are_lists_by_request_in_order() -> None:
    result = vllm_result(build_columns(*_vllm_run()), detailed=True)
    assert result["input_lens"] == [10, 10, 10, 10]
    assert result["output_lens"] == [3, 5, 1, 0]
    assert result["ttfts"] == [0.1, 0.3, 0.2, 0.0]
    assert result["itls"] == [[0.1, 0.2], [0.1], [], []]
    assert result["start_times"] == [1.0, 2.0, 3.0, 4.0]
    assert result["generated_texts"] == [""] * 4
    assert result["errors"] == ["", "", "", "shed"]
    json.dumps(result)


def test_vllms_shape_of_a_closed_loop_and_of_nothing() -> None:
    info, _ = _vllm_run()
    result = vllm_result(build_columns(msgspec.structs.replace(info, concurrency=8, slos={}), []))
    assert (result["request_rate"], result["max_concurrency"], result["completed"]) == ("inf", 8, 0)
    assert result["request_goodput"] is None
    assert result["p99_ttft_ms"] == 0.0


# CSV.


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_csv_has_a_row_per_group_and_one_header_for_every_run() -> None:
    summary, other = _summary(), summarise(run_info(), [])
    text = groups_csv(summary)
    assert text.splitlines()[0] == groups_csv(other).splitlines()[0] == ",".join(GROUP_COLUMNS)
    rows = _rows(text)
    assert [(row["kind"], row["name"]) for row in rows] == [
        ("whole", "all"),
        ("lane", "chat"),
        ("lane", "docs"),
        ("class", "chat"),
        ("class", "docs"),
    ]
    whole = rows[0]
    assert int(whole["offered"]) == summary.whole.offered
    assert summary.whole.attainment is not None
    assert float(whole["attainment_low"]) == summary.whole.attainment.low
    figure = summary.whole.latencies["ttft_s"].percentiles["p99"]
    assert figure is not None
    assert float(whole["ttft_p99_s"]) == figure.value
    assert whole["ttft_p99.9_s"] == ""
    assert int(whole["outcome_shed"]) == summary.whole.outcomes["shed"]
    assert int(whole["missed_by_shed"]) == summary.whole.missed_by["shed"]


def test_csv_has_a_row_per_metric_with_intervals() -> None:
    summary = _summary()
    text = latencies_csv(summary)
    assert text.splitlines()[0] == ",".join(LATENCY_COLUMNS)
    rows = _rows(text)
    assert [row["metric"] for row in rows[: len(METRICS)]] == list(METRICS)
    for row in rows:
        if row["p50"]:
            assert float(row["p50_low"]) <= float(row["p50"]) <= float(row["p50_high"])


# Text.


def test_the_text_report_fits_80_columns_and_keeps_brackets() -> None:
    records = [answered(i, i * 10, ttft_ms=i + 1, class_name="[red]docs[/]") for i in range(400)]
    records += [failed(500 + i, 100, "rejected", malformed="no_body", status=500) for i in range(3)]
    records += [failed(600, 100, "shed", class_name="[red]docs[/]")]
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        print_summary(summarise(run_info(), records), console)
    text = captured.get()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert text.count("[red]docs[/]") == 3, "in each of the three tables of groups"
    assert "…" not in text, "nothing is cut"
    assert "200 ms" in text and "396 ms" in text
    assert "no body" in text


def test_the_text_report_says_what_is_wrong_with_a_run() -> None:
    late = [answered(i, i * 10, ttft_ms=10, lag_ms=50) for i in range(50)]
    console = Console(width=200)
    with console.capture() as captured:
        print_summary(summarise(run_info(simulated=True), late), console, full=True)
    text = captured.get()
    assert "INVALID: the generator sent late" in text
    assert "SIMULATED" in text
    assert "TTFT from due" in text


# Timeline.


def test_the_timeline_adds_up_to_what_happened() -> None:
    records = [
        answered(0, 0, ttft_ms=250, gaps_ms=(750,)),  # in the server from 0 to 1 s, queued for a quarter of it
        answered(1, 500, ttft_ms=1000, output_tokens=4),  # from 0.5 to 1.5 s, queued all the time
        failed(2, 9000, "shed", end_ms=9010),
    ]
    line = timeline(build_columns(run_info(), records))
    assert line.step_s == pytest.approx(0.1)
    assert line.offered_rps.sum() * line.step_s == pytest.approx(3)
    assert line.completed_rps.sum() * line.step_s == pytest.approx(2)
    assert line.output_tokens_per_s.sum() * line.step_s == pytest.approx(2 + 4)
    assert line.in_flight.sum() * line.step_s == pytest.approx(1.0 + 1.0 + 0.01)
    assert line.queued.sum() * line.step_s == pytest.approx(0.25 + 1.0 + 0.01)
    assert line.in_flight[:15] == pytest.approx([1] * 5 + [2] * 5 + [1] * 5)
    assert line.queued[:4] == pytest.approx([1, 1, 0.5, 0])
    (shed,) = line.failed_rps.values()
    assert shed[90] == pytest.approx(1 / line.step_s)


def test_a_request_that_never_ended_stays_in_the_server() -> None:
    stuck = failed(0, 1000, "cancelled", end_ns=None)
    line = timeline(build_columns(run_info(), [stuck]))
    assert line.in_flight[-1] == pytest.approx(1)
    assert line.in_flight[0] == 0


# Units.


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "–"),
        (0.0, "0"),
        (1.2345, "1.23 s"),
        (0.9996, "1 s"),
        (0.08765, "87.7 ms"),
        (0.00012, "120 µs"),
        (1234.5, "1,234 s"),
        (2e-9, "0.002 µs"),
    ],
)
def test_seconds_as_people_read_them(seconds: float | None, shown: str) -> None:
    assert show_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (None, "–"),
        (1.0, "100 %"),
        (0.0, "0 %"),
        (0.98765, "98.8 %"),
        (0.99999, "99.999 %"),
        (0.9999999, "> 99.999 %"),
        (0.0000001, "< 0.001 %"),
    ],
)
def test_only_a_whole_share_reads_100_percent(share: float | None, shown: str) -> None:
    assert show_share(share) == shown


@given(st.floats(0, 1))
def test_no_other_share_reads_100_or_0_percent(share: float) -> None:
    assert (show_share(share) == "100 %") == (share == 1.0)
    assert (show_share(share) == "0 %") == (share == 0.0)


def test_numbers_percentages_and_ranges() -> None:
    assert [show_number(x) for x in (None, 0, 0.01234, 5.0, 24.84, 999.6, 12345.6)] == [
        "–",
        "0",
        "0.0123",
        "5",
        "24.8",
        "1,000",
        "12,346",
    ]
    assert (show_percent(0.99), show_percent(0.9995)) == ("99 %", "99.95 %")
    assert show_range("169 ms", "178 ms") == "169 to 178 ms"
    assert show_range("906 ms", "1.02 s") == "906 ms to 1.02 s"
    assert show_range("0", "1.02 s") == "0 to 1.02 s"
