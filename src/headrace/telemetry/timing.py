"""When the tokens of one request came: kept cheaply while it runs, turned into metrics at its end."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

ITL_BUCKETS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0,
    2.0, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the ITL histogram; one more bucket counts everything beyond."""


@dataclass(slots=True)
class RequestTiming:
    """Times are seconds of the gateway's clock. A request may have several sequences (``n``, batches of
    prompts); gaps are measured within each and pooled."""

    arrived_s: float
    first_s: float | None = None
    last_s: float | None = None
    queue_wait_s: float | None = None
    tokens: int = 0
    gap_count: int = 0
    gap_tokens: int = 0
    gap_sum_s: float = 0.0
    gap_buckets: list[int] = field(default_factory=lambda: [0] * (len(ITL_BUCKETS_S) + 1))
    _last_by_sequence: dict[int, float] = field(default_factory=dict)

    def output(self, sequence: int, tokens: int, now_s: float) -> None:
        """One output of a sequence came, with ``tokens`` new tokens (0 when only text or an end came)."""
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        if tokens == 0:
            return
        self.tokens += tokens
        before_s = self._last_by_sequence.get(sequence)
        if before_s is not None:
            gap_s = now_s - before_s
            self.gap_count += 1
            self.gap_tokens += tokens
            self.gap_sum_s += gap_s
            self.gap_buckets[bisect_left(ITL_BUCKETS_S, gap_s)] += 1
        self._last_by_sequence[sequence] = now_s

    def restart(self) -> None:
        """Forget what came: the request is tried again from the beginning."""
        self.first_s = self.last_s = self.queue_wait_s = None
        self.tokens = self.gap_count = self.gap_tokens = 0
        self.gap_sum_s = 0.0
        self.gap_buckets = [0] * len(self.gap_buckets)
        self._last_by_sequence.clear()

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None with fewer than two tokens."""
        return self.gap_sum_s / self.gap_tokens if self.gap_tokens else None
