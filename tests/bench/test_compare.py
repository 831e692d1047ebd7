"""What differs beyond noise: planted differences are found, absent ones are not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.bench.compare.compare import compare, holm, load_run
from headrace.bench.compare.comparison import Comparison, Statement, comparison_table, comparison_to_json
from headrace.bench.records import GeneratorHealth
from headrace.bench.results.columns import Columns, build_columns
from headrace.bench.results.summary import summarise_columns
from headrace.bench.results.summary_json import to_json
from headrace.bench.statistics.intervals import Share, newcombe, two_sided_z
from headrace.errors import ConfigError
from tests.bench.bench_records import answered, failed, run_info, synthetic_run

SLOS = {"chat": {"ttft_s": 0.5}, "docs": {"ttft_s": 1.5}}


def _run(seed: int, slowdown: float = 1.0, **changes: Any) -> Columns:
    settings: dict[str, Any] = {
        "rate_rps": 25,
        "duration_s": 150.0,
        "memory": 0.6,
        "slos": SLOS,
        "label": f"run {seed}",
    }
    return build_columns(*synthetic_run(np.random.default_rng(seed), slowdown=slowdown, **(settings | changes)))


def _compare(a: list[Columns], b: list[Columns], **changes: Any) -> Comparison:
    return compare(a, b, np.random.default_rng(0), **({"resamples": 300} | changes))


def _find(comparison: Comparison, group: str, figure: str) -> Statement:
    (found,) = [s for s in comparison.statements if (s.group, s.figure) == (group, figure)]
    return found


def test_a_planted_shift_of_ten_percent_is_found_with_its_size() -> None:
    comparison = _compare([_run(1)], [_run(2, 0.9)])
    assert comparison.method == "blocks"
    for lane in ("chat", "docs"):
        for figure in ("TPOT p50", "TPOT p99", "ITL p99", "E2E p50"):
            statement = _find(comparison, lane, figure)
            assert statement.beyond_noise and statement.better == "B", (lane, figure)
            assert statement.change is not None and statement.low is not None and statement.high is not None
            assert statement.low < -0.1 < statement.high
            assert statement.words.startswith("B is faster by "), statement.words
    assert comparison.differs
    throughput = _find(comparison, "all requests", "output tokens")
    assert not throughput.beyond_noise, "an open loop below saturation: the load decides the tokens per second"


def test_slower_is_called_slower() -> None:
    statement = _find(_compare([_run(1, 0.9)], [_run(2)]), "chat", "TPOT p50")
    assert statement.better == "A"
    assert statement.words.startswith("B is slower by 1")


def test_the_same_server_twice_differs_by_nothing() -> None:
    comparison = _compare([_run(1)], [_run(3)])
    assert not comparison.differs
    statement = _find(comparison, "chat", "TTFT p99")
    assert statement.needed is not None and statement.count is not None and statement.needed > statement.count
    assert statement.words.startswith("no difference beyond noise; needs about ")
    assert statement.words.endswith(" requests a side to see 5 %")
    assert _find(comparison, "chat", "TPOT p50").words == "no difference beyond noise; 5 % would have been seen"


def test_false_alarms_are_as_rare_as_promised() -> None:
    """A against A, 60 times, with latencies that depend on their neighbours'."""
    trials, wrong_once, single, tests = 60, 0, 0, 0
    for trial in range(trials):
        settings: dict[str, Any] = {"duration_s": 90.0, "classes": {"chat": (1.0, 0.2, 4)}, "shed_share": 0.03}
        a, b = (_run(1000 + 2 * trial + side, **settings) for side in (0, 1))
        comparison = _compare([a], [b], resamples=200)
        wrong_once += comparison.differs
        p_values = [statement.p for statement in comparison.statements if statement.p is not None]
        single += sum(p <= 0.05 for p in p_values)
        tests += len(p_values)
    # All statements together: 5 % of the comparisons, plus four standard deviations of 60 trials.
    assert wrong_once <= trials * 0.05 + 4 * math.sqrt(trials * 0.05 * 0.95)
    # Each alone: 5 %. The statements of one comparison go together (nine figures of the same requests), so they are
    # counted as one trial each in the bound.
    assert single / tests <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)
    assert tests >= trials * 7, "the figures must be compared for their alarms to count"


