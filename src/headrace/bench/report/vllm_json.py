"""The same run in the shape that ``vllm bench serve --save-result --save-detailed`` writes.

For programs that read that file. It has vLLM's fields *and vLLM's definitions*, which are not ours: latencies
in milliseconds, interpolated percentiles of any sample however small, the standard deviation of a population,
latencies of completed requests only, tokens of completed requests over the time until the last one ended
(not: over the window), TPOT of single-token answers left out but good for goodput. An ITL is a gap between two
chunks, whatever number of tokens is in them. Ours is in the summary.

The requests are the ones that ours counts: legal, offered, due after the warm-up.
"""

from __future__ import annotations

import math
from datetime import datetime

import numpy as np

from headrace.bench.results.columns import OUTCOMES, BoolArray, Columns
from headrace.bench.results.summary import measured_window
from headrace.bench.statistics.quantiles import FloatArray

_PERCENTILES = (50, 90, 95, 99)


def vllm_result(columns: Columns, *, detailed: bool = False, burstiness: float | None = None) -> dict[str, object]:
    """The result as a JSON object. ``detailed`` adds the per-request lists (``--save-detailed``).

    ``burstiness``: the arrivals' gamma shape where the caller knows it. Generated texts are not kept by a
    run, so ``generated_texts`` holds empty strings; ``errors`` holds outcomes.
    """
    info = columns.info
    window = measured_window(info)
    offered = columns.measured & columns.offered
    ok = offered & columns.outcome("ok") & ~np.isnan(columns.times["ttft_s"])
    ends = columns.times["end_s"][offered]
    last_end_s = float(np.nanmax(ends)) if (~np.isnan(ends)).any() else window.end_s
    duration_s = max(last_end_s - window.start_s, 1e-9)
    completed, count = int(ok.sum()), int(offered.sum())
    total_input = int(columns.input_tokens[ok].sum())
    total_output = int(columns.output_tokens[ok].sum())
    good = int((offered & columns.good).sum())
    gaps = _chunk_gaps(columns, offered)
    result: dict[str, object] = {
        "date": _date(info.started_at),
        "endpoint_type": "openai-chat",
        "backend": "openai-chat",
        "label": info.label or None,
        "model_id": info.model,
        "tokenizer_id": None,
        "num_prompts": count,
        "request_rate": "inf" if info.concurrency is not None else count / window.length_s,
        "burstiness": burstiness,
        "max_concurrency": info.concurrency,
        "duration": duration_s,
        "completed": completed,
        "failed": count - completed,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": completed / duration_s,
        "request_goodput": good / duration_s if info.slos else None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "max_output_tokens_per_s": _peak_tokens_per_s(columns, ok),
        "max_concurrent_requests": _peak_concurrency(columns, ok),
    }
    pooled = [gap for gap, is_ok in zip(gaps, ok[offered], strict=True) if is_ok]
    result |= _statistics("ttft", columns.times["ttft_s"][ok])
    tpot = columns.times["tpot_s"][ok]
    result |= _statistics("tpot", tpot[~np.isnan(tpot)])
    result |= _statistics("itl", np.concatenate(pooled) if pooled else np.empty(0))
    result |= _statistics("e2el", columns.times["e2e_s"][ok])
    if detailed:
        result |= _details(columns, offered, ok, gaps)
    return result


def _statistics(name: str, values_s: FloatArray) -> dict[str, object]:
    """vLLM says 0 of nothing."""
    values_ms = values_s * 1e3 if len(values_s) else np.zeros(1)
    figures: dict[str, object] = {
        f"mean_{name}_ms": float(values_ms.mean()),
        f"median_{name}_ms": float(np.median(values_ms)),
        f"std_{name}_ms": float(values_ms.std()),
    }
    for q in _PERCENTILES:
        figures[f"p{q}_{name}_ms"] = float(np.percentile(values_ms, q))
    return figures


def _details(columns: Columns, offered: BoolArray, ok: BoolArray, gaps: list[FloatArray]) -> dict[str, object]:
    outcomes = [OUTCOMES[i] for i in columns.outcome_ids[offered]]
    ttfts = np.nan_to_num(columns.times["ttft_s"][offered])
    return {
        "input_lens": columns.input_tokens[offered].tolist(),
        "output_lens": np.where(ok, columns.output_tokens, 0)[offered].tolist(),
        "ttfts": ttfts.tolist(),
        "itls": [gap.tolist() for gap in gaps],
        "start_times": np.nan_to_num(columns.times["sent_s"][offered]).tolist(),
        "generated_texts": [""] * len(outcomes),
        "errors": ["" if name == "ok" else name for name in outcomes],
    }


def _chunk_gaps(columns: Columns, chosen: BoolArray) -> list[FloatArray]:
    """Gaps between chunks, seconds, one array per chosen request."""
    starts, ends = columns.chunk_starts[:-1][chosen], columns.chunk_starts[1:][chosen]
    return [np.diff(columns.chunk_ns[start:end]) / 1e9 for start, end in zip(starts, ends, strict=True)]


def _peak_tokens_per_s(columns: Columns, ok: BoolArray) -> float:
    """The most content chunks of completed requests in one second, as vLLM counts its peak."""
    times_s = columns.chunk_ns[np.repeat(ok, np.diff(columns.chunk_starts))] / 1e9
    if not len(times_s):
        return 0.0
    origin_s = columns.times["sent_s"][ok].min()
    return float(np.bincount((times_s - origin_s).astype(np.int64)).max())


def _peak_concurrency(columns: Columns, ok: BoolArray) -> int:
    """The most completed requests that were under way in one second, both of its ends included."""
    if not ok.any():
        return 0
    sent_s, end_s = columns.times["sent_s"][ok], columns.times["end_s"][ok]
    origin_s = sent_s.min()
    steps = np.zeros(math.ceil(end_s.max() - origin_s) + 2, dtype=np.int64)
    np.add.at(steps, (sent_s - origin_s).astype(np.int64), 1)
    np.add.at(steps, (end_s - origin_s).astype(np.int64) + 1, -1)
    return int(np.cumsum(steps).max())


def _date(started_at: str) -> str:
    """vLLM's ``%Y%m%d-%H%M%S``; the text as it is where it is no ISO 8601 time."""
    try:
        return datetime.fromisoformat(started_at).strftime("%Y%m%d-%H%M%S")
    except ValueError:
        return started_at
