"""A real vLLM on an RTX 4090, replayed: 300 ShareGPT requests at about 10 a second on Llama-3.1-8B, 2,588 KV blocks.

The measured run and the profile of its layers' kernels are LLMServingSim's (vLLM 0.19). Requests come at the times at
which vLLM queued them, with their real lengths; scheduling is ``benchmarks.paged_replay``; a pass takes what its
kernels were measured to take, and nothing is fitted. The yardstick: mean and p99 of TTFT, TPOT and latency within 5 %.
A second line takes passes by their sums alone, as the simulator's engine knows them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.harness import report
from benchmarks.paged_replay import Limits, Replayed, replay
from headrace.simulate.hardware.layer_profile import LayerProfile
from headrace.simulate.hardware.work import Work

RUN = "llmservingsim/RTX4090/Llama-3.1-8B/vllm/requests.jsonl"
PROFILE = "llmservingsim/profile-RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1"
BLOCKS, LAYERS, BOUND = 2588, 32, 0.05
FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.mean,
    "p50": lambda values: quantile(values, 0.5),
    "p90": lambda values: quantile(values, 0.9),
    "p99": lambda values: quantile(values, 0.99),
}
Times = tuple[float, float, float]
"""TTFT, TPOT and latency, seconds."""


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between order statistics, as the published summary has it."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def real_run(path: Path) -> tuple[list[Replayed], list[Times]]:
    """The requests, and what vLLM made of them."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first_s = min([line["queued_ts"] for line in lines])
    requests = [
        Replayed(line["request_id"], line["queued_ts"] - first_s, line["input_toks"], line["output_toks"])
        for line in lines
    ]
    return requests, [
        _times(line["queued_ts"], line["first_token_ts"], line["last_token_ts"], line["output_toks"]) for line in lines
    ]


def simulated(requests: Sequence[Replayed], blocks: int, pass_s: Callable[[Work], float]) -> tuple[list[Times], int]:
    """What the simulator makes of them, and how many were preempted."""
    preemptions = replay(requests, Limits(blocks), pass_s)
    return [
        _times(request.arrived_s, request.first_token_s, request.last_token_s, request.output_tokens)
        for request in requests
    ], preemptions


def compared(real: Sequence[Times], seen: Sequence[Times]) -> list[tuple[str, str, float, float]]:
    """(what, which figure, real, simulated)."""
    return [
        (name, figure, of([times[place] for times in real]), of([times[place] for times in seen]))
        for place, name in enumerate(("TTFT", "TPOT", "latency"))
        for figure, of in FIGURES.items()
    ]


def _times(arrived_s: float, first_s: float, last_s: float, tokens: int) -> Times:
    return first_s - arrived_s, (last_s - first_s) / max(1, tokens - 1), last_s - arrived_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with llmservingsim/")
    options = parser.parse_args()
    times = LayerProfile(options.data / PROFILE, layers=LAYERS)

    def by_sums(work: Work) -> float:
        return times.call_s(work.rows, work.context_tokens, sum([chunk.pairs for chunk in work.chunks]))

    rows, data = [], {}
    for name, blocks, pass_s in (
        ("whole passes", BLOCKS, times.pass_s),
        ("sums alone", BLOCKS, by_sums),
        ("3,400 blocks", 3400, times.pass_s),
    ):
        requests, real = real_run(options.data / RUN)
        seen, preemptions = simulated(requests, blocks, pass_s)
        found = compared(real, seen)
        for what, figure, measured, made in found:
            within = (
                ""
                if figure not in ("mean", "p99") or blocks != BLOCKS
                else ("yes" if abs(made / measured - 1) <= BOUND else "NO")
            )
            rows.append([name, what, figure, f"{measured:.4f}", f"{made:.4f}", f"{made / measured - 1:+.1%}", within])
        data[name] = {
            "preemptions": preemptions,
            "figures": [
                {"what": what, "figure": figure, "real_s": measured, "simulated_s": made, "error": made / measured - 1}
                for what, figure, measured, made in found
            ],
        }
    report(
        "sim_fidelity_vllm",
        f"python -m benchmarks.sim_fidelity_vllm --data {options.data}",
        ["passes", "", "figure", "vLLM, s", "simulated, s", "error", "within 5 %"],
        rows,
        data,
    )


if __name__ == "__main__":
    main()
