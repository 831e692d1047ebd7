"""One replica as the gateway knows it: its engine, its health, its places, and what it showed lately."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from headrace.control.breaker import Breaker, BreakerConfig, p99
from headrace.control.concurrency import (
    LimitBounds,
    LimitDecision,
    ReplicaTargets,
    ReplicaWindow,
    next_limit,
)
from headrace.engines.protocol import Engine
from headrace.engines.remote.exposition import EngineFigures
from headrace.errors import RemoteFailure
from headrace.routing.decide import ReplicaView
from headrace.routing.health import Health
from headrace.routing.prompt_rate import learned_rate

ReplicaSource = Literal["config", "dns", "file", "admin"]
LEAST_WINDOWS: Final = 120
"""Windows in which the least times are looked for: what the engine does when it has little to do."""


class Attempt(Protocol):
    """A request that a replica has."""

    @property
    def streaming(self) -> bool:
        """Whether a first token has come."""

    def break_off(self, failure: RemoteFailure) -> None:
        """End it as if the engine had."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Where a replica is and what was said of it; ``url`` empty: the embedded engine."""

    name: str
    url: str = ""
    zone: str | None = None
    weight: float = 1.0
    draining: bool = False
    source: ReplicaSource = "config"


@dataclass(slots=True)
class _Window:
    peak: int = 0
    gap_s: float = 0.0
    gap_tokens: int = 0
    ttft_ratios: list[float] = field(default_factory=list)
    ttft_target_s: float | None = None
    itl_target_s: float | None = None


