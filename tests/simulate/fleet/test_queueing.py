"""Against queueing theory: waits with and without batching are those of the formulas."""

from __future__ import annotations

import pytest

from headrace.bench.records import RequestRecord
from headrace.simulate.fleet.run import SimulatedRun
from tests.simulate.fleet.small import run_of, scenario_of, workload_of

ONE_AT_A_TIME = {"policy": "vllm", "stated": {"weights_s": 1e-9, "row_s": 1e-3}, "max_sequences": 1}
"""A prompt of 50 tokens takes 50 ms, and its one output token comes with it."""
SERVICE_S = 0.05


def times_s(record: RequestRecord) -> tuple[float, float]:
    assert record.end_ns is not None
    return record.due_ns / 1e9, record.end_ns / 1e9


def waits_s(run: SimulatedRun) -> list[float]:
    return [end_s - due_s - SERVICE_S for due_s, end_s in map(times_s, run.records)]


@pytest.mark.parametrize("load", [0.5, pytest.param(0.8, marks=pytest.mark.slow)])
def test_waits_are_those_of_m_d_1(load: float) -> None:
    """Batching off: mean wait = load * service / (2 (1 - load)) (Pollaczek and Khinchine), within 3 %. Waits that
    follow one another are alike, the more so the higher the load: 300,000 requests bring the standard error of their
    mean at a load of 0.8 to about 0.7 %, 60,000 at 0.5 as well."""
    count = 300_000 if load > 0.6 else 60_000
    one = {"all": {"input_length": 50, "output_length": 1}}
    workload = workload_of(f"poisson({load / SERVICE_S})", count * SERVICE_S / load, one)
    groups = {"main": {"replicas": 1, "engine": ONE_AT_A_TIME}}
    run = run_of(scenario_of(groups=groups, gateway={"admission": False}), workload, drain_s=1000.0)
    waits = waits_s(run)
    expected_s = load * SERVICE_S / (2 * (1 - load))
    assert sum(waits) / len(waits) == pytest.approx(expected_s, rel=0.03)
    assert min(waits) > -1e-6


@pytest.mark.parametrize("policy", ["hybrid", "continuous", "vllm", "sglang", "llama-server"])
def test_littles_law(policy: str) -> None:
    """On a steady run the mean number in the system is the arrival rate times the mean time in it. Both sides come from
    one run and differ by what is under way at its ends alone: 1 %."""
    workload = workload_of("poisson(30)", 120.0)
    run = run_of(scenario_of(engine={"policy": policy}, gateway={"admission": False}), workload, drain_s=1000.0)
    spans = [times_s(record) for record in run.records]
    last_s = 120.0
    inside = sum(min(end_s, last_s) - due_s for due_s, end_s in spans) / last_s
    mean_s = sum(end_s - due_s for due_s, end_s in spans) / len(spans)
    assert inside == pytest.approx(len(spans) / last_s * mean_s, rel=0.01)
    # The same number counted by sampling at fixed moments, which shares nothing with the sums above; 5 %: samples are
    # 50 ms apart and what they miss is chance.
    moments = [0.05 * step for step in range(int(last_s / 0.05))]
    arrivals = sorted(due_s for due_s, _ in spans)
    ends = sorted(end_s for _, end_s in spans)
    counted, came, gone = 0, 0, 0
    for moment_s in moments:
        while came < len(arrivals) and arrivals[came] <= moment_s:
            came += 1
        while gone < len(ends) and ends[gone] <= moment_s:
            gone += 1
        counted += came - gone
    assert counted / len(moments) == pytest.approx(inside, rel=0.05)
