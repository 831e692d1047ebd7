"""Which targets a machine can meet: the arithmetic and its table."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from headrace.cli.feasibility_table import feasibility_lines, feasibility_table, format_duration
from headrace.config.schema import Config, EngineConfig, SchedulingConfig
from headrace.lanes.feasibility import lane_feasibility, report
from headrace.lanes.lane import SLO, Lane
from headrace.messages.engine import SelfMeasurement

MEASURED = SelfMeasurement(prefill_tokens_per_s=400.0, decode_tokens_per_s=50.0, step_overhead_s=0.01)


def test_prediction_is_prefill_plus_overheads_then_a_gap_per_further_token() -> None:
    lane = Lane(typical_prompt_tokens=600, typical_output_tokens=11)
    row = lane_feasibility("x", lane, MEASURED, chunk_tokens=256)
    assert row.ttft_s == pytest.approx(600 / 400 + 3 * 0.01)
    assert row.tpot_s == pytest.approx(0.02)
    assert row.e2e_s == pytest.approx(row.ttft_s + 10 * 0.02)


def test_one_output_token_ends_with_the_first() -> None:
    row = lane_feasibility("x", Lane(typical_output_tokens=1), MEASURED, chunk_tokens=256)
    assert row.e2e_s == row.ttft_s


def test_each_target_is_judged_by_itself() -> None:
    lane = Lane(
        typical_prompt_tokens=40, typical_output_tokens=11, slo=SLO(p99_ttft_s=0.2, p99_tpot_s=0.02, p99_e2e_s=0.3)
    )
    row = lane_feasibility("x", lane, MEASURED, chunk_tokens=256)
    assert [(target.name, target.met) for target in row.targets] == [
        ("p99_ttft_s", True),
        ("p99_tpot_s", True),
        ("p99_e2e_s", False),
    ]
    assert not row.met


def test_a_lane_without_targets_is_met() -> None:
    row = lane_feasibility("x", Lane(), MEASURED, chunk_tokens=256)
    assert row.targets == ()
    assert row.met


def test_a_machine_that_measured_nothing_meets_nothing() -> None:
    nothing = SelfMeasurement(prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0, step_overhead_s=0.0)
    row = lane_feasibility("x", Lane(slo=SLO(p99_e2e_s=1000.0)), nothing, chunk_tokens=256)
    assert math.isinf(row.e2e_s)
    assert not row.met


def test_the_report_has_every_lane_most_urgent_first() -> None:
    rows = report(Config(), MEASURED)
    assert [row.lane for row in rows] == ["realtime", "interactive", "retrieval", "captions", "long", "batch"]


def test_smaller_chunks_cost_more_overhead() -> None:
    small, large = (
        report(Config(engine=EngineConfig(scheduling=SchedulingConfig(max_prefill_tokens=chunk))), MEASURED)[4]
        for chunk in (64, 512)
    )
    assert small.ttft_s > large.ttft_s


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (0.9999, "1 s"),
        (1.234, "1.23 s"),
        (42.0, "42 s"),
        (600.0, "10 min"),
        (math.inf, "never"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_table_and_the_lines_name_every_lane_and_verdict() -> None:
    rows = report(Config(), MEASURED)
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(feasibility_table(rows))
    text = captured.get()
    for row, line in zip(rows, feasibility_lines(rows), strict=True):
        assert row.lane in text
        assert line.startswith(f"lane {row.lane}: ")
    assert "CANNOT be met" in text
    assert "no target" in text
