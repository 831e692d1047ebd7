"""What the peers' runs say, pooled over rounds: a row for each server, rate and lane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.bench.planned import SloTarget
from headrace.bench.records import RequestRecord
from headrace.bench.report.units import show_number, show_seconds, show_share
from headrace.bench.results.judge import judge
from headrace.bench.results.latencies import latencies
from headrace.bench.statistics.intervals import CONFIDENCE, two_sided_z, wilson
from headrace.bench.statistics.quantiles import PERCENTILES, estimate

COLUMNS = [
    "load",
    "server",
    "lane",
    "offered",
    "TTFT p50",
    "p90",
    "p99",
    "E2E p50",
    "p90",
    "p99",
    "attainment",
    "goodput/s",
    "tok/s",
]


@dataclass
class Pool:
    """One lane of one server at one load, over all rounds. ``tokens`` counts prompt and output tokens of answered
    requests; ``seconds`` is the time from the first request to the last answer, summed."""

    offered: int = 0
    good: int = 0
    tokens: int = 0
    seconds: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    e2e_s: list[float] = field(default_factory=list)

    def add(self, records: Iterable[RequestRecord], slo: SloTarget | None) -> None:
        """Take in one round's records of this lane."""
        for record in records:
            verdict = judge(record, slo).verdict
            if verdict == "not_offered":
                continue
            self.offered += 1
            self.good += verdict == "good"
            times = latencies(record)
            if record.outcome == "ok" and times.ttft_s is not None and times.e2e_s is not None:
                self.ttft_s.append(times.ttft_s)
                self.e2e_s.append(times.e2e_s)
                self.tokens += (record.prompt_tokens or record.input_tokens) + record.output_tokens

    def percentile_s(self, values: Sequence[float], name: str) -> float | None:
        """None where the sample cannot support it."""
        found = estimate(np.sort(np.asarray(values, np.float64)), PERCENTILES[name]) if values else None
        return None if found is None else found.value

    def plain(self) -> dict[str, object]:
        """For JSON."""
        z = two_sided_z(CONFIDENCE)
        interval = wilson(self.good, self.offered, z) if self.offered else None
        return {
            "offered": self.offered,
            "answered": len(self.e2e_s),
            **{f"ttft_{name}_s": self.percentile_s(self.ttft_s, name) for name in ("p50", "p90", "p99")},
            **{f"e2e_{name}_s": self.percentile_s(self.e2e_s, name) for name in ("p50", "p90", "p99")},
            "e2e_mean_s": float(np.mean(self.e2e_s)) if self.e2e_s else None,
            "attainment": self.good / self.offered if self.offered else None,
            "attainment_low": interval.low if interval else None,
            "attainment_high": interval.high if interval else None,
            "goodput_rps": self.good / self.seconds if self.seconds else None,
            "tokens_per_s": self.tokens / self.seconds if self.seconds else None,
        }

    def cells(self) -> list[str]:
        """For a table."""
        return [
            str(self.offered),
            *[show_seconds(self.percentile_s(self.ttft_s, name)) for name in ("p50", "p90", "p99")],
            *[show_seconds(self.percentile_s(self.e2e_s, name)) for name in ("p50", "p90", "p99")],
            show_share(self.good / self.offered if self.offered else None),
            show_number(self.good / self.seconds if self.seconds else None),
            show_number(self.tokens / self.seconds if self.seconds else None),
        ]
