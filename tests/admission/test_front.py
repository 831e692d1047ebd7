"""Admission as the gateway uses it: prediction, decision and what is learned, together."""

from __future__ import annotations

import msgspec
import pytest

from headrace.admission.decide import AdmissionLimits
from headrace.admission.front import Front, Request, Ticket
from headrace.admission.predict import predict_idle
from headrace.lanes.lane import SLO, Fallback, Lane, Overload
from headrace.messages.engine import SamplingParams, Submit
from tests.admission.values import RATES, arrival

FAST = SLO(p99_ttft_s=0.1)
OPEN = AdmissionLimits(max_queue=1000, lane_max_queue=None, lane_max_running=None)


def request(
    prompt: int = 100,
    *,
    slo: SLO = FAST,
    overload: Overload = "shed",
    patience: float = 2.0,
    max_tokens: int | None = None,
    arrived_s: float = 0.0,
    sequences: int = 1,
) -> Request:
    fallback = Fallback(max_tokens=4) if overload == "degrade" else Fallback()
    lane = Lane(slo=slo, overload=overload, patience=patience, fallback=fallback, typical_output_tokens=10)
    one = Submit("r", [1] * prompt, SamplingParams(), "own", 10, max_tokens=max_tokens, arrived_s=arrived_s)
    one = msgspec.structs.replace(one, expected_tokens=10)
    return Request("own", lane, slo, [one] * sequences)


def admit(front: Front, asked: Request, now_s: float = 0.0) -> Ticket:
    verdict = front.judge(asked, OPEN, RATES, now_s)
    assert verdict.decision.action == "accept"
    return front.admit(asked, verdict)


def test_without_rates_nothing_is_predicted_and_nobody_shed_by_it() -> None:
    front = Front()
    for _ in range(100):
        verdict = front.judge(request(10_000), OPEN, None, 0.0)
        assert (verdict.name, verdict.predicted, verdict.raw) == ("accept", None, None)
        front.admit(request(10_000), verdict)


def test_the_first_is_accepted_however_late_and_those_behind_it_shed_when_beyond_patience() -> None:
    front = Front()
    admit(front, request(10_000))
    verdict = front.judge(request(100), OPEN, RATES, 0.0)
    assert (verdict.name, verdict.decision.reason) == ("shed", "predicted_late")
    assert verdict.predicted is not None and verdict.predicted.ttft_s == pytest.approx(10.1)
    assert verdict.decision.retry_after_s == pytest.approx(10.0)
    assert front.judge(request(100, overload="queue"), OPEN, RATES, 0.0).name == "accept"


def test_time_already_spent_counts() -> None:
    front = Front()
    verdict = front.judge(request(100), OPEN, RATES, 0.4)
    assert verdict.predicted is not None and verdict.predicted.ttft_s == pytest.approx(0.5)


def test_a_request_is_degraded_when_only_its_length_makes_it_late() -> None:
    """Beside seven others a step takes 27 ms: ten tokens take 0.37 s, four 0.21 s. A request that wants no more than
    four cannot be degraded further."""
    front = Front()
    for _ in range(7):
        ticket = admit(front, request(1))
        front.first_output(ticket, 0, 0.02)
    asked = request(100, slo=SLO(p99_e2e_s=0.3), overload="degrade", patience=1.1)
    verdict = front.judge(asked, OPEN, RATES, 0.0)
    assert (verdict.name, verdict.max_tokens) == ("degrade", 4)
    assert [(one.max_tokens, one.expected_tokens) for one in verdict.sequences] == [(4, 4)]
    assert asked.sequences[0].max_tokens is None
    assert front.admit(asked, verdict).entry.length.expected_tokens == 4
    short = request(100, slo=SLO(p99_e2e_s=0.17), overload="degrade", patience=1.0, max_tokens=4)
    assert front.judge(short, OPEN, RATES, 0.0).name == "shed"


def test_predictions_follow_what_happens() -> None:
    """First tokens that take twice as long as predicted, again and again, are predicted so."""
    front = Front()
    idle_s = predict_idle(arrival(100), RATES).ttft_s
    for number in range(80):
        ticket = admit(front, request(100), float(number))
        front.first_output(ticket, 0, number + 2 * idle_s)
        front.ledger.close(ticket.entry)
    verdict = front.judge(request(100), OPEN, RATES, 80.0)
    assert verdict.predicted is not None
    # After 80 answers 0.95 ** 80, 1.7 %, is left of the beginning; of 0.05 s, it counts half as much as an answer.
    assert verdict.predicted.ttft_s - 80.0 == pytest.approx(2 * idle_s, rel=0.01)
    # Of errors that begin at all of the prediction 1.7 % is left, and 4 % in all with those on the way.
    assert front.accuracy.errors()["own"] < 0.05


def test_a_request_tried_anew_teaches_nothing_about_predictions() -> None:
    front = Front()
    ticket = admit(front, request(100))
    front.restarted(ticket)
    front.first_output(ticket, 0, 100.0)
    assert front.accuracy.errors() == {}


def test_answers_teach_their_lanes_length_and_speed_and_aborted_ones_do_not() -> None:
    front = Front()
    for finish, tokens in (("stop", 30), ("abort", 1), ("length", 2)):
        ticket = admit(front, request(100))
        front.first_output(ticket, 0, 0.1)
        front.ledger.generated(ticket.entry, 0, tokens)
        front.finished(ticket, 0, finish, decoded_s=29 * 0.04)  # type: ignore[arg-type]
        front.ledger.close(ticket.entry)
    assert front.lengths.expect("own", 10).expected_tokens == 20
    verdict = front.judge(request(100), OPEN, RATES, 0.0)
    assert verdict.predicted is not None and verdict.raw is not None
    assert verdict.predicted.decode_s > 1.3 * verdict.raw.decode_s


def test_a_request_of_several_sequences_is_counted_whole() -> None:
    front = Front()
    ticket = admit(front, request(100, sequences=3))
    assert front.ledger.waiting == 3
    verdict = front.judge(request(100), OPEN, RATES, 0.0)
    assert verdict.predicted is not None and verdict.predicted.ttft_s == pytest.approx(0.4)
    front.ledger.close(ticket.entry)
    front.ledger.check_integrity()
