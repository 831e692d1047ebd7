"""Published measurements come out of the models; skipped where the data is not at ../shared/data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sim_fidelity_roofline import BOUND, MACHINES, impossible, measured, predicted
from benchmarks.sim_fidelity_vllm import BLOCKS, LAYERS, PROFILE, RUN, compared, real_run, simulated
from headrace.simulate.hardware.efficiency import efficiency_named
from headrace.simulate.hardware.layer_profile import LayerProfile

SHARED = Path(__file__).parents[4] / "shared" / "data"


def needs(name: str) -> Path:
    if not (SHARED / name).exists():
        pytest.skip(f"{SHARED / name} is not there")
    return SHARED


def test_a_real_vllm_on_an_rtx_4090() -> None:
    """Mean and p99 of TTFT, TPOT and latency within the 5 % asked for. (Seen: 1.8 % at the most.)"""
    data = needs("llmservingsim")
    requests, real = real_run(data / RUN)
    seen, _ = simulated(requests, BLOCKS, LayerProfile(data / PROFILE, layers=LAYERS).pass_s)
    off = {
        f"{what} {figure}": made / taken - 1
        for what, figure, taken, made in compared(real, seen)
        if figure in ("mean", "p99")
    }
    assert len(off) == 6
    assert {name: error for name, error in off.items() if abs(error) > 0.05} == {}


def test_llama2_70b_on_a100_and_h100() -> None:
    """Every row within 25 %, but one on each machine: a batch of 64 on two ranks, whose prompt time is shorter than its
    arithmetic at the full stated rate, so that its sequences did not run together."""
    data = needs("splitwise-sim")
    beyond = []
    for case, taken in measured(data / "splitwise-sim/perf_model.csv").items():
        made = predicted(case, efficiency_named(MACHINES[case[0]][1]))
        if any(abs(mine / real - 1) > BOUND for mine, real in zip(made, taken, strict=True)):
            beyond.append((case, impossible(case, taken[0])))
    assert [(case[1], case[3]) for case, _ in beyond] == [(2, 64), (2, 64)]
    assert all(could_not_be for _, could_not_be in beyond)
