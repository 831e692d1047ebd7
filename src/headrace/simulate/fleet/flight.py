"""One request on its way through the fleet, and its record for ``bench`` once it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from headrace.admission.front import Ticket
from headrace.bench.planned import RIGHT_STATUSES, PlannedRequest
from headrace.bench.records import Outcome, RequestRecord, new_record
from headrace.lanes.lane import SLO, Lane
from headrace.simulate import requests
from headrace.simulate.fleet.prefix_cache import NO_BLOCKS, Prompt

Stage = Literal["whole", "prefill", "decode"]
_NS: Final = 1e9
_NO_LANE: Final = Lane()
_NO_SLO: Final = SLO()
_REFUSALS: Final = {"unknown_model": 404, "huge_body": 413, "no_body": 400}


@dataclass(slots=True, eq=False)
class Flight:
    """``arrived_s`` is when the gateway got it. ``known`` is the engine's own record of it, None while it is in none;
    ``sent_s`` when it was sent there. ``tries`` counts the replicas that were lost with it."""

    planned: PlannedRequest
    due_ns: int
    ready_ns: int
    arrived_s: float
    sent_s: float = 0.0
    lane_name: str = ""
    lane: Lane = _NO_LANE
    slo: SLO = _NO_SLO
    tenant: str | None = None
    max_tokens: int = 0
    expected_tokens: int = 0
    cached_tokens: int = 0
    prompt: Prompt = NO_BLOCKS
    stage: Stage = "whole"
    ticket: Ticket | None = None
    known: requests.RequestRecord | None = None
    tries: int = 0
    token_s: list[float] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return str(self.planned.index)


def finished_record(flight: Flight, outcome: Outcome, end_s: float, network_s: float) -> RequestRecord:
    """The record of a request that was sent: its tokens as its client got them, ``network_s`` after they were made."""
    record = new_record(flight.planned, flight.due_ns, flight.ready_ns, outcome)
    record.sent_ns = flight.ready_ns
    if outcome in ("ok", "cut"):
        record.status = 200
    chunks = nanoseconds(flight.token_s, network_s)
    if chunks:
        record.first_ns = record.headers_ns = chunks[0]
        record.chunk_ns = chunks
    last_ns = chunks[-1] if chunks else flight.ready_ns
    record.end_ns = max(last_ns, round((end_s + network_s) * _NS))
    record.served_lane = flight.lane_name or None
    record.request_id = flight.request_id
    record.output_tokens = len(chunks)
    if outcome == "ok":
        record.finish_reason = "length"
        record.prompt_tokens = flight.planned.input_tokens
        record.cached_tokens = flight.cached_tokens
        record.usage_seen = True
    return record


def refusal_status(planned: PlannedRequest) -> int:
    """The status with which the gateway refuses an illegal request: one of those that are right for it."""
    assert planned.malformed is not None
    return _REFUSALS.get(planned.malformed, 400 if 400 in RIGHT_STATUSES[planned.malformed] else 413)


def nanoseconds(times_s: Sequence[float], later_s: float) -> list[int]:
    """Times as whole nanoseconds of the run's clock, ``later_s`` later."""
    if later_s:
        return [round((time_s + later_s) * _NS) for time_s in times_s]
    return [round(time_s * _NS) for time_s in times_s]