def test_dependence_in_time_widens_the_interval() -> None:
    def width(memory: float) -> float:
        statement = _find(_compare([_run(1, memory=memory)], [_run(2, memory=memory)]), "chat", "TTFT p50")
        assert statement.low is not None and statement.high is not None
        return statement.high - statement.low

    # The same values in another order would have the same width if the order were not looked at.
    assert width(0.95) > 2 * width(0.0)


def _scheduled(seed: int, slowdown: float, sha: str, requests: int = 1500) -> Columns:
    """Requests ten times as different from one another as from run to run."""
    lengths = np.random.default_rng(7).lognormal(0, 1.0, size=requests)
    noise = np.random.default_rng(seed).lognormal(0, 0.1, size=requests)
    ttfts_ms = 100 * slowdown * lengths * noise
    records = [answered(i, i * 40, ttft_ms=float(ttfts_ms[i]), gaps_ms=(20,)) for i in range(requests)]
    return build_columns(run_info(duration_s=60.0, wall_s=61.0, schedule_sha256=sha), records)


def test_runs_of_one_schedule_are_compared_request_by_request() -> None:
    def statement(sha_a: str, sha_b: str) -> Statement:
        return _find(_compare([_scheduled(1, 1.0, sha_a)], [_scheduled(2, 0.95, sha_b)]), "chat", "TTFT p50")

    assert not statement("a", "b").beyond_noise
    assert statement("a", "a").beyond_noise


def test_runs_of_one_schedule_raise_false_alarms_at_the_nominal_rate() -> None:
    trials = 100
    false = 0
    for trial in range(trials):
        a, b = (_scheduled(100 + 2 * trial + side, 1.0, "a", requests=400) for side in (0, 1))
        p = _find(_compare([a], [b], resamples=200), "chat", "TTFT p50").p
        assert p is not None
        false += p <= 0.05
    # A bootstrapped percentile's standard error is itself uncertain, by some 10 %: that makes 5 % up to 7 %.
    assert false <= trials * 0.07 + 4 * math.sqrt(trials * 0.07 * 0.93)
    assert false > 0, "an interval that never errs at 5 % is too wide"


def test_attainment_is_compared_by_newcombe() -> None:
    def side(good: int, bad: int) -> Columns:
        misses = np.random.default_rng(bad).choice(good + bad, size=bad, replace=False)
        records = [
            failed(i, i * 20, "shed") if i in misses else answered(i, i * 20, ttft_ms=10) for i in range(good + bad)
        ]
        return build_columns(run_info(), records)

    comparison = _compare([side(480, 20)], [side(450, 50)])
    statement = _find(comparison, "chat", "attainment")
    interval = newcombe(Share(480, 500), Share(450, 500), two_sided_z(0.95))
    assert statement.change == pytest.approx(-0.06)
    # The misses come at random times: no dependence is seen, and the interval is that of the plain counts.
    assert (statement.low, statement.high) == pytest.approx((interval.low, interval.high))
    assert statement.words.startswith("B is lower by 6 points (95 % CI 2.")
    assert statement.better == "A"


def test_bad_times_that_come_together_count_as_fewer_requests() -> None:
    def side(bad: range) -> Columns:
        return build_columns(
            run_info(),
            [failed(i, i * 10, "shed") if i in bad else answered(i, i * 10, ttft_ms=10) for i in range(1000)],
        )

    scattered = _find(_compare([side(range(0, 1000, 25))], [side(range(0))]), "chat", "attainment")
    in_one_go = _find(_compare([side(range(400, 440))], [side(range(0))]), "chat", "attainment")
    assert scattered.change == in_one_go.change == pytest.approx(0.04)
    assert scattered.beyond_noise
    assert not in_one_go.beyond_noise, "one bad spell of 40 requests may be one accident"


def test_a_tail_that_a_short_run_cannot_bound_is_not_compared() -> None:
    short = {"duration_s": 20.0}
    comparison = _compare([_run(1, **short)], [_run(2, **short)])
    statement = _find(comparison, "docs", "E2E p99")
    assert statement.change is None and statement.p is None
    assert "cannot be compared" in statement.words and "1,000 are needed" in statement.words
    assert any("A is short" in warning for warning in comparison.warnings)


