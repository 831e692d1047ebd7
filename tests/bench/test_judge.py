"""One record: its latencies, whether it is good, whether an illegal request was refused rightly."""

from __future__ import annotations

from typing import get_args

import pytest

from headrace.bench.planned import RIGHT_STATUSES, MalformedKind, SloTarget
from headrace.bench.records import Outcome, RequestRecord
from headrace.bench.results.judge import drained_from_ns, judge, judge_refusal
from headrace.bench.results.latencies import latencies
from tests.bench.bench_records import answered, failed, ms, run_info

SLO = SloTarget(ttft_s=0.5, tpot_s=0.1, e2e_s=2.0)


def test_latencies_of_a_stream_worked_out_by_hand() -> None:
    # Due at 1,000 ms, sent at 1,004; tokens at 1,204, 1,254, 1,304, 1,404; the last byte at 1,500.
    record = answered(0, 1000, lag_ms=4, ttft_ms=200, gaps_ms=(50, 50, 100), after_ms=96)
    times = latencies(record)
    assert times.send_lag_s == 0.004
    assert times.ttft_s == 0.2
    assert times.ttft_from_due_s == 0.204
    assert times.e2e_s == 0.4
    assert times.e2e_from_due_s == 0.404
    assert times.tpot_s == pytest.approx(0.2 / 3)
    assert times.ntpot_s == 0.1


def test_tokens_are_those_of_usage_not_chunks() -> None:
    # Two chunks, nine tokens: (E2E - TTFT) / 8.
    times = latencies(answered(0, 0, ttft_ms=100, gaps_ms=(400,), output_tokens=9))
    assert times.tpot_s == 0.05
    assert times.ntpot_s == pytest.approx(0.5 / 9)


def test_one_token_has_no_tpot() -> None:
    times = latencies(answered(0, 0, ttft_ms=100))
    assert times.tpot_s is None
    assert times.ntpot_s == 0.1


def test_a_late_last_byte_is_not_generation() -> None:
    assert latencies(answered(0, 0, ttft_ms=100, gaps_ms=(100,), after_ms=5000)).e2e_s == 0.2


def test_an_answer_without_chunks_ends_with_its_last_byte() -> None:
    record = failed(0, 0, "ok", end_ms=300)
    assert latencies(record).e2e_s == 0.3
    assert latencies(record).ttft_s is None


def test_a_request_never_sent_has_no_latency() -> None:
    assert set(latencies(failed(0, 0, "cancelled", sent_ns=None))) == {None}


def test_within_every_bound_is_good_and_bounds_are_included() -> None:
    assert judge(answered(0, 0, ttft_ms=500, gaps_ms=(100,) * 15), SLO) == ("good", ())


@pytest.mark.parametrize(
    ("record", "reasons"),
    [
        (answered(0, 0, ttft_ms=500.001, gaps_ms=(50,)), ("ttft",)),
        (answered(0, 0, ttft_ms=100, gaps_ms=(101,)), ("tpot",)),
        (answered(0, 0, ttft_ms=100, gaps_ms=(100,) * 20), ("e2e",)),
        (answered(0, 0, ttft_ms=1900, gaps_ms=(101,)), ("ttft", "tpot", "e2e")),
        (failed(0, 0, "ok"), ("empty",)),
    ],
)
def test_a_miss_says_every_bound_that_it_broke(record: RequestRecord, reasons: tuple[str, ...]) -> None:
    assert judge(record, SLO) == ("miss", reasons)


def test_a_figure_that_the_answer_does_not_have_breaks_no_bound() -> None:
    assert judge(answered(0, 0, ttft_ms=100), SloTarget(tpot_s=0.001)).verdict == "good"


@pytest.mark.parametrize("outcome", [name for name in get_args(Outcome) if name != "ok"])
def test_whatever_was_not_answered_is_a_miss_by_its_outcome(outcome: Outcome) -> None:
    assert judge(failed(0, 0, outcome), SLO) == ("miss", (outcome,))


def test_without_an_slo_an_answer_is_good_and_an_empty_one_is_not() -> None:
    assert judge(answered(0, 0, ttft_ms=90_000), None).verdict == "good"
    assert judge(failed(0, 0, "ok"), None).verdict == "miss"


