"""What one server did with one class of requests at one load: of one round, or of several together.

Rates are those of ``headrace bench`` (docs/bench.md): of the seconds in which requests were sent, the same for
every server. What is answered in the drain time after it counts for latencies and attainment, not for a rate: a
server that is behind is not credited with catching up, and one that has finished is not charged for waiting.

Tokens are prompt and output tokens of requests that were answered whole: a prompt's count when its first token
comes, an output token when it arrives. A prompt counts whole even where a server had its beginning in a prefix
cache: not having to compute it is that server's merit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.bench.records import RequestRecord
from headrace.bench.results.figures import Group
from headrace.bench.results.latencies import latencies
from headrace.bench.statistics.intervals import CONFIDENCE, two_sided_z, wilson
from headrace.bench.statistics.quantiles import PERCENTILES, FloatArray, estimate, interval_ranks, percentile

Latency = Literal["ttft_s", "e2e_s"]

TIMEOUTS = frozenset({"timeout", "cancelled"})
"""Outcomes of requests that were still waiting when their limit, or the drain time, ended."""
ANSWERED_OR_SHED = frozenset({"ok", "shed"})


@dataclass(frozen=True)
class Pool:
    """One class of requests of one server at one load.

    ``seconds`` is how long requests were sent. ``outcomes`` counts the offered ones by outcome. ``good_in_time``:
    requests that met their SLO and ended within ``seconds``. ``ttft_s`` and ``e2e_s`` are those of requests that
    were answered whole, in any order.
    """

    seconds: float = 0.0
    offered: int = 0
    good: int = 0
    good_in_time: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    ttft_s: tuple[float, ...] = ()
    e2e_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, group: Group, records: Iterable[RequestRecord], seconds: float) -> Pool:
        """The figures of ``group``; ``records`` are the legal requests in it."""
        times = [latencies(record) for record in records if record.outcome == "ok" and record.first_ns is not None]
        return cls(
            seconds=seconds,
            offered=group.offered,
            good=group.good,
            good_in_time=group.goodput_rps * seconds,
            prompt_tokens=group.input_tokens_per_s * seconds,
            output_tokens=group.output_tokens_per_s * seconds,
            outcomes=Counter(group.outcomes),
            ttft_s=tuple([each.ttft_s for each in times if each.ttft_s is not None]),
            e2e_s=tuple([each.e2e_s for each in times if each.e2e_s is not None]),
        )

    @classmethod
    def together(cls, pools: Sequence[Pool]) -> Pool:
        """Several rounds as one."""
        return cls(
            seconds=sum(pool.seconds for pool in pools),
            offered=sum(pool.offered for pool in pools),
            good=sum(pool.good for pool in pools),
            good_in_time=sum(pool.good_in_time for pool in pools),
            prompt_tokens=sum(pool.prompt_tokens for pool in pools),
            output_tokens=sum(pool.output_tokens for pool in pools),
            outcomes=sum((pool.outcomes for pool in pools), Counter[str]()),
            ttft_s=tuple([value for pool in pools for value in pool.ttft_s]),
            e2e_s=tuple([value for pool in pools for value in pool.e2e_s]),
        )

    @property
    def answered(self) -> int:
        return len(self.e2e_s)

    @property
    def shed(self) -> int:
        return self.outcomes["shed"]

    @property
    def timeouts(self) -> int:
        return sum(self.outcomes[name] for name in TIMEOUTS)

    @property
    def errors(self) -> int:
        return sum(count for name, count in self.outcomes.items() if name not in TIMEOUTS | ANSWERED_OR_SHED)

    @property
    def attainment(self) -> float | None:
        return self.good / self.offered if self.offered else None

    @property
    def answered_share(self) -> float | None:
        return self.answered / self.offered if self.offered else None

    @property
    def shed_share(self) -> float | None:
        return self.shed / self.offered if self.offered else None

    @property
    def goodput_rps(self) -> float | None:
        return self.good_in_time / self.seconds if self.seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        return (self.prompt_tokens + self.output_tokens) / self.seconds if self.seconds else None

    @property
    def output_tokens_per_s(self) -> float | None:
        return self.output_tokens / self.seconds if self.seconds else None

    @property
    def e2e_mean_s(self) -> float | None:
        return float(np.mean(self.e2e_s)) if self.e2e_s else None

    def supports(self, name: str) -> bool:
        """Whether enough requests were answered to bound the percentile (``quantiles`` has the rule)."""
        return bool(self.answered) and interval_ranks(self.answered, PERCENTILES[name]) is not None

    def percentile_s(self, latency: Latency, name: str) -> float | None:
        """None where the answered requests cannot support it."""
        values = self._ordered(latency)
        found = estimate(values, PERCENTILES[name]) if len(values) else None
        return None if found is None else found.value

    def observed_s(self, latency: Latency, name: str) -> float | None:
        """The sample's own percentile, supported or not: for the spread between rounds. None of nothing."""
        values = self._ordered(latency)
        return percentile(values, PERCENTILES[name]) if len(values) else None

    def plain(self) -> dict[str, object]:
        """For JSON."""
        z = two_sided_z(CONFIDENCE)
        interval = wilson(self.good, self.offered, z) if self.offered else None
        percentiles = ("p50", "p90", "p95", "p99")
        return {
            "seconds": self.seconds,
            "offered": self.offered,
            "answered": self.answered,
            "shed": self.shed,
            "timeouts": self.timeouts,
            "errors": self.errors,
            "outcomes": dict(self.outcomes),
            **{f"ttft_{name}_s": self.percentile_s("ttft_s", name) for name in percentiles},
            **{f"e2e_{name}_s": self.percentile_s("e2e_s", name) for name in percentiles},
            "e2e_mean_s": self.e2e_mean_s,
            "attainment": self.attainment,
            "attainment_low": interval.low if interval else None,
            "attainment_high": interval.high if interval else None,
            "goodput_rps": self.goodput_rps,
            "tokens_per_s": self.tokens_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
        }

    def _ordered(self, latency: Latency) -> FloatArray:
        return np.sort(np.asarray(getattr(self, latency), np.float64))
