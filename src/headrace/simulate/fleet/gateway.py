"""The gateway on the virtual clock: lanes, admission and routing in front of replicas, and what it does when one is
lost. Lanes (``lanes.classify``) and admission (``admission.front``) are the real ones.

A request comes in (``arrive``), gets its lane, is routed, and is judged by what the gateway counts of the replica that
was chosen. Split into prefill and decode, it is judged where its prompt is computed; after its first token its KV
travels to a decode replica.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, cast, overload

from headrace.admission.decide import AdmissionLimits, fits_lane
from headrace.admission.front import Request
from headrace.admission.lengths import OutputLengths
from headrace.bench.planned import PlannedRequest
from headrace.bench.records import Outcome, RequestRecord
from headrace.config.schema import Config
from headrace.errors import RequestError
from headrace.lanes.classify import RequestSignals, classify
from headrace.lanes.deadline import output_limit
from headrace.messages.engine import SamplingParams, Submit
from headrace.simulate import requests
from headrace.simulate.fleet.flight import Flight, finished_record, refusal_status
from headrace.simulate.fleet.prefix_cache import NO_BLOCKS, prompt_of
from headrace.simulate.fleet.replica import Replica
from headrace.simulate.fleet.routes import Asked, Seen, needs_prefix, needs_wait, router
from headrace.simulate.fleet.scenario import GatewaySpec, Link
from headrace.simulate.requests import Targets, VirtualRequest
from headrace.simulate.simulation import Event, Simulation

_SAMPLING: Final = SamplingParams()
Ended = Callable[[RequestRecord, float], None]
"""Told of every request's record, and when its client has its last byte, seconds."""


