"""Rooflines against measured tables: Llama2-70b on A100 and H100, every row; and H200's kernels.

The table is splitwise-sim's (vLLM of 2023 by tensor parallelism 2, 4 and 8): prompt times and times between tokens.
The rooflines are the data sheets' with one calibration for each machine (``vllm-2023-a100``, ``vllm-2023-h100``); the
yardstick is 25 %. For comparison the same with headrace's default calibration, which knows nothing of that software.
A row that no hardware can reach (fewer milliseconds than its arithmetic takes at the full stated rate) is marked.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.harness import report
from headrace.plan.architectures import architecture_named
from headrace.simulate.hardware.efficiency import Efficiency, efficiency_named
from headrace.simulate.hardware.profiles import hardware_named
from headrace.simulate.hardware.roofline import Parallel, Roofline
from headrace.simulate.hardware.table_files import csv_rows
from headrace.simulate.hardware.work import Chunk, Work

MODEL, BOUND = "llama-2-70b", 0.25
MACHINES = {"a100-80gb": ("a100-80", "vllm-2023-a100"), "h100-80gb": ("h100", "vllm-2023-h100")}
Case = tuple[str, int, int, int, int]
"""Machine, ranks, prompt tokens, sequences, tokens of each answer."""


def measured(path: Path) -> dict[Case, tuple[float, float]]:
    """Medians of repetitions, milliseconds: of a batch's prompts, and between its tokens."""
    found: dict[Case, list[tuple[float, float]]] = {}
    columns = ("tensor_parallel", "prompt_size", "batch_size", "token_size", "prompt_time", "token_time")
    for values, (model, machine) in csv_rows(path, columns, ("model", "hardware")):
        if model == "llama2-70b" and machine in MACHINES:
            ranks, prompt, batch, tokens = [round(value) for value in values[:4]]
            found.setdefault((machine, ranks, prompt, batch, tokens), []).append((values[4], values[5]))
    return {
        case: (statistics.median([row[0] for row in rows]), statistics.median([row[1] for row in rows]))
        for case, rows in sorted(found.items())
    }


def predicted(case: Case, efficiency: Efficiency) -> tuple[float, float]:
    """The same by roofline, milliseconds; tokens at the middle of the answer."""
    machine, ranks, prompt, batch, tokens = case
    times = Roofline(
        hardware_named(MACHINES[machine][0]), architecture_named(MODEL), parallel=Parallel(ranks), efficiency=efficiency
    )
    prompts = Work(chunks=tuple([Chunk(0, prompt)] * batch))
    return 1e3 * times.pass_s(prompts), 1e3 * times.pass_s(Work(batch, batch * (prompt + tokens // 2)))


def impossible(case: Case, prompt_ms: float) -> bool:
    """Whether the prompts' arithmetic alone takes longer at the full rate."""
    machine, ranks, prompt, batch, _ = case
    hardware = hardware_named(MACHINES[machine][0])
    return 2 * 68e9 * prompt * batch / (ranks * hardware.flops_per_s["f16"]) > prompt_ms / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with splitwise-sim/")
    options = parser.parse_args()
    rows, data = [], []
    for case, (prompt_ms, token_ms) in measured(options.data / "splitwise-sim/perf_model.csv").items():
        made = predicted(case, efficiency_named(MACHINES[case[0]][1]))
        plain = predicted(case, Efficiency())
        errors = made[0] / prompt_ms - 1, made[1] / token_ms - 1
        note = "faster than its arithmetic" if impossible(case, prompt_ms) else ""
        beyond = [name for name, error in zip(("TTFT", "TBT"), errors, strict=True) if abs(error) > BOUND]
        rows.append(
            [
                case[0],
                *[str(value) for value in case[1:]],
                f"{prompt_ms:.1f}",
                f"{made[0]:.1f}",
                f"{errors[0]:+.0%}",
                f"{token_ms:.1f}",
                f"{made[1]:.1f}",
                f"{errors[1]:+.0%}",
                f"{plain[0] / prompt_ms - 1:+.0%} {plain[1] / token_ms - 1:+.0%}",
                ", ".join([*[f"{name} beyond 25 %" for name in beyond], *([note] if note else [])]),
            ]
        )
        data.append(
            {
                "case": case,
                "prompt_ms": prompt_ms,
                "token_ms": token_ms,
                "roofline_prompt_ms": made[0],
                "roofline_token_ms": made[1],
                "beyond": beyond,
                "impossible": bool(note),
            }
        )
    summary = {
        machine: {
            "rows": len(mine),
            "prompt_within": sum(["TTFT" not in item["beyond"] for item in mine]),  # type: ignore[operator]
            "token_within": sum(["TBT" not in item["beyond"] for item in mine]),  # type: ignore[operator]
            "prompt_mean_error": statistics.mean(
                [
                    abs(item["roofline_prompt_ms"] / item["prompt_ms"] - 1)  # type: ignore[operator]
                    for item in mine
                    if not item["impossible"]
                ]
            ),
        }
        for machine in MACHINES
        for mine in [[item for item in data if item["case"][0] == machine]]  # type: ignore[index]
    }
    report(
        "sim_fidelity_roofline",
        f"python -m benchmarks.sim_fidelity_roofline --data {options.data}",
        ["machine", "ranks", "prompt", "batch", "answer", "TTFT ms", "roofline", "error", "TBT ms", "roofline", "error",
         "uncalibrated", ""],
        rows,
        {"summary": summary, "rows": data},
    )  # fmt: skip


if __name__ == "__main__":
    main()
