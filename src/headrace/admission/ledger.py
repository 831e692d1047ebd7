"""The gateway's counts: who is held, who waits for a first token, who runs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from headrace.admission.decide import AdmissionState, DrainRate, LaneLoad

Stage = Literal["held", "waiting", "running", "ended"]

_WINDOW = 256


@dataclass(eq=False, slots=True)
class Entry:
    """One admitted request: the stage of each of its sequences and their prompt lengths."""

    lane: str
    prompt_tokens: tuple[int, ...]
    stages: list[Stage]


@dataclass(slots=True)
class _LaneCount:
    held: int = 0
    waiting: int = 0
    running: int = 0


@dataclass(slots=True)
class Ledger:
    """Counts every admitted sequence from admission to its end. Times are handed in, in seconds."""

    _entries: set[Entry] = field(default_factory=set)
    _lanes: dict[str, _LaneCount] = field(default_factory=dict)
    _waiting: int = 0
    _running: int = 0
    _waiting_prefill_tokens: int = 0
    _busy_since_s: float = 0.0
    _starts: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

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
        return LaneLoad() if count is None else LaneLoad(count.held, count.waiting, count.running)

    def lanes(self) -> dict[str, LaneLoad]:
        """Every lane that has had a request."""
        return {name: self.lane(name) for name in self._lanes}

    def state(self, lane: str, now_s: float) -> AdmissionState:
        """What the admission decision looks at."""
        return AdmissionState(self._waiting, self._waiting_prefill_tokens, self.lane(lane), self.drain(now_s))

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

    def admit(self, lane: str, prompt_tokens: tuple[int, ...], *, held: bool, now_s: float) -> Entry:
        """Count a request's sequences, at the door (``held``) or as waiting in the engine."""
        if self._waiting == 0:
            self._busy_since_s = now_s
            self._starts.clear()
        stage: Stage = "held" if held else "waiting"
        entry = Entry(lane, prompt_tokens, [stage] * len(prompt_tokens))
        self._entries.add(entry)
        count = self._lanes.setdefault(lane, _LaneCount())
        if held:
            count.held += len(prompt_tokens)
        else:
            count.waiting += len(prompt_tokens)
        self._waiting += len(prompt_tokens)
        self._waiting_prefill_tokens += sum(prompt_tokens)
        return entry

    def release_hold(self, entry: Entry) -> None:
        """A held request goes on to the engine."""
        count = self._lanes[entry.lane]
        for index, stage in enumerate(entry.stages):
            if stage == "held":
                entry.stages[index] = "waiting"
                count.held -= 1
                count.waiting += 1

    def started(self, entry: Entry, index: int, now_s: float) -> None:
        """A sequence gave its first output; a no-op unless it was waiting in the engine."""
        if entry.stages[index] != "waiting":
            return
        entry.stages[index] = "running"
        count = self._lanes[entry.lane]
        count.waiting -= 1
        count.running += 1
        self._waiting -= 1
        self._running += 1
        self._waiting_prefill_tokens -= entry.prompt_tokens[index]
        self._starts.append((now_s, entry.prompt_tokens[index]))

    def ended(self, entry: Entry, index: int) -> None:
        """A sequence ended, however; a no-op when it had ended already."""
        count = self._lanes[entry.lane]
        match entry.stages[index]:
            case "held":
                count.held -= 1
                self._waiting -= 1
                self._waiting_prefill_tokens -= entry.prompt_tokens[index]
            case "waiting":
                count.waiting -= 1
                self._waiting -= 1
                self._waiting_prefill_tokens -= entry.prompt_tokens[index]
            case "running":
                count.running -= 1
                self._running -= 1
            case "ended":
                return
        entry.stages[index] = "ended"

    def restarted(self, entry: Entry) -> None:
        """Running and ended sequences of a request wait again: the request is tried once more."""
        count = self._lanes[entry.lane]
        for index, stage in enumerate(entry.stages):
            if stage in ("held", "waiting"):
                continue
            if stage == "running":
                count.running -= 1
                self._running -= 1
            entry.stages[index] = "waiting"
            count.waiting += 1
            self._waiting += 1
            self._waiting_prefill_tokens += entry.prompt_tokens[index]

    def close(self, entry: Entry) -> None:
        """End whatever has not ended and forget the request."""
        for index in range(len(entry.stages)):
            self.ended(entry, index)
        self._entries.discard(entry)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count equals what the entries say."""
        waiting = running = tokens = 0
        lanes = {name: _LaneCount() for name in self._lanes}
        for entry in self._entries:
            lane = lanes[entry.lane]
            for stage, prompt_tokens in zip(entry.stages, entry.prompt_tokens, strict=True):
                if stage in ("held", "waiting"):
                    waiting += 1
                    tokens += prompt_tokens
                running += stage == "running"
                lane.held += stage == "held"
                lane.waiting += stage == "waiting"
                lane.running += stage == "running"
        counted = (self._waiting, self._running, self._waiting_prefill_tokens, self._lanes)
        assert counted == (waiting, running, tokens, lanes), f"{counted} but {(waiting, running, tokens, lanes)}"