def test_from_due_counts_what_kept_the_request_from_being_sent() -> None:
    # A later turn: due at 1 s, possible at 1.4 s when the turn before it had ended.
    record = answered(0, 1000, lag_ms=400, ttft_ms=200, gaps_ms=(50,), ready_ns=ms(1400))
    assert latencies(record).send_lag_s == 0
    assert judge(record, SLO).verdict == "good"
    assert judge(record, SLO, "due") == ("miss", ("ttft",))


def test_the_end_of_a_closed_loop_cuts_off_requests_that_nobody_counts() -> None:
    assert judge(failed(0, 1000, "cancelled", end_ms=1400, user=3), SLO).verdict == "not_offered"


def test_a_closed_loop_request_that_had_already_broken_its_slo_is_a_miss() -> None:
    stalled = failed(0, 1000, "cancelled", end_ms=1501, user=3)
    assert judge(stalled, SLO) == ("miss", ("ttft",))
    dragging = failed(0, 1000, "cancelled", end_ms=3001, user=3, first_ns=ms(1100), chunk_ns=[ms(1100)])
    assert judge(dragging, SLO) == ("miss", ("e2e",))
    never_sent = failed(0, 1000, "cancelled", end_ms=9000, user=3, sent_ns=None)
    assert judge(never_sent, SLO).verdict == "not_offered"


def test_a_closed_loop_request_that_the_drain_passed_without_is_a_miss() -> None:
    drained_ns = drained_from_ns(run_info(duration_s=10.0))
    hung = failed(0, 9900, "cancelled", end_ms=12_000, user=3)
    assert judge(hung, None, drained_ns=drained_ns) == ("miss", ("cancelled",))
    assert judge(hung, SloTarget(tpot_s=0.1), drained_ns=drained_ns) == ("miss", ("cancelled",))
    assert judge(hung, SLO, drained_ns=drained_ns) == ("miss", ("ttft", "e2e")), "bounds say more than the outcome"
    never_sent = failed(0, 9900, "cancelled", end_ms=12_000, user=3, sent_ns=None)
    assert judge(never_sent, None, drained_ns=drained_ns).verdict == "not_offered"
    without_drain = failed(0, 9900, "cancelled", end_ms=10_005, user=3)
    assert judge(without_drain, None, drained_ns=drained_ns).verdict == "not_offered"


def test_a_closed_loop_request_that_a_second_ctrl_c_cut_off_is_not_offered() -> None:
    drained_ns = drained_from_ns(run_info(duration_s=10.0, interrupted=True))
    assert judge(failed(0, 9900, "cancelled", end_ms=12_000, user=3), None, drained_ns=drained_ns) == (
        "not_offered",
        (),
    )


def test_the_end_of_an_open_loop_leaves_a_miss() -> None:
    assert judge(failed(0, 1000, "cancelled", sent_ns=None), SLO) == ("miss", ("cancelled",))


def test_an_illegal_request_has_no_slo() -> None:
    with pytest.raises(ValueError, match="malformed"):
        judge(failed(0, 0, "rejected", malformed="no_body"), SLO)


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("broken_json", {400, 422}),
        ("wrong_type", {400, 422}),
        ("empty_messages", {400, 422}),
        ("bad_range", {400, 422}),
        ("no_body", {400, 411, 415, 422}),
        ("unknown_model", {404, 400}),
        ("too_long", {400, 413, 422}),
        ("huge_body", {413, 400}),
    ],
)
def test_right_refusals_by_kind(kind: str, right: set[int]) -> None:
    for status in (200, 400, 401, 404, 411, 413, 415, 422, 500, 503):
        outcome: Outcome = "ok" if status == 200 else "rejected" if status < 500 else "http_error"
        verdict = judge_refusal(failed(0, 0, outcome, malformed=kind, status=status))
        assert verdict == ("right" if status in right else "wrong"), status


def test_every_kind_of_illegal_request_has_its_right_answers() -> None:
    assert set(RIGHT_STATUSES) == set(get_args(MalformedKind))


@pytest.mark.parametrize(
    ("outcome", "verdict"), [("shed", "unjudged"), ("cancelled", "unjudged"), ("timeout", "wrong")]
)
def test_a_server_that_never_said_what_it_thinks(outcome: Outcome, verdict: str) -> None:
    status = 429 if outcome == "shed" else None
    assert judge_refusal(failed(0, 0, outcome, malformed="no_body", status=status)) == verdict


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no known way"):
        judge_refusal(failed(0, 0, "rejected", malformed="upside_down"))
