"""A run's summary: every figure against a truth that was worked out by hand."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.planned import SloTarget
from headrace.bench.records import GENERATOR_FAULT, GeneratorHealth, Outcome, RequestRecord
from headrace.bench.results import columns as columns_module
from headrace.bench.results.columns import OUTCOMES, build_columns, chunk_weights, gaps_s
from headrace.bench.results.figures import Limits
from headrace.bench.results.judge import judge
from headrace.bench.results.summary import summarise
from headrace.bench.results.validity import validity
from headrace.errors import ConfigError
from tests.bench.bench_records import answered, failed, ms, run_info

SLOS = {"chat": {"ttft_s": 0.5, "e2e_s": 2.0}}


def _small_run() -> list[RequestRecord]:
    """Ten legal requests and two illegal ones; the warm-up is 2 s of 10 s."""
    return [
        answered(0, 1000, ttft_ms=100, gaps_ms=(100,)),  # warm-up
        answered(1, 2000, ttft_ms=100, gaps_ms=(50, 50, 50)),  # good
        answered(2, 3000, lag_ms=4, ttft_ms=600, gaps_ms=(100,)),  # late by TTFT
        answered(3, 4000, ttft_ms=200, gaps_ms=(2000,)),  # late by E2E
        failed(4, 5000, "shed", status=429, error="busy"),
        failed(5, 6000, "cut", end_ms=6300, first_ns=ms(6100), chunk_ns=[ms(6100), ms(6200)], output_tokens=2),
        failed(6, 7000, "timeout", end_ms=17_000),
        failed(7, 8000, "refused"),
        answered(8, 9000, ttft_ms=50),  # good, a single token
        answered(9, 9900, ttft_ms=300, gaps_ms=(100,)),  # good, answered after the load's end
        failed(10, 9000, "rejected", malformed="broken_json", status=400),
        answered(11, 9000, ttft_ms=5, malformed="too_long"),  # answered with 200
    ]


def test_counts_attainment_and_rates_of_a_small_run() -> None:
    whole = summarise(run_info(warmup_s=2.0, slos=SLOS), _small_run()).whole
    assert whole.offered == 9
    assert whole.good == 3
    assert whole.outcomes == {"ok": 5, "shed": 1, "refused": 1, "cut": 1, "timeout": 1}
    assert whole.missed_by == {"ttft": 1, "e2e": 1, "shed": 1, "refused": 1, "cut": 1, "timeout": 1}
    assert whole.attainment is not None
    assert (whole.attainment.value, whole.attainment.hits, whole.attainment.count) == (3 / 9, 3, 9)
    # The window is 8 s long.
    assert whole.offered_rps == 9 / 8
    assert whole.sent_rps == 9 / 8
    assert whole.completed_rps == 4 / 8, "requests 1, 2, 3 and 8; request 9 came after the window"
    assert whole.goodput_rps == 2 / 8, "requests 1 and 8; request 9 is good and came after the window"
    assert whole.ended_after == 2, "requests 6 and 9"
    # Tokens that arrived between 2 s and 10 s: 4 + 2 + 2 of requests 1 to 3, 1 of request 8.
    assert whole.output_tokens_per_s == 9 / 8
    assert whole.wasted_tokens_per_s == 2 / 8, "those of the cut stream"
    # Prompts of 10 tokens whose first token came in the window, of whole answers: requests 1, 2, 3, 8.
    assert whole.input_tokens_per_s == 40 / 8
    assert whole.total_tokens_per_s == 49 / 8


def test_latencies_of_a_small_run() -> None:
    latencies = summarise(run_info(warmup_s=2.0, slos=SLOS), _small_run()).whole.latencies
    truths = {
        "ttft_s": [0.1, 0.6, 0.2, 0.05, 0.3],
        "ttft_from_due_s": [0.1, 0.604, 0.2, 0.05, 0.3],
        "tpot_s": [0.05, 0.1, 2.0, 0.1],
        "itl_s": [0.05, 0.05, 0.05, 0.1, 2.0, 0.1],
        "ntpot_s": [0.25 / 4, 0.35, 1.1, 0.05, 0.2],
        "e2e_s": [0.25, 0.7, 2.2, 0.05, 0.4],
        "e2e_from_due_s": [0.25, 0.704, 2.2, 0.05, 0.4],
        "send_lag_s": [0.0, 0.004, *[0.0] * 7],
    }
    assert set(latencies) == set(truths)
    for metric, values in truths.items():
        spread = latencies[metric]
        assert spread.count == len(values), metric
        # Nanoseconds as floating-point seconds: exact to 15 digits.
        assert spread.mean == pytest.approx(np.mean(values), rel=1e-12), metric
        assert spread.std == pytest.approx(np.std(values, ddof=1), rel=1e-9), metric
        assert (spread.min, spread.max) == pytest.approx((min(values), max(values))), metric
    assert latencies["ttft_s"].percentiles["p50"] is None, "five values do not bound a median"


def test_percentiles_of_four_hundred_known_values() -> None:
    records = [answered(i, i * 10, ttft_ms=i + 1, gaps_ms=(2 * i + 2,)) for i in range(400)]
    random.Random(1).shuffle(records)
    latencies = summarise(run_info(), records).whole.latencies
    for metric, factor in (("ttft_s", 0.001), ("tpot_s", 0.002), ("e2e_s", 0.003), ("ntpot_s", 0.0015)):
        figures = latencies[metric].percentiles
        values = {name: None if figure is None else figure.value for name, figure in figures.items()}
        truth = {"p50": 200, "p90": 360, "p95": 380, "p99": 396}
        assert values == pytest.approx({name: rank * factor for name, rank in truth.items()} | {"p99.9": None})


def test_what_is_due_in_the_warm_up_is_not_measured_and_what_ends_late_is() -> None:
    summary = summarise(run_info(warmup_s=2.0), _small_run())
    assert (summary.window.start_s, summary.window.end_s) == (2.0, 10.0)
    assert summary.records == 12
    assert (summary.legal_before_window, summary.legal_in_window, summary.legal_after_window) == (1, 9, 0)
    edge = [answered(0, 2000, ttft_ms=1), answered(1, 1999.999, ttft_ms=1), answered(2, 10_000, ttft_ms=1)]
    assert summarise(run_info(warmup_s=2.0), edge).whole.offered == 2, "both ends of the window belong to it"


def test_illegal_requests_have_their_own_table_and_touch_nothing_else() -> None:
    legal = [record for record in _small_run() if record.malformed is None]
    with_illegal = summarise(run_info(warmup_s=2.0, slos=SLOS), _small_run())
    without = summarise(run_info(warmup_s=2.0, slos=SLOS), legal)
    assert with_illegal.whole == without.whole
    assert [(r.kind, r.count, r.right, r.wrong, r.unjudged, r.statuses) for r in with_illegal.refusals] == [
        ("broken_json", 1, 1, 0, 0, {"400": 1}),
        ("too_long", 1, 0, 1, 0, {"200": 1}),
    ]
    assert without.refusals == []


def test_lanes_and_classes_are_counted_apart() -> None:
    records = [
        answered(0, 0, ttft_ms=10, class_name="short", lane="live"),
        answered(1, 1, ttft_ms=10, class_name="long", lane="live"),
        failed(2, 2, "shed", class_name="long", lane="batch"),
        answered(3, 3, ttft_ms=10, class_name="free"),
    ]
    summary = summarise(run_info(slos={"short": {"ttft_s": 1.0}, "long": {"ttft_s": 1.0}}), records)
    assert [(g.name, g.offered, g.good) for g in summary.lanes] == [("batch", 1, 0), ("free", 1, 1), ("live", 2, 2)]
    assert [(g.name, g.offered, g.good) for g in summary.classes] == [("free", 1, 1), ("long", 2, 1), ("short", 1, 1)]
    assert not summary.classes_are_lanes
    assert {g.name: g.slo for g in summary.lanes} == {"batch": {"ttft_s": 1.0}, "free": None, "live": {"ttft_s": 1.0}}


def test_a_request_counts_for_the_lane_it_asked_for() -> None:
    records = [
        answered(0, 0, ttft_ms=10, lane="live", served_lane="batch"),
        answered(1, 1, ttft_ms=10, lane="live", served_lane="live"),
        answered(2, 2, ttft_ms=10, class_name="free", served_lane="batch"),
    ]
    summary = summarise(run_info(), records)
    assert {g.name: g.offered for g in summary.lanes} == {"live": 2, "free": 1}
    assert summary.whole.served_elsewhere == 1
    assert any("another lane" in warning for warning in summary.warnings)


def test_classes_without_lanes_are_lanes() -> None:
    records = [answered(0, 0, ttft_ms=10, class_name="a"), answered(1, 1, ttft_ms=20, class_name="b")]
    summary = summarise(run_info(), records)
    assert summary.classes_are_lanes
    assert [g.name for g in summary.groups] == ["all", "a", "b"]
    assert [g.name for g in summarise(run_info(), records[:1]).groups] == ["a"], "one row for one class"
    assert [msgspec.structs.replace(g, kind="class") for g in summary.lanes] == summary.classes


def test_closed_loop_requests_cut_off_by_the_end_are_shown_but_not_offered() -> None:
    records = [
        answered(0, 0, ttft_ms=100, user=0),
        failed(1, 9800, "cancelled", end_ms=10_000, user=0),
        failed(2, 9000, "cancelled", end_ms=10_000, user=1),  # had waited 1 s for its first token
    ]
    whole = summarise(run_info(slos=SLOS, concurrency=2), records).whole
    assert (whole.offered, whole.good, whole.not_offered) == (2, 1, 1)
    assert whole.outcomes == {"ok": 1, "cancelled": 1}
    assert whole.missed_by == {"ttft": 1}


def test_attainment_from_due_counts_the_wait_for_the_turn_before() -> None:
    records = [answered(i, i * 100, lag_ms=600, ttft_ms=100, ready_ns=ms(i * 100 + 600)) for i in range(4)]
    summary = summarise(run_info(slos=SLOS), records)
    assert (summary.whole.good, summary.whole.good_from_due) == (4, 0)
    assert summary.whole.goodput_rps == 4 / 10
    assert summary.whole.attainment_from_due is not None and summary.whole.attainment_from_due.value == 0
    assert summary.invalid == [], "the generator sent each one as soon as it could"


def test_several_tokens_in_a_chunk_share_its_time() -> None:
    # Chunks of 3, 2, 0 and 1 tokens at 0, 50, 60 and 100 ms: the gaps are 0 0 | 50 0 | 50 (past the empty one).
    record = answered(0, 0, ttft_ms=0, gaps_ms=(50, 10, 40), chunk_tokens=[3, 2, 0, 1], output_tokens=6)
    single = answered(1, 0.5, ttft_ms=0)  # one token, no gap
    plain = answered(2, 1, ttft_ms=0, gaps_ms=(70,))
    columns = build_columns(run_info(), [record, single, plain])
    gaps, starts = gaps_s(columns, np.array([True, True, True]))
    assert gaps.tolist() == [0, 0, 0.05, 0, 0.05, 0.07]
    assert starts.tolist() == [0, 5]
    assert chunk_weights(columns).tolist() == [3, 2, 0, 1, 1, 1, 1]


def test_chunks_without_counts_share_the_tokens_that_usage_says() -> None:
    columns = build_columns(run_info(), [answered(0, 0, ttft_ms=10, gaps_ms=(10, 10, 10), output_tokens=10)])
    assert chunk_weights(columns).tolist() == [2.5] * 4


def test_more_tokens_in_chunks_than_memory_should_hold_count_as_one_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "MOST_TOKENS_APART", 5)
    record = answered(0, 0, ttft_ms=0, gaps_ms=(50,), chunk_tokens=[3, 3], output_tokens=6)
    columns = build_columns(run_info(), [record])
    assert gaps_s(columns, np.array([True]))[0].tolist() == [0.05]
    assert chunk_weights(columns).tolist() == [3, 3]


def test_a_chunk_of_less_than_no_tokens_is_refused() -> None:
    record = answered(0, 0, ttft_ms=0, gaps_ms=(50,), chunk_tokens=[3, -1], output_tokens=2)
    with pytest.raises(ConfigError, match="less than 0 tokens"):
        build_columns(run_info(), [record])


def test_order_of_records_does_not_matter() -> None:
    records = _small_run() + [
        answered(20 + i, 2500 + i, ttft_ms=i, gaps_ms=(1.0,) * (i % 5), chunk_tokens=[2] * (i % 5 + 1))
        for i in range(30)
    ]
    info = run_info(warmup_s=2.0, slos=SLOS)
    straight = summarise(info, records)
    for seed in range(3):
        shuffled = list(records)
        random.Random(seed).shuffle(shuffled)
        assert summarise(info, shuffled) == straight


def test_an_answer_without_usage_is_pointed_out() -> None:
    summary = summarise(run_info(), [answered(0, 0, ttft_ms=10, usage_seen=False), answered(1, 1, ttft_ms=10)])
    assert summary.whole.without_usage == 1
    assert any("without usage" in warning for warning in summary.warnings)


def test_a_late_generator_makes_the_run_invalid() -> None:
    late = [answered(i, i * 10, ttft_ms=10, lag_ms=10.1 if i < 2 else 0) for i in range(100)]
    summary = summarise(run_info(), late)
    assert summary.send_lag_p99_s == 0.0101
    assert len(summary.invalid) == 1 and "sent late" in summary.invalid[0]
    # One of a hundred is within the p99 of a nearest rank.
    assert summarise(run_info(), [*late[1:], answered(100, 990, ttft_ms=10)]).invalid == []
    assert summarise(run_info(), late, Limits(send_lag_p99_s=0.02)).invalid == []


def test_a_run_without_a_request_in_its_window_is_invalid() -> None:
    summary = summarise(run_info(warmup_s=5.0), [answered(0, 100, ttft_ms=10)])
    assert summary.whole.attainment is None
    assert "nothing to report" in summary.invalid[0]
    assert summarise(run_info(), []).invalid != []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"health": GeneratorHealth(0.95, 0.001, 3)}, "used 95% of a core"),
        ({"health": GeneratorHealth(0.1, 0.03, 3)}, "its event loop's lag has a p99 of 30 ms"),
        ({"wall_s": 0.0}, "did not end"),
    ],
)
def test_a_run_whose_generator_was_not_well_is_invalid(changes: dict[str, Any], word: str) -> None:
    records = [answered(i, i * 10, ttft_ms=10) for i in range(400)]
    sound = summarise(run_info(), records)
    assert (sound.invalid, sound.warnings) == ([], [])
    assert [word in reason for reason in summarise(run_info(**changes), records).invalid] == [True]


def test_illegal_requests_that_were_sent_late_count_against_the_generator_in_the_window() -> None:
    records = [answered(i, 5000 + i, ttft_ms=10) for i in range(50)]
    late = [failed(100 + i, 6000, "rejected", malformed="no_body", status=400, sent_ns=ms(6020)) for i in range(3)]
    assert summarise(run_info(), records + late).send_lag_p99_s == 0.02
    assert summarise(run_info(warmup_s=7.0), records + late).send_lag_p99_s is None


def test_requests_that_the_generators_own_machine_failed_make_the_run_invalid() -> None:
    records = [answered(i, i, ttft_ms=10) for i in range(50)]
    records += [failed(100, 20, "error", error=f"{GENERATOR_FAULT}Too many open files")]
    (reason,) = summarise(run_info(), records).invalid
    assert reason == "1 requests failed because of the generator's machine: Too many open files"


def test_validity_is_one_rule_whoever_asks() -> None:
    for lag_ms in (1, 9, 10, 11, 500):
        for health in (GeneratorHealth(0.2, 0.001, 1), GeneratorHealth(0.91, 0.02, 1)):
            records = [answered(i, i * 10, ttft_ms=10, lag_ms=lag_ms) for i in range(200)]
            summary = summarise(run_info(health=health), records)
            assert tuple(summary.invalid) == validity(records, health).reasons


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"wall_s": 4.0}, "ended after 4 s of 10 s"),
        ({"interrupted": True}, "was interrupted: its load ended after 10 s"),
    ],
)
def test_a_run_that_ended_early_says_so(changes: dict[str, Any], word: str) -> None:
    records = [answered(i, i * 10, ttft_ms=10) for i in range(400)]
    assert [word in warning for warning in summarise(run_info(**changes), records).warnings] == [True]


def test_lanes_too_short_for_a_p99_are_named() -> None:
    records = [answered(i, i, ttft_ms=5, class_name="a" if i < 367 else "b") for i in range(367 + 368)]
    (warning,) = summarise(run_info(), records).warnings
    assert warning == "short: a p99 needs 368 answered requests; there are fewer in a (367)"


def test_failures_are_listed_with_their_texts_most_frequent_first() -> None:
    records = [failed(i, i, "http_error", status=500, error="boom" + "x" * 500) for i in range(3)]
    records += [failed(9, 9, "refused")]
    failures = summarise(run_info(), records).failures
    assert [(f.outcome, f.status, f.count) for f in failures] == [("http_error", 500, 3), ("refused", None, 1)]
    assert failures[0].error == "boom" + "x" * 196


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="warm-up of 10 s leaves nothing"):
        summarise(run_info(warmup_s=10.0), [])


def test_records_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="request 3 has 2 chunks and token counts for 1"):
        summarise(run_info(), [answered(3, 0, ttft_ms=1, gaps_ms=(1,), chunk_tokens=[1])])


def test_an_slo_with_an_unknown_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slos.chat: unknown bound 'ttft_ms'"):
        summarise(run_info(slos={"chat": {"ttft_ms": 3.0}}), [])


@st.composite
def _records(draw: st.DrawFn) -> list[RequestRecord]:
    outcomes = draw(st.lists(st.sampled_from(OUTCOMES), max_size=40))
    records = []
    for i, name in enumerate(outcomes):
        outcome: Outcome = name  # type: ignore[assignment]  # drawn from Outcome's own names
        changes: dict[str, Any] = {
            "class_name": draw(st.sampled_from(["chat", "docs"])),
            "lane": draw(st.sampled_from([None, "live"])),
            "user": draw(st.sampled_from([None, 1])),
        }
        due_ms = draw(st.integers(0, 11_000))
        if outcome == "ok":
            gaps = tuple(draw(st.lists(st.integers(0, 300), max_size=6)))
            ttft_ms = draw(st.integers(0, 900))
            records.append(answered(i, due_ms, ttft_ms=ttft_ms, gaps_ms=gaps, **changes))
        else:
            end_ms = due_ms + draw(st.integers(0, 3000))
            records.append(failed(i, due_ms, outcome, end_ms=end_ms, **changes))
    return records


@settings(max_examples=60)
@given(_records())
def test_every_group_adds_up(records: list[RequestRecord]) -> None:
    summary = summarise(run_info(warmup_s=1.0, slos=SLOS), records)
    assert summary.legal_before_window + summary.legal_in_window + summary.legal_after_window == len(records)
    for group in (summary.whole, *summary.lanes, *summary.classes):
        assert sum(group.outcomes.values()) == group.offered
        assert 0 <= group.good_from_due <= group.good <= group.outcomes.get("ok", 0)
        assert 0 <= group.goodput_rps <= group.completed_rps
        assert sum(group.missed_by.values()) >= group.offered - group.good
        assert (group.attainment is None) == (group.offered == 0)
        if group.attainment is not None:
            assert 0 <= group.attainment.low <= group.attainment.value <= group.attainment.high <= 1
        for spread in group.latencies.values():
            figures = [figure for figure in spread.percentiles.values() if figure is not None]
            for lower, higher in itertools.pairwise(figures):
                assert lower.value <= higher.value
    for groups in (summary.lanes, summary.classes):
        for count in ("offered", "good", "not_offered"):
            assert sum(getattr(g, count) for g in groups) == getattr(summary.whole, count)
        assert sum(g.output_tokens_per_s for g in groups) == pytest.approx(summary.whole.output_tokens_per_s)
    assert summary.whole.offered + summary.whole.not_offered == summary.legal_in_window
    good = sum(
        judge(record, SloTarget(**SLOS.get(record.class_name, {}))).verdict == "good"
        for record in records
        if ms(1000) <= record.due_ns <= ms(10_000)
    )
    assert summary.whole.good == good
