"""What the runs say, all rounds of a server, rate and class of requests in one row."""

from __future__ import annotations

from benchmarks.peers.pool import Pool
from headrace.bench.report.units import show_number, show_seconds, show_share

COLUMNS = [
    "load",
    "server",
    "class",
    "offered",
    "TTFT p50",
    "p90",
    "p99",
    "E2E p50",
    "p90",
    "p99",
    "shed",
    "attainment",
    "goodput/s",
    "tok/s",
]


def cells(pool: Pool) -> list[str]:
    """The columns from ``offered`` on."""
    return [
        str(pool.offered),
        *[show_seconds(pool.percentile_s("ttft_s", name)) for name in ("p50", "p90", "p99")],
        *[show_seconds(pool.percentile_s("e2e_s", name)) for name in ("p50", "p90", "p99")],
        show_share(pool.shed_share),
        show_share(pool.attainment),
        show_number(pool.goodput_rps),
        show_number(pool.tokens_per_s),
    ]
