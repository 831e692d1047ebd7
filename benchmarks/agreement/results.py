"""What both tools wrote about a run, as figures under one name each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.bench.truth_server import Told

HEADRACE_FOLDER = "headrace"
GUIDELLM_FILE = "guidellm.json"
SERVED_FILE = "served-{tool}.json"
"""The server's own figures of a tool's run."""

QUANTILES = (50, 90, 99)

Figures = dict[str, float]
"""By name: ``TTFT p50`` and so on, latencies in milliseconds."""

_HEADRACE_LATENCIES = {
    "TTFT": "ttft_s",
    "TPOT": "tpot_s",
    "NTPOT": "ntpot_s",
    "E2E": "e2e_s",
    "E2E from due": "e2e_from_due_s",
    "send lag": "send_lag_s",
}
_GUIDELLM_LATENCIES = {
    "TTFT": ("time_to_first_token_ms", 1.0),
    "TPOT": ("inter_token_latency_ms", 1.0),
    "NTPOT": ("time_per_output_token_ms", 1.0),
    "E2E": ("request_latency", 1e3),
    "E2E from due": ("request_scheduled_latency", 1e3),
    "send lag": ("request_dispatch_delay", 1e3),
}


_SAMPLE = re.compile(r"(?P<name>headrace_(?:ttft|tpot|e2e)_seconds_(?:sum|count))(?:\{[^}]*\})? (?P<value>\S+)$")


def headrace_figures(folder: Path) -> Figures:
    """From the folder of ``headrace bench run``. Percentiles that the sample does not support are absent."""
    summary = _read(folder / "summary.json")
    by_vllm = _read(folder / "vllm.json")
    whole = summary["whole"]
    figures: Figures = {}
    for name, key in _HEADRACE_LATENCIES.items():
        spread = whole["latencies"][key]
        figures[f"{name} mean"] = spread["mean"] * 1e3
        for q in QUANTILES:
            if spread["percentiles"][f"p{q}"] is not None:
                figures[f"{name} p{q}"] = spread["percentiles"][f"p{q}"]["value"] * 1e3
    answered = by_vllm["completed"]
    return figures | {
        "answered": answered,
        "prompt tokens": by_vllm["total_input_tokens"] / answered,
        "output tokens": by_vllm["total_output_tokens"] / answered,
        "requests/s": by_vllm["request_throughput"],
        "output tokens/s": by_vllm["output_throughput"],
        "requests/s in the window": whole["completed_rps"],
        "output tokens/s in the window": whole["output_tokens_per_s"],
    }


def guidellm_figures(path: Path) -> Figures:
    """From GuideLLM's JSON."""
    metrics = _read(path)["benchmarks"][0]["metrics"]
    figures: Figures = {}
    for name, (key, to_ms) in _GUIDELLM_LATENCIES.items():
        spread = metrics[key]["successful"]
        figures[f"{name} mean"] = spread["mean"] * to_ms
        for q in QUANTILES:
            figures[f"{name} p{q}"] = spread["percentiles"][f"p{q}"] * to_ms
    return figures | {
        "answered": metrics["request_totals"]["successful"],
        "prompt tokens": metrics["prompt_token_count"]["successful"]["mean"],
        "output tokens": metrics["output_token_count"]["successful"]["mean"],
        "requests/s": metrics["requests_per_second"]["successful"]["mean"],
        "output tokens/s": metrics["output_tokens_per_second"]["successful"]["mean"],
    }


def told_figures(told: Sequence[Told]) -> Figures:
    """What the truth server did: from a request's first byte to the write of each chunk. A client that measures
    without error reads this plus the way there and back. All requests have the same number of tokens."""
    first = np.array([one.first_byte_ns for one in told]) / 1e6
    chunks = np.array([one.chunk_ns for one in told]) / 1e6
    tokens = chunks.shape[1]
    latencies = {
        "TTFT": chunks[:, 0] - first,
        "TPOT": (chunks[:, -1] - chunks[:, 0]) / (tokens - 1),
        "NTPOT": (chunks[:, -1] - first) / tokens,
        "E2E": chunks[:, -1] - first,
    }
    figures: Figures = {"connections": len({one.connection for one in told}), "answered": len(told)}
    for name, values in latencies.items():
        figures[f"{name} mean"] = float(values.mean())
        for q in QUANTILES:
            figures[f"{name} p{q}"] = float(np.percentile(values, q, method="inverted_cdf"))
    return figures


def exposed_figures(metrics: str) -> Figures:
    """What headrace's own metrics say of all requests since it started: means, since its histograms are coarse."""
    sums: dict[str, float] = defaultdict(float)
    for line in metrics.splitlines():
        found = _SAMPLE.match(line)
        if found:
            sums[found["name"]] += float(found["value"])
    figures: Figures = {"answered": sums["headrace_e2e_seconds_count"]}
    for name, metric in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e")):
        family = f"headrace_{metric}_seconds"
        figures[f"{name} mean"] = sums[f"{family}_sum"] / sums[f"{family}_count"] * 1e3
    return figures


def read_figures(path: Path) -> Figures:
    """Figures that were saved."""
    return msgspec.json.decode(path.read_bytes(), type=Figures)


def rounds(folder: Path) -> Sequence[Path]:
    """The rounds of a comparison, in order. Raises SystemExit when there is none."""
    found = sorted(folder.glob("round-*"), key=lambda path: int(path.name.removeprefix("round-")))
    if not found:
        raise SystemExit(f"{folder} holds no rounds")
    return found


def _read(path: Path) -> dict[str, Any]:
    contents: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return contents
