"""Admission in front of a virtual engine, as the gateway has it: requests that are predicted to be late are shed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from headrace.admission.decide import AdmissionLimits
from headrace.admission.front import Front, Request, Ticket, Verdict
from headrace.admission.rates import rates_of
from headrace.lanes.lane import Lane
from headrace.messages.engine import BandPlan, EngineLoad, ModelInfo, Ready, SamplingParams, Submit
from headrace.scheduling.step import StepTimes
from headrace.simulate.requests import RequestRecord, VirtualRequest
from headrace.simulate.simulation import Event
from headrace.simulate.virtual_engine import VirtualEngine

_NO_LIMITS: Final = AdmissionLimits(max_queue=10**6, lane_max_queue=None, lane_max_running=None)
_PREFILL_TOKENS: Final = 256


@dataclass
class Door:
    """Judges arrivals by the real ``Front``, and tells it what came of those that it let in. ``times`` are what the
    engine says of its rates. ``shed`` are the records of the others, which nothing ever happens to. A request that
    does not say what output to expect is given what its lane usually has."""

    engine: VirtualEngine
    lanes: Mapping[str, Lane]
    times: StepTimes
    front: Front = field(default_factory=Front)
    let_in: list[tuple[Verdict, RequestRecord]] = field(default_factory=list)
    shed: list[tuple[Verdict, RequestRecord]] = field(default_factory=list)
    _alive: dict[str, Ticket] = field(default_factory=dict)

    def feed(self, requests: Iterable[VirtualRequest]) -> list[Event]:
        """The requests' arrivals."""
        return [Event(request.arrived_s, partial(self.arrive, request)) for request in requests]

    def arrive(self, asked: VirtualRequest, now_s: float) -> Iterable[Event]:
        """One request arrives. Returns the events that follow."""
        self._learn()
        lane = self.lanes[asked.lane]
        submit = Submit(
            asked.request_id,
            [0] * asked.prompt_tokens,
            SamplingParams(),
            asked.lane,
            asked.priority,
            arrived_s=now_s,
            tenant=asked.tenant,
        )
        request = Request(asked.lane, lane, lane.slo, [submit])
        verdict = self.front.judge(request, _NO_LIMITS, rates_of(self._load(), self._ready(), self.engine.knobs), now_s)
        if verdict.decision.action == "shed":
            self.shed.append((verdict, RequestRecord(asked)))
            return ()
        self._alive[asked.request_id] = self.front.admit(request, verdict)
        if asked.expected_tokens is None:
            expected = self.front.expected_length(asked.lane, lane, asked.max_tokens).expected_tokens
            asked = msgspec.structs.replace(asked, expected_tokens=expected)
        events = self.engine.submit(asked, now_s)
        self.let_in.append((verdict, self.engine.records[asked.request_id]))
        return events

    def _learn(self) -> None:
        """What happened since: first tokens, tokens, ends."""
        for name, ticket in list(self._alive.items()):
            record, entry = self.engine.records[name], ticket.entry
            if record.first_token_s is None:
                continue
            if entry.stages[0] == "waiting":
                self.front.first_output(ticket, 0, record.first_token_s)
            self.front.ledger.generated(entry, 0, record.output_tokens - entry.generated[0])
            if record.ended_s is not None:
                self.front.finished(ticket, 0, "stop", decoded_s=record.ended_s - record.first_token_s)
                self.front.ledger.close(entry)
                del self._alive[name]

    def _load(self) -> EngineLoad:
        running = len(self.engine.running)
        return EngineLoad(
            running=running,
            waiting=0,
            kv_used_tokens=0,
            kv_total_tokens=1,
            kv_used_bytes=0,
            kv_total_bytes=1,
            waiting_prefill_tokens=0,
            step_s=0.0,
            decode_tokens=running,
            prefill_tokens=0,
            threads=1,
            prefill_tokens_per_s=_PREFILL_TOKENS / self.times.call_s(_PREFILL_TOKENS),
            decode_step_s=self.times.call_s(running + 1),
        )

    def _ready(self) -> Ready:
        band = self.engine.shape.bands[0]
        tokens = band.max_context_tokens
        return Ready(
            ModelInfo("m", "", "a", 0, 0, tokens, tokens, 1, 1), [BandPlan(tokens, band.max_sequences, 1)], 1, 1, None
        )
