"""Records whose figures can be worked out by hand, and synthetic runs for the parts that need many."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.bench.records import GeneratorHealth, Outcome, RequestRecord, RunInfo

HEALTHY = GeneratorHealth(cpu_share=0.2, loop_lag_p99_s=0.001, peak_in_flight=10)


def run_info(**changes: Any) -> RunInfo:
    """A run of 10 s without warm-up and without SLO, unless ``changes`` say otherwise."""
    fields: dict[str, Any] = {
        "tool_version": "0.1.0",
        "target": "http://127.0.0.1:8000",
        "model": "m",
        "started_at": "2026-01-02T03:04:05+00:00",
        "duration_s": 10.0,
        "wall_s": 12.0,
        "warmup_s": 0.0,
        "seed": 7,
        "source": {"arrivals": "poisson(2)"},
        "slos": {},
        "health": HEALTHY,
    }
    return RunInfo(**(fields | changes))


def ms(value: float) -> int:
    """Milliseconds as nanoseconds."""
    return round(value * 1_000_000)


def answered(
    index: int,
    due_ms: float,
    *,
    ttft_ms: float,
    gaps_ms: tuple[float, ...] = (),
    lag_ms: float = 0.0,
    after_ms: float = 0.0,
    class_name: str = "chat",
    **changes: Any,
) -> RequestRecord:
    """A request answered whole, one token a chunk: first token ``ttft_ms`` after it was sent, then the gaps; the
    last byte ``after_ms`` later."""
    sent = ms(due_ms + lag_ms)
    chunks = [sent + ms(ttft_ms)]
    for gap_ms in gaps_ms:
        chunks.append(chunks[-1] + ms(gap_ms))
    fields: dict[str, Any] = {
        "index": index,
        "class_name": class_name,
        "outcome": "ok",
        "due_ns": ms(due_ms),
        "ready_ns": ms(due_ms),
        "sent_ns": sent,
        "headers_ns": sent + 1,
        "first_ns": chunks[0],
        "chunk_ns": chunks,
        "end_ns": chunks[-1] + ms(after_ms),
        "status": 200,
        "input_tokens": 10,
        "output_tokens": len(chunks),
        "usage_seen": True,
    }
    return RequestRecord(**(fields | changes))


def failed(
    index: int, due_ms: float, outcome: Outcome, *, end_ms: float | None = None, **changes: Any
) -> RequestRecord:
    """A request that got no token: it ended (``end_ms`` on the run's clock) with ``outcome``."""
    fields: dict[str, Any] = {
        "index": index,
        "class_name": "chat",
        "outcome": outcome,
        "due_ns": ms(due_ms),
        "ready_ns": ms(due_ms),
        "sent_ns": ms(due_ms),
        "end_ns": ms(due_ms + 1 if end_ms is None else end_ms),
        "input_tokens": 10,
    }
    return RequestRecord(**(fields | changes))


def synthetic_run(
    rng: np.random.Generator,
    *,
    rate_rps: float = 20.0,
    duration_s: float = 120.0,
    slowdown: float = 1.0,
    memory: float = 0.0,
    shed_share: float = 0.0,
    classes: dict[str, tuple[float, float, int]] | None = None,
    arrivals: np.random.Generator | None = None,
    **changes: Any,
) -> tuple[RunInfo, list[RequestRecord]]:
    """A run with log-normal latencies, those of neighbours alike by ``memory`` (the coefficient of a first-order
    autoregression of their logarithms).

    ``classes``: name -> (weight, median TTFT in s, output tokens). ``slowdown`` multiplies every latency.
    ``arrivals``: the source of due times and classes where two runs shall have the same load.
    """
    mix = classes or {"chat": (0.7, 0.2, 12), "docs": (0.3, 0.8, 30)}
    load = rng if arrivals is None else arrivals
    names, weights = list(mix), np.array([share for share, _, _ in mix.values()])
    due_s = np.cumsum(load.exponential(1 / rate_rps, size=round(rate_rps * duration_s * 1.2)))
    due_s = due_s[due_s < duration_s]
    chosen = load.choice(len(names), size=len(due_s), p=weights / weights.sum())
    noise = rng.normal(size=len(due_s))
    for i in range(1, len(noise)):
        noise[i] = memory * noise[i - 1] + np.sqrt(1 - memory**2) * noise[i]
    shed = rng.random(len(due_s)) < shed_share
    records = []
    for i, (due, which) in enumerate(zip(due_s, chosen, strict=True)):
        name = names[which]
        _, median_s, tokens = mix[name]
        if shed[i]:
            records.append(failed(i, due * 1e3, "shed", class_name=name, status=429, error="overloaded"))
            continue
        ttft_ms = 1e3 * slowdown * median_s * float(np.exp(0.4 * noise[i]))
        gaps_ms = tuple((25 * slowdown * np.exp(0.2 * rng.normal(size=tokens - 1))).tolist())
        records.append(answered(i, due * 1e3, ttft_ms=ttft_ms, gaps_ms=gaps_ms, lag_ms=0.2, class_name=name))
    info = run_info(duration_s=duration_s, wall_s=duration_s + 3, **changes)
    return info, records
