"""What a summary says beside its figures, and figures that would flatter a server that is behind, hangs or fails."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.bench.compare.block_contrasts import by_blocks
from headrace.bench.records import RequestRecord
from headrace.bench.results.columns import build_columns
from headrace.bench.results.summary import summarise
from tests.bench.bench_records import answered, failed, ms, run_info


def _queued(rate_rps: float, served_rps: float) -> list[RequestRecord]:
    """An open loop of 10 s on a server that takes one request at a time."""
    records, free_ms = [], 0.0
    for i in range(round(10 * rate_rps)):
        due_ms = i * 1e3 / rate_rps
        free_ms = max(free_ms, due_ms) + 1e3 / served_rps
        records.append(answered(i, due_ms, ttft_ms=free_ms - due_ms))
    return records


def test_goodput_is_what_came_in_the_window_and_a_grown_backlog_is_said() -> None:
    summary = summarise(run_info(wall_s=42.0), _queued(40, 10))
    assert summary.whole.attainment is not None
    assert summary.whole.attainment.value == 1.0, "without an SLO every answer is good, however late"
    assert summary.whole.completed_rps == summary.whole.goodput_rps == 10.0
    (warning,) = [text for text in summary.warnings if "ended after" in text]
    assert warning.startswith(
        "300 of 400 offered requests ended after the load: the server was behind, the backlog grew"
    )
    assert "from 151 unanswered requests in the middle of the measured window to 300 at its end" in warning


def test_a_server_that_keeps_up_gets_no_such_warning() -> None:
    assert not [text for text in summarise(run_info(), _queued(9, 10)).warnings if "ended after" in text]


def test_long_answers_in_a_short_run_are_no_backlog_but_are_said() -> None:
    records = [answered(i, i * 50, ttft_ms=3000) for i in range(200)]
    (warning,) = [text for text in summarise(run_info(), records).warnings if "ended after" in text]
    assert warning.startswith("59 of 200 offered requests ended after the load: good answers and tokens per second")


def test_a_server_that_hangs_in_a_closed_loop_has_misses() -> None:
    records = [answered(i, i * 10, ttft_ms=100, user=i) for i in range(8)]
    records += [failed(10 + i, 500, "cancelled", end_ms=40_000, user=i) for i in range(8)]
    summary = summarise(run_info(concurrency=8), records)
    assert (summary.whole.offered, summary.whole.good, summary.whole.not_offered) == (16, 8, 0)
    assert summary.whole.missed_by == {"cancelled": 8}
    assert any(text.startswith("8 requests were still without their whole answer") for text in summary.warnings)
    # A second Ctrl-C: nobody waited for them.
    summary = summarise(run_info(concurrency=8, interrupted=True), records)
    assert (summary.whole.offered, summary.whole.not_offered) == (8, 8)
    assert any(text.startswith("8 requests were cut off by the end of the run") for text in summary.warnings)


def test_a_run_that_was_killed_has_the_rates_of_the_time_that_it_ran() -> None:
    records = [answered(i, i * 100, ttft_ms=100) for i in range(30)]
    summary = summarise(run_info(duration_s=600.0, wall_s=0.0, warmup_s=1.0), records)
    assert (summary.window.start_s, summary.window.end_s) == (1.0, 3.0)
    assert summary.whole.offered_rps == 20 / 2
    assert summary.whole.completed_rps == 21 / 2, "from 1 s to 3 s, both ends included"
    assert "did not end" in summary.invalid[0]
    assert build_columns(run_info(duration_s=600.0), records).info.duration_s == 600.0, "this one ended"


def test_tokens_of_answers_that_failed_are_shown_apart() -> None:
    cut = failed(1, 1000, "cut", end_ms=2000, first_ns=ms(1100), chunk_ns=[ms(1100), ms(1200)], output_tokens=2)
    summary = summarise(run_info(), [answered(0, 0, ttft_ms=100, gaps_ms=(10, 10)), cut])
    assert (summary.whole.output_tokens_per_s, summary.whole.wasted_tokens_per_s) == (0.3, 0.2)
    assert summary.whole.input_tokens_per_s == 1.0
    assert any(text.startswith("0.2 output tokens/s came of answers that then failed") for text in summary.warnings)


def test_a_comparison_counts_the_tokens_that_the_summary_counts() -> None:
    records = [answered(i, i * 10, ttft_ms=5, gaps_ms=(5,) * 9) for i in range(900)]
    chunks = [ms(9000 + 10 * i) for i in range(50)]
    records.append(failed(999, 8990, "cut", end_ms=9990, first_ns=chunks[0], chunk_ns=chunks, output_tokens=50))
    columns = build_columns(run_info(), records)
    (found,) = by_blocks(columns, columns, [], np.random.default_rng(1), confidence=0.95, resamples=50)
    assert summarise(run_info(), records).whole.output_tokens_per_s == pytest.approx(900.0)
    assert found.a == pytest.approx(900.0)


def test_empty_answers_are_not_completed_and_have_no_latency() -> None:
    records = [answered(0, 0, ttft_ms=100), *[failed(1 + i, i, "ok", status=200) for i in range(3)]]
    summary = summarise(run_info(), records)
    assert (summary.whole.completed_rps, summary.whole.empty) == (0.1, 3)
    assert summary.whole.latencies["e2e_s"].count == 1
    assert any(text.startswith("3 answers had no content") for text in summary.warnings)
    assert not summary.nothing_answered
    assert summarise(run_info(), records[1:]).nothing_answered


@pytest.mark.parametrize("rate_rps", [5.0, 20.0])
def test_a_steady_server_is_not_said_to_be_behind(rate_rps: float) -> None:
    # Fifty runs with random arrivals and answers of 1.5 s of 10 s: three standard deviations are exceeded rarely.
    rng = np.random.default_rng(3)
    said = 0
    for _ in range(50):
        due_ms = np.sort(rng.uniform(0, 10_000, size=round(rate_rps * 10)))
        records = [answered(i, float(due), ttft_ms=1500) for i, due in enumerate(due_ms)]
        said += any("was behind" in text for text in summarise(run_info(), records).warnings)
    assert said <= 2