class Replica:
    """``clock`` is monotonic seconds. Counts are changed by whoever runs requests (``fleet.attempt``)."""

    def __init__(
        self,
        spec: ReplicaSpec,
        engine: Engine,
        health: Health,
        bounds: LimitBounds,
        *,
        clock: Callable[[], float],
        stale_s: float,
    ) -> None:
        self.spec = spec
        self.engine = engine
        self.health = health
        self.bounds = bounds
        self.limit = bounds.most
        self.limit_reason = "unchanged"
        self.max_context_tokens = 0
        self.attempts: set[Attempt] = set()
        self.breakers: dict[str, Breaker] = {}
        self.waiting_tokens = 0
        self.prefill_tokens_per_s = 0.0
        self.removed = False
        self.reserved = 0
        """Places given to requests that have not begun yet."""
        self._clock = clock
        self._stale_s = stale_s
        self._figures: EngineFigures | None = None
        self._figures_at_s = 0.0
        self._window = _Window()
        self._itls_s: deque[float] = deque(maxlen=LEAST_WINDOWS)
        self._ttfts_s: deque[float] = deque(maxlen=LEAST_WINDOWS)
        self._busy_until_s = 0.0
        self._emptied = asyncio.Event()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def in_flight(self) -> int:
        """Requests that it has, or that are on their way to it."""
        return len(self.attempts) + self.reserved

    @property
    def figures(self) -> EngineFigures | None:
        """What the engine's metrics said, or None once that is older than the configured time: what is old reads
        neither as full nor as idle, it is not known."""
        if self._figures is None or self._clock() - self._figures_at_s > self._stale_s:
            return None
        return self._figures

    def scraped(self, figures: EngineFigures) -> None:
        self._figures, self._figures_at_s = figures, self._clock()

    def breaker(self, lane: str, config: BreakerConfig) -> Breaker:
        """The lane's breaker here; made anew when its settings changed."""
        found = self.breakers.get(lane)
        if found is None or found.config != config:
            found = self.breakers[lane] = Breaker(config)
        return found

    def places(self) -> int:
        """How many requests it may have now: the limit, less while a breaker is not closed, none while it said that it
        has no room."""
        if self._clock() < self._busy_until_s:
            return min(self.in_flight, self.limit)
        caps = [breaker.cap for breaker in self.breakers.values() if breaker.cap is not None]
        return min([self.limit, *caps])

    def busy(self, for_s: float) -> None:
        """It said that it has no room: it gets no more for a moment, and its limit is what it had."""
        self._busy_until_s = self._clock() + for_s
        self.limit = max(self.bounds.least, min(self.limit, self.in_flight - 1))

    def view(self, *, admits: bool, last_resort: bool = False) -> ReplicaView:
        """What routing sees. ``last_resort``: nothing but places and health counts."""
        figures, now_s = self.figures, self._clock()
        return ReplicaView(
            name=self.name,
            zone=self.spec.zone,
            weight=self.spec.weight,
            healthy=self.engine.ready is not None and self.health.healthy(now_s),
            draining=self.spec.draining or self.removed,
            admits=admits or last_resort,
            in_flight=self.in_flight,
            limit=self.places(),
            max_context_tokens=self.max_context_tokens,
            waiting_tokens=self.waiting_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            kv_share=None if figures is None else figures.kv_share,
        )

    def began(self, attempt: Attempt, prompt_tokens: int, targets: ReplicaTargets) -> None:
        """A request goes to it."""
        self.attempts.add(attempt)
        self.waiting_tokens += prompt_tokens
        self.health.sent(self._clock())
        window = self._window
        window.peak = max(window.peak, self.in_flight)
        window.ttft_target_s = _least(window.ttft_target_s, targets.ttft_s)
        window.itl_target_s = _least(window.itl_target_s, targets.itl_s)

    def answered(self, prompt_tokens: int, computed_tokens: int, ttft_s: float, target_s: float | None) -> None:
        """A first token came after ``ttft_s``, of a lane with this target (None: without one)."""
        self.waiting_tokens -= prompt_tokens
        if target_s is not None:
            self._window.ttft_ratios.append(ttft_s / target_s)
        self.health.progressed(self._clock(), began=True)
        self.prefill_tokens_per_s = learned_rate(self.prefill_tokens_per_s, computed_tokens, ttft_s)

    def generated(self, tokens: int, gap_s: float, now_s: float) -> None:
        """Tokens came ``gap_s`` after those before."""
        window = self._window
        window.gap_s += gap_s
        window.gap_tokens += tokens
        self.health.progressed(now_s)

    def ended(self, attempt: Attempt, prompt_tokens_unanswered: int) -> None:
        """A request has left it."""
        self.attempts.discard(attempt)
        self.waiting_tokens -= prompt_tokens_unanswered
        if not self.in_flight:
            self._emptied.set()

    async def empty(self) -> None:
        """Wait until it has no request; only once it gets no more."""
        while self.in_flight:
            self._emptied.clear()
            await self._emptied.wait()

    def next_window(self) -> LimitDecision:
        """A window has ended: the limit follows what it showed."""
        window, self._window = self._window, _Window(peak=self.in_flight)
        self._window.ttft_target_s, self._window.itl_target_s = (
            (window.ttft_target_s, window.itl_target_s) if self.in_flight else (None, None)
        )
        figures = self.figures
        itl_s = window.gap_s / window.gap_tokens if window.gap_tokens else None
        ttft_s = None
        if window.ttft_ratios and window.ttft_target_s is not None:
            # As if all lanes had the strictest target.
            ttft_s = p99(window.ttft_ratios) * window.ttft_target_s
        if itl_s is not None:
            self._itls_s.append(itl_s)
        if ttft_s is not None:
            self._ttfts_s.append(ttft_s)
        decision = next_limit(
            self.limit,
            ReplicaWindow(
                peak=window.peak,
                itl_s=itl_s,
                ttft_s=ttft_s,
                engine_waiting=None if figures is None else figures.waiting,
                least_itl_s=min(self._itls_s, default=None),
                least_ttft_s=min(self._ttfts_s, default=None),
            ),
            ReplicaTargets(window.ttft_target_s, window.itl_target_s),
            self.bounds,
        )
        self.limit, self.limit_reason = decision.limit, decision.reason
        return decision

    def break_off(self, failure: RemoteFailure, *, streaming: bool | None = None) -> int:
        """End its requests, or only those that stream already (or do not yet), so that they are tried elsewhere."""
        broken = [attempt for attempt in self.attempts if streaming is None or attempt.streaming is streaming]
        for attempt in broken:
            attempt.break_off(failure)
        return len(broken)

    def check_integrity(self) -> None:
        """Raise AssertionError unless what it counts is possible."""
        assert self.reserved >= 0, f"{self.name}: {self.reserved} places reserved"
        assert self.waiting_tokens >= 0, f"{self.name}: {self.waiting_tokens} tokens wait"
        assert self.attempts or self.waiting_tokens == 0, f"{self.name}: tokens wait without a request"
        assert self.bounds.least <= self.limit <= self.bounds.most, f"{self.name}: limit {self.limit}"


def _least(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)
