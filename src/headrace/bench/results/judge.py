"""One record against its SLO: good or a miss, and why. One illegal request's answer: a right refusal or not.

A request is good when it was answered whole and met every bound of its class's SLO. Errors, timeouts, sheds,
refusals and cut streams are misses. Two cases need a rule of their own:

- An answer without any content ("ok", and not one token) is a miss: nothing came in time, since nothing came.
- A request that the end of the run cut off (``cancelled``). In an open loop the schedule offered it and no
  answer came: a miss. In a closed loop a user sends as long as the run lasts, so every run ends with some
  requests under way. They have the drain time to be answered in; one that was sent and is not answered when the
  drain has passed is a miss, or a server that hangs would have none. Not offered is what was never sent, and what
  nobody waited for: cut off by a second Ctrl-C (the run is ``interrupted``) or by a run without a drain. Of these
  one whose bound had already passed unmet is a miss all the same.

The SLO is a promise about the time from sending (DESIGN: "request sent to last token"), so ``clock="sent"`` is
the judgement that attainment and goodput are made of. ``clock="due"`` judges the times from the schedule.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from headrace.bench.planned import RIGHT_STATUSES, SloTarget
from headrace.bench.records import RequestRecord, RunInfo
from headrace.bench.results.latencies import latencies

Verdict = Literal["good", "miss", "not_offered"]
Clock = Literal["sent", "due"]

LATE_REASONS = ("ttft", "tpot", "e2e", "empty")
"""What an answered request can miss by. A request that was not answered misses by its outcome's name."""


class Judgement(NamedTuple):
    """``reasons``: why it is a miss, empty otherwise. One miss may have several (late by TTFT and by E2E)."""

    verdict: Verdict
    reasons: tuple[str, ...] = ()


_GOOD = Judgement("good")
_NOT_OFFERED = Judgement("not_offered")
_NO_SLO = SloTarget()
_DRAINED_NS = 100_000_000
"""A request cut off so long after the load's end was waited for: without a drain it takes some milliseconds."""


def drained_from_ns(info: RunInfo) -> int | None:
    """The moment from which on a closed loop's request that is cut off had its drain; None: none had, because
    someone ended the run and it cannot be told whether by a second Ctrl-C."""
    return None if info.interrupted else round(info.duration_s * 1e9) + _DRAINED_NS


def judge(
    record: RequestRecord, slo: SloTarget | None, clock: Clock = "sent", *, drained_ns: int | None = None
) -> Judgement:
    """Judge a legal request. Without an SLO (None) every request that was answered is good. ``drained_ns`` is
    ``drained_from_ns`` of its run.

    Raises ValueError for a malformed one: it has no place in attainment (see ``judge_refusal``).
    """
    if record.malformed is not None:
        raise ValueError(f"request {record.index} is malformed ({record.malformed}); it has no SLO")
    bounds = _NO_SLO if slo is None else slo
    if record.outcome == "ok":
        if record.first_ns is None:
            return Judgement("miss", ("empty",))
        late = _late(record, bounds, clock)
        return Judgement("miss", late) if late else _GOOD
    if record.outcome == "cancelled" and record.user is not None:
        overdue = _overdue(record, bounds, clock)
        if overdue:
            return Judgement("miss", overdue)
        if not _drained(record, drained_ns):
            return _NOT_OFFERED
    return Judgement("miss", (record.outcome,))


def _late(record: RequestRecord, slo: SloTarget, clock: Clock) -> tuple[str, ...]:
    times = latencies(record)
    ttft_s, e2e_s = (times.ttft_s, times.e2e_s) if clock == "sent" else (times.ttft_from_due_s, times.e2e_from_due_s)
    measured = (("ttft", ttft_s, slo.ttft_s), ("tpot", times.tpot_s, slo.tpot_s), ("e2e", e2e_s, slo.e2e_s))
    # A figure that the answer does not have (TPOT of a single token) cannot break its bound.
    return tuple([name for name, value, bound in measured if bound is not None and value is not None and value > bound])


def _drained(record: RequestRecord, drained_ns: int | None) -> bool:
    if record.sent_ns is None or record.end_ns is None or drained_ns is None:
        return False
    return record.end_ns >= drained_ns


def _overdue(record: RequestRecord, slo: SloTarget, clock: Clock) -> tuple[str, ...]:
    """Bounds that a request cut off by the run's end had already broken."""
    start = record.sent_ns if clock == "sent" else record.due_ns
    if start is None or record.end_ns is None:
        return ()
    age_s = (record.end_ns - start) / 1e9
    waited_s = age_s if record.first_ns is None else (record.first_ns - start) / 1e9
    measured = (("ttft", waited_s, slo.ttft_s), ("e2e", age_s, slo.e2e_s))
    return tuple([name for name, value, bound in measured if bound is not None and value > bound])


RefusalVerdict = Literal["right", "wrong", "unjudged"]


def judge_refusal(record: RequestRecord) -> RefusalVerdict:
    """Whether an illegal request was refused as it should be.

    ``unjudged``: the server never said what it thinks of it (shed for load, or the run ended first).

    Raises ValueError for a legal request, and for a kind that ``RIGHT_STATUSES`` does not know.
    """
    if record.malformed is None or record.malformed not in RIGHT_STATUSES:
        raise ValueError(f"request {record.index} is malformed in no known way: {record.malformed!r}")
    if record.outcome in ("shed", "cancelled"):
        return "unjudged"
    return "right" if record.status in RIGHT_STATUSES[record.malformed] else "wrong"
