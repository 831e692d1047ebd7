"""The display of a run."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from headrace.bench.drive.live import LiveState, Panel, PlainLines, open_progress
from headrace.bench.records import RequestRecord

MS = 1_000_000


def record(index: int, outcome: Any = "ok", ttft_ms: int = 20, lag_ms: int = 1) -> RequestRecord:
    sent_ns = index * MS + lag_ms * MS
    first_ns = sent_ns + ttft_ms * MS if outcome == "ok" else None
    return RequestRecord(
        index=index,
        class_name="c",
        outcome=outcome,
        due_ns=index * MS,
        ready_ns=index * MS,
        sent_ns=sent_ns,
        first_ns=first_ns,
    )


def state(planned: int | None = 500) -> LiveState:
    return LiveState(duration_s=60, warmup_s=10, planned=planned)


def test_a_line_says_where_the_run_is() -> None:
    lines: list[str] = []
    live = state()
    for index in range(99):
        live.add(record(index))
    live.add(record(99, "shed", lag_ms=8))
    PlainLines(lines.append).show(live.snapshot(12.3, sent=120, in_flight=20, chunks=246))
    assert lines == [
        "load 12 of 60 s, sent 120 of 500, in flight 20, ended ok 99 shed 1, chunks/s 20, "
        "TTFT p50 20 ms p99 20 ms, send lag p99 1.0 ms"
    ]


def test_nothing_is_invented_before_the_first_answer() -> None:
    lines: list[str] = []
    PlainLines(lines.append).show(state(planned=None).snapshot(2.0, sent=3, in_flight=3, chunks=0))
    assert lines == ["warm-up 2 of 60 s, sent 3, in flight 3, ended 0, chunks/s 0"]


@pytest.mark.parametrize(("elapsed_s", "phase"), [(0, "warm-up"), (9.9, "warm-up"), (10, "load"), (60, "drain")])
def test_the_phase_follows_the_time(elapsed_s: float, phase: str) -> None:
    assert state().snapshot(elapsed_s, sent=0, in_flight=0, chunks=0).phase == phase


def test_the_chunk_rate_is_that_of_the_time_since_the_last_snapshot() -> None:
    live = state()
    live.snapshot(10.0, sent=0, in_flight=0, chunks=1000)
    assert live.snapshot(12.0, sent=0, in_flight=0, chunks=1100).chunks_per_s == pytest.approx(50)


def test_a_terminal_gets_a_panel_and_a_file_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_progress(io.StringIO()), PlainLines)
    stream = io.StringIO()
    progress = Panel(Console(file=stream, force_terminal=True, width=80))
    live = state()
    live.add(record(0))
    progress.show(live.snapshot(30.0, sent=7, in_flight=6, chunks=5))
    progress.close()
    assert "7 of 500" in stream.getvalue()
    assert progress.interval_s < PlainLines(print).interval_s
