"""Admission as the gateway uses it: the ledger, what was learned, and the decision, held together.

Nothing here reads a clock or waits; times are handed in, in seconds of the gateway's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from headrace.admission.accuracy import Accuracy
from headrace.admission.decide import AdmissionDecision, AdmissionLimits, Forecast, Outlook, decide
from headrace.admission.ledger import Entry, Ledger
from headrace.admission.lengths import OutputLength, OutputLengths
from headrace.admission.memory import MemoryState, refusal
from headrace.admission.parts import Parts, allowed_s
from headrace.admission.predict import Arrival, Backlog, Prediction, predict, predict_idle
from headrace.admission.rates import EngineRates, UsualTimes
from headrace.lanes.lane import SLO, Lane
from headrace.messages.engine import FinishReason, Submit

Decision = Literal["accept", "hold", "degrade", "shed"]

SHARE_MEMORY: Final = 0.1
"""Weight of the latest prompt in its lane's share of tokens that are not in a cache: some twenty prompts count."""

DECISIONS: Final[tuple[Decision, ...]] = ("accept", "hold", "degrade", "shed")


@dataclass(frozen=True, slots=True)
class Request:
    """One request at the door: its lane, its own SLO, and what would go to the engine. All of its sequences have the
    same lane, tenant and arrival."""

    lane_name: str
    lane: Lane
    slo: SLO
    sequences: Sequence[Submit]

    @property
    def arrived_s(self) -> float:
        return self.sequences[0].arrived_s

    @property
    def due_s(self) -> float:
        """When the first token is due after arrival: the sooner of the targets for it and for the last one; 0 without
        any."""
        targets = [target_s for target_s in (self.slo.p99_ttft_s, self.slo.p99_e2e_s) if target_s is not None]
        return min(targets, default=0.0)

    @property
    def prompt_tokens(self) -> tuple[int, ...]:
        return tuple([sequence.prompt_count for sequence in self.sequences])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided. ``predicted`` are the times from arrival to the first and from there to the last token, None
    when nothing can be predicted yet; ``raw`` is the uncorrected prediction from ``decided_s`` on, to be compared with
    what will happen. ``work_s`` is the engine time that it takes at the best rates. ``sequences`` are what goes to the
    engine, degraded to ``max_tokens`` where that is not None."""

    decision: AdmissionDecision
    sequences: Sequence[Submit]
    decided_s: float
    predicted: Prediction | None = None
    raw: Prediction | None = None
    work_s: float | None = None
    max_tokens: int | None = None

    @property
    def name(self) -> Decision:
        """One word for a metric."""
        if self.decision.degraded:
            return "degrade"
        return self.decision.action


@dataclass(eq=False, slots=True)
class Ticket:
    """A request that came in. ``comparable``: what happens can be held against what was predicted, which it cannot
    once the request was tried anew."""

    request: Request
    verdict: Verdict
    entry: Entry
    comparable: bool = True


@dataclass(slots=True)
class Front:
    """Decides, and learns from what came of it."""

    ledger: Ledger = field(default_factory=Ledger)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    accuracy: Accuracy = field(default_factory=Accuracy)
    parts: Parts = field(default_factory=Parts)
    _usual_times: UsualTimes = field(default_factory=UsualTimes)
    _computed_share: dict[str, float] = field(default_factory=dict)

    def prompt_tokens(self, request: Request) -> tuple[int, ...]:
        """Prompt tokens that will have to be computed, by the share of the lane's prompts that was not in a cache."""
        share = self._computed_share.get(request.lane_name, 1.0)
        return tuple([max(1, round(tokens * share)) for tokens in request.prompt_tokens])

    def expected_length(self, lane_name: str, lane: Lane, max_tokens: int | None) -> OutputLength:
        """The output length to expect of a lane's request with this limit."""
        return self.lengths.expect(lane_name, lane.typical_output_tokens).within(max_tokens)

    def judge(
        self,
        request: Request,
        limits: AdmissionLimits,
        rates: EngineRates | None,
        now_s: float,
        memory: MemoryState | None = None,
    ) -> Verdict:
        """Whether a request may come in now, and as what. Each request is judged once: what is asked for is noted, and
        the lane's trust in predictions changes."""
        name, sequences = request.lane_name, request.sequences
        state = self.ledger.state(name, now_s)
        if not state.idle:  # with nothing to do, the engine's last report is old
            output = self.expected_length(name, request.lane, _longest(sequences)).expected_tokens
            refused = refusal(memory, request.prompt_tokens, output)
            if refused is not None:
                return Verdict(refused, sequences, now_s)
        if rates is None:
            return Verdict(decide(state, limits, len(sequences)), sequences, now_s)
        backlog = self.ledger.backlog(name, now_s)
        full = self._forecast(backlog, request, sequences, rates)
        cheaper = self._fallback(request)
        degraded = None if cheaper is None else self._forecast(backlog, request, cheaper, rates)
        spent_s = max(0.0, now_s - request.arrived_s)
        decision = decide(
            state,
            limits,
            len(sequences),
            Outlook(
                ttft_target_s=request.slo.p99_ttft_s,
                e2e_target_s=request.slo.p99_e2e_s,
                spent_s=spent_s,
                patience=request.lane.patience,
                overload=request.lane.overload,
                full=full,
                degraded=degraded,
                excess_s=self._excess_s(request, rates, now_s),
            ),
        )
        if decision.reason == "predicted_late":
            self.accuracy.shed(name)
        forecast = full
        if decision.degraded and cheaper is not None and degraded is not None:
            sequences, forecast = cheaper, degraded
        return Verdict(
            decision=decision,
            sequences=sequences,
            decided_s=now_s,
            predicted=Prediction(spent_s + forecast.now.ttft_s, forecast.now.decode_s),
            raw=forecast.raw,
            work_s=self._work_s(request, sequences),
            max_tokens=request.lane.fallback.max_tokens if decision.degraded else None,
        )

    def admit(self, request: Request, verdict: Verdict) -> Ticket:
        """Count a request that was not shed."""
        first = verdict.sequences[0]
        entry = self.ledger.admit(
            request.lane_name,
            self.prompt_tokens(request),
            length=self.expected_length(request.lane_name, request.lane, _longest(verdict.sequences)),
            held=verdict.decision.action == "hold",
            now_s=verdict.decided_s,
            tenant=first.tenant,
            priority=first.priority,
            weight=request.lane.weight,
            due_s=request.due_s,
        )
        if verdict.work_s is not None:
            self.parts.let_in((request.lane_name, first.tenant), verdict.work_s)
        return Ticket(request, verdict, entry)

    def first_output(
        self, ticket: Ticket, index: int, now_s: float, finish: FinishReason | None = None, *, cached_tokens: int = 0
    ) -> None:
        """The sequence gave its first output, which may be its last; ``cached_tokens`` of its prompt were cached."""
        lane, tokens = ticket.entry.lane, ticket.request.prompt_tokens[index]
        if tokens > 0:
            share = self._computed_share.get(lane, 1.0)
            self._computed_share[lane] = share + SHARE_MEMORY * (1 - cached_tokens / tokens - share)
        raw = ticket.verdict.raw
        if index == 0 and raw is not None and ticket.comparable and finish not in ("abort", "error"):
            self.accuracy.first_token(ticket.entry.lane, raw.ttft_s, now_s - ticket.verdict.decided_s)
        self.ledger.started(ticket.entry, index, now_s)

    def finished(self, ticket: Ticket, index: int, finish: FinishReason, *, decoded_s: float) -> None:
        """The sequence gave its last output, ``decoded_s`` after its first."""
        entry, raw = ticket.entry, ticket.verdict.raw
        if finish in ("stop", "length"):
            tokens, typical = entry.generated[index], ticket.request.lane.typical_output_tokens
            self.lengths.learn(entry.lane, tokens, typical, cut=finish == "length")
            steps = entry.length.expected_tokens - 1
            if raw is not None and ticket.comparable and len(entry.stages) == 1 and tokens > 1 and steps > 0:
                self.accuracy.decoded(entry.lane, raw.decode_s / steps * (tokens - 1), decoded_s)
        self.ledger.ended(entry, index)

    def restarted(self, ticket: Ticket) -> None:
        """The request is tried anew from the beginning."""
        ticket.comparable = False
        self.ledger.restarted(ticket.entry)

    def _forecast(
        self, backlog: Backlog, request: Request, sequences: Sequence[Submit], rates: EngineRates
    ) -> Forecast:
        first = sequences[0]
        length = self.expected_length(request.lane_name, request.lane, _longest(sequences))
        arrival = Arrival(
            lane=request.lane_name,
            tenant=first.tenant,
            priority=first.priority,
            weight=request.lane.weight,
            prompt_tokens=self.prompt_tokens(request),
            output_tokens=length.expected_tokens,
            lane_places=request.lane.max_running,
            due_s=request.due_s,
        )
        raw, idle = predict(backlog, arrival, rates), predict_idle(arrival, rates)
        corrected = self.accuracy.corrected
        return Forecast(raw, now=corrected(arrival.lane, raw), idle=corrected(arrival.lane, idle))

    def _excess_s(self, request: Request, rates: EngineRates, now_s: float) -> float | None:
        """In how many seconds its lane's and tenant's part of the engine will have room; None when it has."""
        self._usual_times.note(rates, now_s)
        if self.parts.due(now_s):
            self.parts.refresh(now_s, self.ledger.waiting_tenants())
        targets = [target_s for target_s in (request.slo.p99_ttft_s, request.slo.p99_e2e_s) if target_s is not None]
        return self.parts.excess_s(
            (request.lane_name, request.sequences[0].tenant),
            request.lane.weight,
            self._work_s(request, request.sequences),
            allowed_s(min(targets, default=None), request.lane.patience),
            idle=self.ledger.waiting == 0 and self.ledger.running == 0,
        )

    def _work_s(self, request: Request, sequences: Sequence[Submit]) -> float:
        """Engine time at the usual rates: prompts in large chunks, outputs in full batches."""
        length = self.expected_length(request.lane_name, request.lane, _longest(sequences))
        times = self._usual_times
        return sum(self.prompt_tokens(request)) * times.prefill_token_s + (
            length.expected_tokens * len(sequences) * times.decode_token_s
        )

    def _fallback(self, request: Request) -> list[Submit] | None:
        """The sequences of the cheaper answer; None when the lane has none, or it would not be cheaper."""
        most = request.lane.fallback.max_tokens
        if request.lane.overload != "degrade" or most is None:
            return None
        longest = _longest(request.sequences)
        if longest is not None and longest <= most:
            return None
        return [_limited(sequence, most) for sequence in request.sequences]


def _longest(sequences: Sequence[Submit]) -> int | None:
    """The largest output limit; None when one has none."""
    limits = [sequence.max_tokens for sequence in sequences if sequence.max_tokens is not None]
    return max(limits) if len(limits) == len(sequences) else None


def _limited(sequence: Submit, most: int) -> Submit:
    expected = sequence.expected_tokens
    return msgspec.structs.replace(
        sequence,
        max_tokens=most if sequence.max_tokens is None else min(most, sequence.max_tokens),
        expected_tokens=None if expected is None else min(most, expected),
    )