def test_several_runs_a_side_go_by_the_spread_between_runs() -> None:
    # Within a run every latency is the same; what differs is from run to run.
    def run(ttft_ms: float) -> Columns:
        records = [answered(i, i * 20, ttft_ms=ttft_ms, gaps_ms=(10,)) for i in range(500)]
        return build_columns(run_info(), records)

    comparison = _compare([run(100), run(110), run(121)], [run(110), run(121), run(133.1)])
    statement = _find(comparison, "chat", "TTFT p50")
    assert comparison.method == "runs"
    # In logarithms: steps of log 1.1, variance (log 1.1)^2 on each side, 4 degrees of freedom (t = 2.7764).
    step = math.log(1.1)
    reach = 2.7764451 * step * math.sqrt(2 / 3)
    assert (statement.a, statement.b) == pytest.approx((0.110, 0.121))
    assert statement.change == pytest.approx(0.1)
    assert statement.low == pytest.approx(math.expm1(step - reach))
    assert statement.high == pytest.approx(math.expm1(step + reach))
    assert not statement.beyond_noise and statement.words.endswith("runs a side to see 5 %")
    clear = _compare([run(100), run(101), run(99)], [run(150), run(151), run(149)])
    assert _find(clear, "chat", "TTFT p50").beyond_noise


def test_one_run_may_be_held_against_several() -> None:
    comparison = _compare([_run(1), _run(2), _run(3)], [_run(4, 0.8)])
    assert comparison.runs == (3, 1)
    assert _find(comparison, "chat", "TPOT p50").beyond_noise


def test_two_summaries_say_less_but_agree() -> None:
    a, b = _run(1, memory=0.0), _run(2, 0.9, memory=0.0)
    from_records = _compare([a], [b])
    from_summaries = compare([summarise_columns(a)], [summarise_columns(b)], np.random.default_rng(0))
    assert from_summaries.method == "summaries"
    assert {s.figure for s in from_summaries.statements} < {s.figure for s in from_records.statements}
    for figure in ("TPOT p50", "E2E p50", "attainment"):
        one, other = _find(from_records, "chat", figure), _find(from_summaries, "chat", figure)
        assert one.change == pytest.approx(other.change)
        assert one.beyond_noise == other.beyond_noise
    statement = _find(from_summaries, "chat", "E2E p99")
    of_a, of_b = (
        next(lane for lane in summarise_columns(run).lanes if lane.name == "chat").latencies["e2e_s"].percentiles["p99"]
        for run in (a, b)
    )
    assert of_a is not None and of_b is not None and statement.change is not None
    # The two printed intervals' distances add as squares, in logarithms.
    down = math.hypot(math.log(of_b.value / of_b.low), math.log(of_a.high / of_a.value))
    up = math.hypot(math.log(of_b.high / of_b.value), math.log(of_a.value / of_a.low))
    estimate = math.log(of_b.value / of_a.value)
    assert statement.change == pytest.approx(math.expm1(estimate))
    assert statement.low == pytest.approx(math.expm1(estimate - down))
    assert statement.high == pytest.approx(math.expm1(estimate + up))
    mixed = compare([a], [summarise_columns(b)], np.random.default_rng(0))
    assert mixed == from_summaries


def test_files_of_both_kinds_are_read(tmp_path: Path) -> None:
    info, records = synthetic_run(np.random.default_rng(1), duration_s=20.0, slos=SLOS)
    lines = [msgspec.json.encode(info), *[msgspec.json.encode(record) for record in records]]
    as_records, as_summary = tmp_path / "a.jsonl", tmp_path / "a.json"
    as_records.write_bytes(b"\n".join(lines) + b"\n")
    columns = load_run(as_records)
    assert isinstance(columns, Columns)
    as_summary.write_bytes(to_json(summarise_columns(columns)))
    assert load_run(as_summary) == summarise_columns(build_columns(info, records))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(tmp_path / "missing.json")
    as_records.write_bytes(b"\n".join(lines)[:-20])
    with pytest.raises(ConfigError, match="the last line was cut"):
        load_run(as_records)
    warnings: list[str] = []
    cut = load_run(as_records, warnings.append)
    assert isinstance(cut, Columns) and len(cut) == len(records) - 1 and len(warnings) == 1
    (tmp_path / "other.json").write_text('{"date": "20260101", "backend": "vllm"}')
    with pytest.raises(ConfigError, match=r"other.json:1: is not the facts of a run"):
        load_run(tmp_path / "other.json")