class Gateway:
    """``replicas`` may grow and shrink; ``ended`` hears of every request once."""

    def __init__(
        self,
        simulation: Simulation,
        spec: GatewaySpec,
        link: Link,
        config: Config,
        lengths: OutputLengths,
        ended: Ended,
    ) -> None:
        self.replicas: list[Replica] = []
        self.in_flight: dict[str, Flight] = {}
        self.peak_in_flight = 0
        self._where: dict[str, Replica] = {}
        self._simulation = simulation
        self._spec = spec
        self._link = link
        self._config = config
        self._lengths = lengths
        self._ended = ended
        self._route = router(spec.routing)
        self.looks_at_prefixes = needs_prefix(spec.routing)
        self._looks_at_waits = needs_wait(spec.routing)
        self._random: random.Random = simulation.random("routing")
        self._arrived = 0
        self._moving: dict[str, Flight] = {}

    # ------------------------------------------------------------------------------------------ the way in

    def arrive(self, planned: PlannedRequest, due_ns: int, ready_ns: int, now_s: float) -> Iterable[Event]:
        """A request comes in. Returns the events that follow."""
        flight = Flight(planned, due_ns, ready_ns, now_s)
        self.in_flight[flight.request_id] = flight
        self.peak_in_flight = max(self.peak_in_flight, len(self.in_flight))
        if planned.malformed is not None:
            return self._refuse(flight, "rejected", refusal_status(planned), "not a request that can be served", now_s)
        try:
            self._classify(flight)
        except RequestError as error:
            return self._refuse(flight, "rejected", error.status, str(error), now_s)
        return self._send(flight, now_s)

    def _classify(self, flight: Flight) -> None:
        planned, headers = flight.planned, flight.planned.headers
        named = headers.get("x-tenant-id", "").strip() if headers else ""
        flight.tenant = named if named in self._config.tenants else None
        signals = RequestSignals(planned.lane, "/v1/chat/completions", flight.tenant, "simulated", planned.input_tokens)
        decision = classify(self._config, signals)
        flight.lane_name, flight.lane, flight.slo = decision.name, decision.lane, decision.lane.slo
        flight.prompt = prompt_of(planned) if planned.prefix is not None or planned.session is not None else NO_BLOCKS

    def _send(self, flight: Flight, now_s: float) -> Iterable[Event]:
        """Route a request, judge it there, and put it into the engine."""
        candidates = [one for one in self.replicas if one.serving and one.role != "decode" and one.fits(flight)]
        if not candidates:
            if any(one.serving and one.role != "decode" for one in self.replicas):
                return self._refuse(flight, "rejected", 400, "the prompt is longer than any context", now_s)
            return self._refuse(flight, "http_error", 503, "no replica serves", now_s)
        replica = self._choose(candidates, flight)
        flight.stage = "prefill" if replica.role == "prefill" else "whole"
        if now_s < replica.down_until_s:  # it is down and nobody has noticed
            replica.take(flight)
            self._where[flight.request_id] = replica
            return ()
        room = replica.bands[-1].max_context_tokens - flight.planned.input_tokens
        flight.max_tokens = output_limit(flight.lane, flight.planned.output_tokens, room)
        if self._spec.admission:
            return self._judge(flight, replica, now_s)
        expected = self._lengths.expect(flight.lane_name, flight.lane.typical_output_tokens)
        flight.expected_tokens = expected.within(flight.max_tokens).expected_tokens
        return self._enter(flight, replica, now_s)

    def _choose(self, candidates: Sequence[Replica], flight: Flight) -> Replica:
        views = _Views(self, candidates, flight, self._simulation.now_s)
        asked = Asked(self._arrived, flight.planned.input_tokens)
        self._arrived += 1
        return candidates[self._route(views, asked, self._random)]

    def see(self, replica: Replica, now_s: float) -> Seen:
        """A replica as of the last look at its metrics."""
        if replica.seen is not None and (self._spec.metrics_interval_s or now_s < replica.frozen_until_s):
            return replica.seen
        return replica.look(now_s, with_wait=self._looks_at_waits)

    def scrape(self, now_s: float) -> None:
        """Look at every replica's metrics, but for those that do not move."""
        for replica in self.replicas:
            if now_s >= replica.frozen_until_s:
                replica.seen = replica.look(now_s, with_wait=True)

    def _judge(self, flight: Flight, replica: Replica, now_s: float) -> Iterable[Event]:
        replica.learn_progress(now_s)
        lane, front = flight.lane, replica.front
        submit = Submit(
            flight.request_id,
            cast("list[int]", range(flight.planned.input_tokens)),  # only counted: no memory for every token
            _SAMPLING,
            flight.lane_name,
            lane.priority,
            max_tokens=flight.max_tokens,
            arrived_s=flight.arrived_s,
            tenant=flight.tenant,
        )
        request = Request(flight.lane_name, lane, flight.slo, [submit])
        limits = AdmissionLimits(self._config.server.max_queue, lane.max_queue, lane.max_running)
        verdict = front.judge(request, limits, replica.rates(now_s), now_s)
        decision = verdict.decision
        if decision.action == "shed":
            replica.shed += 1
            reason = f"shed: {decision.reason}"
            return self._refuse(flight, "shed", 429, reason, now_s, retry_after_s=decision.retry_after_s)
        if verdict.max_tokens is not None:
            flight.max_tokens = min(flight.max_tokens, verdict.max_tokens)
        flight.ticket = front.admit(request, verdict)
        flight.expected_tokens = flight.ticket.entry.length.expected_tokens
        if decision.action == "hold":
            replica.take(flight)
            self._where[flight.request_id] = replica
            replica.doors.setdefault(flight.lane_name, deque()).append(flight)
            return ()
        return self._enter(flight, replica, now_s)

    def _enter(self, flight: Flight, replica: Replica, now_s: float) -> Iterable[Event]:
        """Into the engine, once what it takes of its prompt from slower memory is there."""
        if flight.request_id not in replica.flights:
            replica.take(flight)
            self._where[flight.request_id] = replica
        flight.sent_s = ready_s = now_s
        if replica.spec.prefix_cache and flight.prompt.blocks and flight.stage != "decode":
            found = replica.cache.find(flight.prompt, flight.planned.input_tokens, replica.source_times())
            flight.cached_tokens = found.here_tokens + found.fetched_tokens
            if found.fetched_tokens:
                replica.fetch_free_s = ready_s = max(now_s, replica.fetch_free_s) + found.fetch_s
        if ready_s > now_s:
            self._moving[flight.request_id] = flight
            return (Event(ready_s, partial(self._fetched, flight, replica)),)
        return replica.submit(flight, self._virtual(flight, replica), now_s)

    def _fetched(self, flight: Flight, replica: Replica, now_s: float) -> Iterable[Event]:
        if self._moving.pop(flight.request_id, None) is None or self._where.get(flight.request_id) is not replica:
            return ()
        if now_s < replica.down_until_s:
            return ()  # it died meanwhile, and nobody has noticed: ``lost`` will find it there
        return replica.submit(flight, self._virtual(flight, replica), now_s)

    def _virtual(self, flight: Flight, replica: Replica) -> VirtualRequest:
        """What the engine is told. A baseline hears of no lane, priority or target."""
        planned = flight.planned
        made = len(flight.token_s)
        prompt_tokens = planned.input_tokens + made
        left = flight.max_tokens - made
        told = replica.told
        return VirtualRequest(
            flight.request_id,
            flight.arrived_s,
            prompt_tokens,
            1 if flight.stage == "prefill" else planned.output_tokens - made,
            lane=flight.lane_name if told else "",
            tenant=flight.tenant if told else None,
            priority=flight.lane.priority if told else 0,
            targets=_targets(flight) if told else Targets(),
            max_tokens=1 if flight.stage == "prefill" else left,
            expected_tokens=max(1, flight.expected_tokens - made),
            cached_tokens=planned.input_tokens if flight.stage == "decode" else flight.cached_tokens,
        )

    # ---------------------------------------------------------------------------------- what engines say

    def first_token(self, record: requests.RequestRecord, now_s: float) -> None:
        """An engine gave a first token."""
        flight = self.in_flight[record.request.request_id]
        replica = self._where[flight.request_id]
        replica.begins(flight, now_s)
        if flight.ticket is not None and flight.stage != "decode":
            replica.front.first_output(flight.ticket, 0, now_s, cached_tokens=flight.cached_tokens)

    def ended(self, record: requests.RequestRecord, now_s: float) -> None:
        """A request has ended in its engine. What follows happens when the step's other ends are known too."""
        flight = self.in_flight.get(record.request.request_id)
        if flight is None:
            return
        if record.outcome == "error":
            flight.known = record
            return  # its replica died: ``lost`` is what the gateway makes of that
        flight.token_s += record.token_s or ()
        flight.known = None
        replica = self._where.pop(flight.request_id)
        judged = flight.ticket is not None and flight.stage == "whole"
        self._close(flight, replica, record, now_s)
        if flight.stage == "prefill" and flight.max_tokens > 1 and flight.planned.output_tokens > 1:
            self._simulation.add(Event(now_s, partial(self._transfer, flight, replica)))
        else:
            if not judged:  # else admission has learned from it
                typical = flight.lane.typical_output_tokens
                self._lengths.learn(flight.lane_name, len(flight.token_s), typical, cut=False)
            self._finish(flight, "ok", now_s)
        if replica.doors.get(flight.lane_name):
            self._simulation.add(Event(now_s, partial(self._open_door, replica, flight.lane_name)))

    def _close(self, flight: Flight, replica: Replica, record: requests.RequestRecord, now_s: float) -> None:
        """A replica is done with a request: the counts of it, and the KV that it leaves."""
        replica.leave(flight)
        if flight.ticket is not None:
            entry, front = flight.ticket.entry, replica.front
            tokens = record.output_tokens - entry.generated[0]
            if tokens:
                front.ledger.generated(entry, 0, tokens)
            if flight.stage == "whole" and record.first_token_s is not None:
                front.finished(flight.ticket, 0, "stop", decoded_s=now_s - record.first_token_s)
            front.ledger.close(entry)
            flight.ticket = None
        if replica.spec.prefix_cache and flight.prompt.blocks:
            replica.cache.store(prompt_of(flight.planned, with_output=flight.stage != "prefill"))
        else:
            replica.cache.shrink()

    def _open_door(self, replica: Replica, lane_name: str, now_s: float) -> Iterable[Event]:
        """Held requests of a lane go on while it has places."""
        door = replica.doors[lane_name]
        events: list[Event] = []
        while door:
            flight = door[0]
            assert flight.ticket is not None
            if not fits_lane(replica.front.ledger.lane(lane_name), flight.lane.max_running, 1):
                break
            door.popleft()
            replica.front.ledger.release_hold(flight.ticket.entry)
            events += self._enter(flight, replica, now_s)
        return events

    # ------------------------------------------------------------------------------------ prefill to decode

    def _transfer(self, flight: Flight, source: Replica, now_s: float) -> Iterable[Event]:
        """Its KV goes to the decode replica with the fewest requests, over the link out of ``source``."""
        if flight.request_id not in self.in_flight:
            return ()
        candidates = [one for one in self.replicas if one.serving and one.role == "decode" and one.fits(flight)]
        if not candidates:
            self._finish(flight, "cut", now_s, error="no decode replica serves")
            return ()
        target = self._choose(candidates, flight)
        flight.stage = "decode"
        target.take(flight)
        self._where[flight.request_id] = target
        kv_bytes = flight.planned.input_tokens * source.spec.kv_bytes_per_token
        source.link_free_s = max(now_s, source.link_free_s) + kv_bytes / (self._link.gb_per_s * 1e9)
        self._moving[flight.request_id] = flight
        return (Event(source.link_free_s + self._link.latency_s, partial(self._fetched, flight, target)),)

    # ------------------------------------------------------------------------------------------- failures

    def lost(self, replica: Replica, now_s: float) -> Iterable[Event]:
        """The gateway notices that a replica died: what had no token yet is tried elsewhere, the rest is cut."""
        events: list[Event] = []
        replica.doors.clear()
        for flight in list(replica.flights.values()):
            known = flight.known
            if known is not None:
                flight.token_s += known.token_s or ()
            flight.known = None
            self._moving.pop(flight.request_id, None)
            replica.leave(flight)
            replica.lost += 1
            self._where.pop(flight.request_id, None)
            if flight.ticket is not None:
                replica.front.ledger.close(flight.ticket.entry)
                flight.ticket = None
            if flight.token_s:
                self._finish(flight, "cut", now_s, error=f"{replica.name} died")
            elif flight.tries >= self._spec.retries:
                events += self._refuse(flight, "http_error", 503, f"{replica.name} died", now_s)
            else:
                flight.tries += 1
                flight.cached_tokens = 0
                events += self._send(flight, now_s)
        return events

    def give_up(self, now_s: float) -> None:
        """The run ends: what is in flight is cancelled."""
        for flight in list(self.in_flight.values()):
            if flight.known is not None:
                flight.token_s += flight.known.token_s or ()
            self._finish(flight, "cancelled", now_s, error="the run ended before it was answered")

    # ----------------------------------------------------------------------------------------------- ends

    def _refuse(
        self,
        flight: Flight,
        outcome: Outcome,
        status: int,
        why: str,
        now_s: float,
        *,
        retry_after_s: float | None = None,
    ) -> Iterable[Event]:
        self._finish(flight, outcome, now_s, status=status, error=why, retry_after_s=retry_after_s)
        return ()

    def _finish(
        self,
        flight: Flight,
        outcome: Outcome,
        now_s: float,
        *,
        status: int | None = None,
        error: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        del self.in_flight[flight.request_id]
        record = finished_record(flight, outcome, now_s, self._spec.network_s)
        if status is not None:
            record.status = status
            record.headers_ns = record.end_ns
        record.error, record.retry_after_s = error, retry_after_s
        self._ended(record, now_s + self._spec.network_s)

    def check_integrity(self) -> str | None:
        """None when the gateway's and all replicas' accounts agree; else what is wrong."""
        there = {name for replica in self.replicas for name in replica.flights}
        if there != set(self._where) or not there <= set(self.in_flight):
            return "requests in replicas and requests in flight do not agree"
        return next((problem for one in self.replicas if (problem := one.check_integrity()) is not None), None)


class _Views(Sequence[Seen]):
    """What the gateway sees of the candidates, looked at when asked for: most choices look at two."""

    def __init__(self, gateway: Gateway, candidates: Sequence[Replica], flight: Flight, now_s: float) -> None:
        self._gateway = gateway
        self._candidates = candidates
        self._flight = flight
        self._now_s = now_s

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, place: int) -> Seen: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Seen]: ...
    def __getitem__(self, place: int | slice) -> Seen | Sequence[Seen]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        replica = self._candidates[place]
        seen = self._gateway.see(replica, self._now_s)
        if not self._gateway.looks_at_prefixes or not self._flight.prompt.blocks:
            return seen
        return replace(seen, cached_tokens=replica.cache.cached_tokens(self._flight.prompt))


def _targets(flight: Flight) -> Targets:
    slo = flight.slo
    return Targets(slo.p99_ttft_s, slo.p99_tpot_s, slo.p99_e2e_s)
