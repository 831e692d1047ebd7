"""The gateway's counts: who is held, who waits for a first token, who runs, and what each still has to do."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Literal

from headrace.admission.decide import AdmissionState, DrainRate, LaneLoad
from headrace.admission.lengths import OutputLength
from headrace.admission.predict import Backlog, LaneWork, Waiting

Stage = Literal["held", "waiting", "running", "ended"]

RATE_MEMORY_S: Final = 10.0
"""Arrivals so long ago count e times less than those of now."""
_WINDOW: Final = 256


@dataclass(eq=False, slots=True)
class Entry:
    """One admitted request. Of each of its sequences: the stage, the prompt's length, the output tokens generated
    and those still expected (``length`` first expected, then likely, then none). ``unstarted`` counts those without a
    token."""

    lane: str
    tenant: str | None
    prompt_tokens: tuple[int, ...]
    length: OutputLength
    admitted_s: float
    stages: list[Stage]
    generated: list[int]
    remaining: list[int]
    unstarted: int = 0


@dataclass(slots=True)
class _WaitingCount:
    """Sequences without a token, at the door or in the engine."""

    sequences: int = 0
    prefill_tokens: int = 0
    output_tokens: int = 0

    def count(self, prompt_tokens: int, remaining: int, sign: int) -> None:
        """Add a sequence (``sign`` 1) or take it away (-1)."""
        self.sequences += sign
        self.prefill_tokens += sign * prompt_tokens
        self.output_tokens += sign * remaining

    def frozen(self) -> Waiting:
        return Waiting(self.sequences, self.prefill_tokens, self.output_tokens)


@dataclass(slots=True)
class _LaneCount:
    held: int = 0
    running: int = 0
    running_output_tokens: int = 0
    waiting: _WaitingCount = field(default_factory=_WaitingCount)
    tenants: dict[str | None, _WaitingCount] = field(default_factory=dict)
    unstarted: dict[Entry, None] = field(default_factory=dict)
    """Requests of which a sequence waits, in the order in which they began to."""

    def oldest_s(self, now_s: float) -> float:
        """For how long the first of them has been there."""
        first = next(iter(self.unstarted), None)
        return 0.0 if first is None else max(0.0, now_s - first.admitted_s)

    def count(self, tenant: str | None, stage: Stage, prompt_tokens: int, remaining: int, sign: int) -> None:
        """Add a sequence (``sign`` 1) or take it away (-1)."""
        if stage == "ended":
            return
        if stage == "running":
            self.running += sign
            self.running_output_tokens += sign * remaining
            return
        self.held += sign * (stage == "held")
        self.waiting.count(prompt_tokens, remaining, sign)
        own = self.tenants.setdefault(tenant, _WaitingCount())
        own.count(prompt_tokens, remaining, sign)
        if own.sequences == 0:
            del self.tenants[tenant]


@dataclass(slots=True)
class _Rate:
    """Tokens per second that have been arriving, older ones counting less and less."""

    per_s: float = 0.0
    seen_s: float = 0.0

    def add(self, tokens: int, now_s: float) -> None:
        self.per_s = self.at(now_s) + tokens / RATE_MEMORY_S
        self.seen_s = now_s

    def at(self, now_s: float) -> float:
        return self.per_s * math.exp(-max(0.0, now_s - self.seen_s) / RATE_MEMORY_S)


@dataclass(slots=True)
class _Arriving:
    """What a lane has been asking for; its priority, weight and target are those of the latest request."""

    priority: int = 0
    weight: float = 1.0
    due_s: float = 0.0
    prefill: _Rate = field(default_factory=_Rate)
    output: _Rate = field(default_factory=_Rate)


@dataclass(slots=True)
class Ledger:
    """Counts every admitted sequence from admission to its end, in constant time per event. Times are handed in, in
    seconds."""

    _entries: set[Entry] = field(default_factory=set)
    _lanes: dict[str, _LaneCount] = field(default_factory=dict)
    _arriving: dict[str, _Arriving] = field(default_factory=dict)
    _busy_since_s: float = 0.0
    _progress_s: float = 0.0
    _starts: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    _waiting: int = 0
    _running: int = 0
    _waiting_prefill_tokens: int = 0

    @property
    def waiting(self) -> int:
        """Sequences without a first token, held ones included."""
        return self._waiting

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting_prefill_tokens(self) -> int:
        return self._waiting_prefill_tokens

    @property
    def empty(self) -> bool:
        return not self._entries

    def lane(self, name: str) -> LaneLoad:
        count = self._lanes.get(name)
        if count is None:
            return LaneLoad()
        return LaneLoad(count.held, count.waiting.sequences - count.held, count.running)

    def lanes(self) -> dict[str, LaneLoad]:
        """Every lane that has had a request."""
        return {name: self.lane(name) for name in self._lanes}

    def waiting_tenants(self) -> dict[str, frozenset[str | None]]:
        """By lane, the tenants with sequences without a token."""
        return {name: frozenset(count.tenants) for name, count in self._lanes.items() if count.tenants}

    def state(self, lane: str, now_s: float) -> AdmissionState:
        """What the queue caps look at."""
        return AdmissionState(
            waiting=self._waiting,
            running=self._running,
            waiting_prefill_tokens=self._waiting_prefill_tokens,
            lane=self.lane(lane),
            drain=self.drain(now_s),
        )

    def backlog(self, lane: str, now_s: float) -> Backlog:
        """What a prediction for an arrival in ``lane`` looks at: every lane's work."""
        lanes = {name: self._work(count, self._arriving[name], now_s) for name, count in self._lanes.items()}
        own = self._lanes.get(lane, _LaneCount())
        tenants = {tenant: waiting.frozen() for tenant, waiting in own.tenants.items()}
        return Backlog(lanes, tenants, max(0.0, now_s - self._progress_s) if self._waiting else 0.0)

    def drain(self, now_s: float) -> DrainRate:
        """Starts per second since something began to wait (or over the last starts, when there are many)."""
        if not self._starts:
            return DrainRate()
        full = len(self._starts) == _WINDOW
        span_s = now_s - (self._starts[0][0] if full else self._busy_since_s)
        if span_s <= 0:
            return DrainRate()
        tokens = sum(tokens for _, tokens in self._starts)
        return DrainRate(len(self._starts) / span_s, tokens / span_s)

    def admit(
        self,
        lane: str,
        prompt_tokens: tuple[int, ...],
        *,
        length: OutputLength,
        held: bool,
        now_s: float,
        tenant: str | None = None,
        priority: int = 100,
        weight: float = 1.0,
        due_s: float = 0.0,
    ) -> Entry:
        """Count a request's sequences, at the door (``held``) or as waiting in the engine. ``length`` is the output
        to expect of each; ``priority`` and ``weight`` are the lane's, ``due_s`` is when the first token is due after
        arrival (0: no target)."""
        if self._waiting == 0:
            self._busy_since_s = self._progress_s = now_s
            self._starts.clear()
        sequences = len(prompt_tokens)
        stage: Stage = "held" if held else "waiting"
        entry = Entry(
            lane,
            tenant,
            prompt_tokens,
            length,
            admitted_s=now_s,
            stages=[stage] * sequences,
            generated=[0] * sequences,
            remaining=[length.expected_tokens] * sequences,
        )
        self._entries.add(entry)
        self._lanes.setdefault(lane, _LaneCount())
        for index in range(sequences):
            self._count(entry, index, 1)
        arriving = self._arriving.setdefault(lane, _Arriving())
        arriving.priority, arriving.weight, arriving.due_s = priority, weight, due_s
        arriving.prefill.add(sum(prompt_tokens), now_s)
        arriving.output.add(length.expected_tokens * sequences, now_s)
        return entry

    def release_hold(self, entry: Entry) -> None:
        """A held request goes on to the engine."""
        for index, stage in enumerate(entry.stages):
            if stage == "held":
                self._move(entry, index, "waiting")

    def started(self, entry: Entry, index: int, now_s: float) -> None:
        """A sequence gave its first output; a no-op unless it was waiting in the engine."""
        if entry.stages[index] != "waiting":
            return
        self._move(entry, index, "running")
        self._progress_s = now_s
        self._starts.append((now_s, entry.prompt_tokens[index]))

    def generated(self, entry: Entry, index: int, tokens: int) -> None:
        """A running sequence gave so many tokens. One that has made all it was expected to is a long one."""
        entry.generated[index] += tokens
        if entry.stages[index] != "running":
            return
        before = entry.remaining[index]
        after = before - tokens
        if after <= 0 and before > 0:
            after = max(0, entry.length.likely_tokens - entry.generated[index])
        entry.remaining[index] = max(0, after)
        self._lanes[entry.lane].running_output_tokens += entry.remaining[index] - before

    def ended(self, entry: Entry, index: int) -> None:
        """A sequence ended, however; a no-op when it had ended already."""
        self._move(entry, index, "ended")

    def restarted(self, entry: Entry) -> None:
        """Running and ended sequences of a request wait again: the request is tried once more."""
        for index, stage in enumerate(entry.stages):
            if stage in ("running", "ended"):
                self._count(entry, index, -1)
                entry.stages[index] = "waiting"
                entry.generated[index] = 0
                entry.remaining[index] = entry.length.expected_tokens
                self._count(entry, index, 1)

    def close(self, entry: Entry) -> None:
        """End whatever has not ended and forget the request."""
        for index in range(len(entry.stages)):
            self.ended(entry, index)
        self._entries.discard(entry)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count equals what the entries say."""
        lanes = {name: _LaneCount() for name in self._lanes}
        for entry in self._entries:
            for stage, prompt_tokens, remaining in zip(entry.stages, entry.prompt_tokens, entry.remaining, strict=True):
                assert remaining >= 0, f"{remaining} tokens remain"
                if stage in ("held", "waiting"):
                    lanes[entry.lane].unstarted.setdefault(entry)
                lanes[entry.lane].count(entry.tenant, stage, prompt_tokens, remaining, 1)
        assert self._lanes == lanes, f"{self._lanes} but {lanes}"
        counted = (self._waiting, self._running, self._waiting_prefill_tokens)
        summed = (
            sum(lane.waiting.sequences for lane in lanes.values()),
            sum(lane.running for lane in lanes.values()),
            sum(lane.waiting.prefill_tokens for lane in lanes.values()),
        )
        assert counted == summed, f"{counted} but {summed}"

    def _move(self, entry: Entry, index: int, stage: Stage) -> None:
        self._count(entry, index, -1)
        entry.stages[index] = stage
        self._count(entry, index, 1)

    def _count(self, entry: Entry, index: int, sign: int) -> None:
        stage, prompt_tokens = entry.stages[index], entry.prompt_tokens[index]
        self._lanes[entry.lane].count(entry.tenant, stage, prompt_tokens, entry.remaining[index], sign)
        if stage == "running":
            self._running += sign
        elif stage != "ended":
            self._waiting += sign
            self._waiting_prefill_tokens += sign * prompt_tokens
            entry.unstarted += sign
            if entry.unstarted:
                self._lanes[entry.lane].unstarted.setdefault(entry)
            else:
                del self._lanes[entry.lane].unstarted[entry]

    def _work(self, count: _LaneCount, arriving: _Arriving, now_s: float) -> LaneWork:
        return LaneWork(
            priority=arriving.priority,
            weight=arriving.weight,
            due_s=arriving.due_s,
            waiting=count.waiting.frozen(),
            oldest_s=count.oldest_s(now_s),
            running=count.running,
            running_output_tokens=count.running_output_tokens,
            arriving_prefill_tokens_per_s=arriving.prefill.at(now_s),
            arriving_output_tokens_per_s=arriving.output.at(now_s),
        )
