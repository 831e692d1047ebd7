"""From one record's time stamps to its latencies, in seconds.

Words as in DESIGN: TTFT is the time to the first content, E2E the time to the last content, TPOT
(E2E - TTFT) / (n - 1) for n >= 2 output tokens, NTPOT (normalised time per output token) E2E / n. TTFT and E2E
exist twice: from the moment of sending, and from the moment at which the schedule wanted the request sent
(``_from_due``); the second one contains whatever kept the request from being sent, so a generator that waits
for a slow server cannot hide that server's slowness (no coordinated omission).

E2E ends with the last chunk that has content, not with the last byte: a server that sends usage or closes the
stream late has not generated longer. An answer whose text came in no chunk at all ends with its last byte.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.bench.records import RequestRecord

_NS = 1_000_000_000


class Latencies(NamedTuple):
    """Seconds; None where the record has no such moment. ``send_lag_s`` is the generator's own delay."""

    send_lag_s: float | None
    ttft_s: float | None
    ttft_from_due_s: float | None
    tpot_s: float | None
    ntpot_s: float | None
    e2e_s: float | None
    e2e_from_due_s: float | None


def latencies(record: RequestRecord) -> Latencies:
    """The record's latencies, whatever its outcome: a cut stream has a TTFT, and an E2E up to where it was cut."""
    sent, first, tokens = record.sent_ns, record.first_ns, record.output_tokens
    if sent is None:
        return Latencies(None, None, None, None, None, None, None)
    last = last_content_ns(record)
    return Latencies(
        send_lag_s=(sent - record.ready_ns) / _NS,
        ttft_s=None if first is None else (first - sent) / _NS,
        ttft_from_due_s=None if first is None else (first - record.due_ns) / _NS,
        tpot_s=None if first is None or last is None or tokens < 2 else (last - first) / (tokens - 1) / _NS,
        ntpot_s=None if last is None or tokens < 1 else (last - sent) / tokens / _NS,
        e2e_s=None if last is None else (last - sent) / _NS,
        e2e_from_due_s=None if last is None else (last - record.due_ns) / _NS,
    )


def last_content_ns(record: RequestRecord) -> int | None:
    """When the last chunk with content came; the end where there was none."""
    return record.chunk_ns[-1] if record.chunk_ns else record.end_ns