def test_what_makes_a_comparison_doubtful_is_said() -> None:
    tired = GeneratorHealth(cpu_share=0.3, loop_lag_p99_s=0.001, peak_in_flight=1)
    a = _run(1, simulated=True, schedule_sha256="x", health=tired)
    late = build_columns(
        run_info(schedule_sha256="y", model="other", concurrency=4),
        [answered(i, i * 10, ttft_ms=10, lag_ms=50) for i in range(900)]
        + [answered(2000 + i, i * 10, ttft_ms=10, class_name="extra") for i in range(9)],
    )
    comparison = _compare([a], [late])
    said = "\n".join(comparison.warnings)
    for phrase in (
        "A is simulated",
        "B is invalid: the generator sent late",
        "B is short: 10 s",
        "not have the same schedule",
        "different SLOs",
        "different models: m, other",
        "differ in their loop",
        "B has lanes that are not in every run, left out: extra",
        "A has lanes that are not in every run, left out: docs",
    ):
        assert phrase in said
    assert comparison.a.endswith("[simulated]")
    clean = _compare([_run(1, schedule_sha256="x")], [_run(2, schedule_sha256="x")])
    assert clean.warnings == []


def test_runs_without_a_common_lane_are_refused() -> None:
    a = build_columns(run_info(), [answered(0, 0, ttft_ms=1, class_name="a")])
    b = build_columns(run_info(), [answered(0, 0, ttft_ms=1, class_name="b")])
    with pytest.raises(ConfigError, match="no lane in common"):
        _compare([a], [b])
    with pytest.raises(ConfigError, match="at least one run on each side"):
        _compare([a], [])


def test_latencies_without_any_spread_differ_or_do_not() -> None:
    def run(ttft_ms: float) -> Columns:
        return build_columns(run_info(), [answered(i, i * 8, ttft_ms=ttft_ms, gaps_ms=(10,)) for i in range(1200)])

    same = _find(_compare([run(100)], [run(100)]), "chat", "TTFT p50")
    assert (same.p, same.change, same.beyond_noise) == (1.0, 0.0, False)
    other = _find(_compare([run(100)], [run(101)]), "chat", "TTFT p50")
    assert (other.p, other.beyond_noise) == (0.0, True)


def test_the_same_generator_gives_the_same_comparison() -> None:
    a, b = _run(1), _run(2)
    assert _compare([a], [b]) == _compare([a], [b])


def test_a_table_and_json_hold_every_statement() -> None:
    comparison = _compare([_run(1)], [_run(2, 0.9)])
    console = Console(width=160)
    with console.capture() as captured:
        console.print(comparison_table(comparison))
    text = captured.get()
    for statement in comparison.statements:
        assert statement.words[:30] in text
    assert msgspec.json.decode(comparison_to_json(comparison), type=Comparison) == comparison


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= 1
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    assert [adjusted[i] for i in order] == sorted(adjusted)
    assert min(adjusted) == min(1.0, min(p_values) * len(p_values))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_runs_too_short_for_any_percentile_are_compared_figure_by_figure() -> None:
    """Five requests: no percentile is worth a comparison, which each of them says."""
    records = [answered(i, i * 1000.0, ttft_ms=20 + i, gaps_ms=(5, 6)) for i in range(5)]
    short = build_columns(run_info(), records)
    whole = build_columns(run_info(interrupted=True, duration_s=0.5), records[:1])
    for a, b in ((short, short), (short, whole), (whole, whole)):
        comparison = _compare([a], [b])
        words = {s.figure: s.words for s in comparison.statements if s.scale == "latency"}
        assert len(words) == 7
        assert all(text.startswith("cannot be compared, A and B too short: A is worth") for text in words.values()), (
            words
        )
