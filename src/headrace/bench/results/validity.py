"""Whether the generator did what it was asked to: if it did not, the run's figures are not the server's.

**Send lag.** The limit is 10 ms at the p99 unless told otherwise. (The other rule in use, a tenth of the mean gap
between requests, would be 0.1 ms at 1,000 requests/s, below what timers resolve, and 100 ms at one request a
second, which is as much as a whole SLO. What lateness does to a latency does not depend on the rate.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.bench.records import GENERATOR_FAULT, GeneratorHealth, RequestRecord

SEND_LAG_LIMIT_S = 0.010
CPU_SHARE_LIMIT = 0.9
"""One thread sends: near a whole core it has no room left."""


@dataclass(frozen=True)
class Validity:
    """``reasons`` are sentences, empty for a valid run. ``send_lag_p99_s`` (nearest rank, of all requests that were
    sent) is None when nothing was sent. ``send_lag_limit_s`` is what it was held against."""

    reasons: tuple[str, ...]
    send_lag_p99_s: float | None
    send_lag_limit_s: float

    @property
    def valid(self) -> bool:
        return not self.reasons


def validity(
    records: Iterable[RequestRecord],
    health: GeneratorHealth,
    send_lag_limit_s: float = SEND_LAG_LIMIT_S,
    cpu_share_limit: float = CPU_SHARE_LIMIT,
) -> Validity:
    """What speaks against the run's figures. The event loop's lag is held against the send lag's limit: reading
    late is as wrong as sending late."""
    lags_ns: list[int] = []
    own_failures = 0
    example = ""
    for record in records:
        if record.sent_ns is not None:
            lags_ns.append(record.sent_ns - record.ready_ns)
        if record.error is not None and record.error.startswith(GENERATOR_FAULT):
            own_failures += 1
            example = example or record.error.removeprefix(GENERATOR_FAULT)
    lags_ns.sort()
    lag_s = lags_ns[-(-99 * len(lags_ns) // 100) - 1] / 1e9 if lags_ns else None
    faults = generator_faults(
        lag_s,
        health,
        own_failures=own_failures,
        example=example,
        send_lag_limit_s=send_lag_limit_s,
        cpu_share_limit=cpu_share_limit,
    )
    reasons = faults if lag_s is not None else ("nothing was sent", *faults)
    return Validity(reasons, lag_s, send_lag_limit_s)


def generator_faults(
    lag_p99_s: float | None,
    health: GeneratorHealth,
    *,
    own_failures: int = 0,
    example: str = "",
    send_lag_limit_s: float = SEND_LAG_LIMIT_S,
    cpu_share_limit: float = CPU_SHARE_LIMIT,
) -> tuple[str, ...]:
    """The sentences that speak against the generator. ``lag_p99_s``: the send lag's p99, None when nothing was sent;
    ``own_failures``: requests that failed because of its machine, ``example`` what one of them said."""
    limit = f"{send_lag_limit_s * 1e3:.3g} ms"
    reasons: list[str] = []
    if lag_p99_s is not None and lag_p99_s > send_lag_limit_s:
        reasons.append(
            f"the generator sent late: send lag p99 {lag_p99_s * 1e3:.3g} ms, limit {limit}. Use fewer requests per "
            "second, or give the generator a core of its own"
        )
    if health.loop_lag_p99_s > send_lag_limit_s:
        reasons.append(
            f"the generator read late: its event loop's lag has a p99 of {health.loop_lag_p99_s * 1e3:.3g} ms, "
            f"limit {limit}"
        )
    if health.cpu_share > cpu_share_limit:
        reasons.append(
            f"the generator used {health.cpu_share:.0%} of a core, limit {cpu_share_limit:.0%}: it may itself have "
            "been what was slow"
        )
    if own_failures:
        reasons.append(f"{own_failures} requests failed because of the generator's machine: {example}")
    return tuple(reasons)
