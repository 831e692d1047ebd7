"""The circuit breaker of one lane on one replica. Pure; times are handed in.

Times to the first token are put into windows. When the P99s of the last ``windows`` windows average above
``p99_ttft_s``, or ``failures`` requests in a row fail, it opens: the replica's batch is capped, the lane goes
elsewhere. After a cool-down it is half open: a few requests try it. When all are fast enough it closes, when one is
not it opens again, for longer, up to ``max_cool_down_s``. What a client did wrong never counts.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

BreakerState = Literal["closed", "open", "half_open"]
Permit = Literal["normal", "probe", "no"]


class BreakerConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A lane's circuit breaker, one on each replica that serves the lane. A window without ``min_requests`` ended
    requests says nothing and is left out. ``batch_cap`` is how many requests a replica has at most while open."""

    enabled: bool = True
    p99_ttft_s: float = 0.5
    window_s: float = 1.0
    windows: int = 10
    min_requests: int = 1
    failures: int = 5
    cool_down_s: float = 5.0
    max_cool_down_s: float = 15.0
    probes: int = 3
    batch_cap: int = 4


@dataclass(frozen=True, slots=True)
class Transition:
    """The breaker went from one state to another, at ``at_s``, because of ``reason``."""

    before: BreakerState
    after: BreakerState
    reason: str
    at_s: float


class Breaker:
    """Counts what came of requests and says who may pass."""

    def __init__(self, config: BreakerConfig) -> None:
        self.config = config
        self.state: BreakerState = "closed"
        self.since_s = 0.0
        self.news: deque[Transition] = deque(maxlen=16)
        """Transitions that nobody has taken note of yet; whoever does takes them out."""
        self._p99s: deque[float] = deque(maxlen=config.windows)
        self._samples: list[float] = []
        self._window_began_s: float | None = None
        self._failed = 0
        self._cool_down_s = config.cool_down_s
        self._probing = 0
        self._probed_well = 0

    @property
    def average_p99_s(self) -> float | None:
        """The mean of the windows' P99s; None before the first window."""
        return sum(self._p99s) / len(self._p99s) if self._p99s else None

    @property
    def cap(self) -> int | None:
        """The replica's batch cap; None while closed."""
        return None if self.state == "closed" else self.config.batch_cap

    def permit(self, now_s: float) -> Permit:
        """What a request may do now. A caller that sends one under ``probe`` says so with ``probing``."""
        self.tick(now_s)
        if not self.config.enabled or self.state == "closed":
            return "normal"
        if self.state == "half_open" and self._probing + self._probed_well < self.config.probes:
            return "probe"
        return "no"

    def probing(self) -> None:
        """A request was sent as a probe; ``record`` or ``gave_up`` follows."""
        self._probing += 1

    def gave_up(self, *, probe: bool) -> None:
        """A request ended without telling anything (its client's fault, or it went away)."""
        if probe and self._probing:
            self._probing -= 1

    def tick(self, now_s: float) -> Transition | None:
        """Let time pass: windows end, a cool-down is over."""
        if self._window_began_s is not None and now_s - self._window_began_s >= self.config.window_s:
            self._end_window()
        if self.state == "open" and now_s - self.since_s >= self._cool_down_s:
            return self._go("half_open", "the cool-down is over", now_s)
        return None

    def record(self, ttft_s: float | None, now_s: float, *, probe: bool = False) -> Transition | None:
        """A request got its first token after ``ttft_s``, or failed (None)."""
        if not self.config.enabled:
            return None
        if probe:
            return self._probe_ended(ttft_s, now_s)
        self.tick(now_s)
        if self.state != "closed":
            return None
        if self._window_began_s is None:
            self._window_began_s = now_s
        # What failed was slower than any limit.
        self._samples.append(2 * self.config.p99_ttft_s if ttft_s is None else ttft_s)
        self._failed = self._failed + 1 if ttft_s is None else 0
        if self._failed >= self.config.failures:
            return self._open(f"{self._failed} requests in a row failed", now_s)
        average_s = self.average_p99_s
        if average_s is not None and len(self._p99s) == self.config.windows and average_s > self.config.p99_ttft_s:
            reason = f"P99 TTFT averages {average_s:.3f} s over {self.config.windows} windows"
            return self._open(reason, now_s)
        return None

    def force_open(self, now_s: float, reason: str) -> Transition | None:
        """Open by hand, to rehearse it; what follows is as ever."""
        return None if self.state == "open" else self._open(reason, now_s)

    def _probe_ended(self, ttft_s: float | None, now_s: float) -> Transition | None:
        if self._probing:
            self._probing -= 1
        if self.state != "half_open":
            return None
        if ttft_s is None or ttft_s > self.config.p99_ttft_s:
            self._cool_down_s = min(self.config.max_cool_down_s, self._cool_down_s * 2)
            return self._open("a probe failed" if ttft_s is None else f"a probe took {ttft_s:.3f} s", now_s)
        self._probed_well += 1
        if self._probed_well < self.config.probes:
            return None
        self._cool_down_s = self.config.cool_down_s
        return self._go("closed", f"{self._probed_well} probes were fast enough", now_s)

    def _open(self, reason: str, now_s: float) -> Transition:
        return self._go("open", reason, now_s)

    def _go(self, state: BreakerState, reason: str, now_s: float) -> Transition:
        transition = Transition(self.state, state, reason, now_s)
        self.state, self.since_s = state, now_s
        self.news.append(transition)
        self._p99s.clear()
        self._samples.clear()
        self._window_began_s = None
        self._failed = self._probing = self._probed_well = 0
        return transition

    def _end_window(self) -> None:
        if len(self._samples) >= self.config.min_requests:
            self._p99s.append(p99(self._samples))
        self._samples = []
        self._window_began_s = None


def p99(samples: list[float]) -> float:
    """The smallest value that 99 % of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)]
