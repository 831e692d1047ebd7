"""Small scenarios and workloads, and what comes of them, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from headrace.bench.load.workload_file import LoadedWorkload, parse_workload
from headrace.simulate.fleet.run import RunOptions, SimulatedRun, simulate
from headrace.simulate.fleet.scenario_file import LoadedScenario, parse_scenario

STATED = {"weights_s": 0.01, "row_s": 1e-4, "context_s": 1e-7, "pair_s": 1e-9, "overhead_s": 0.001}
MIX = {
    "decision": {"weight": 5, "lane": "realtime", "input_length": 60, "output_length": 4, "slo": {"e2e_s": 0.5}},
    "chat": {
        "weight": 4,
        "lane": "interactive",
        "input_length": "lognormal(median=80, p99=600, max=1024)",
        "output_length": "lognormal(median=20, p99=80, max=128)",
        "slo": {"ttft_s": 0.5, "tpot_s": 0.1},
    },
    "document": {"weight": 1, "lane": "long", "input_length": "uniform(500, 3000)", "output_length": 30},
}


def scenario_of(*, engine: dict[str, Any] | None = None, **parts: Any) -> LoadedScenario:
    """Replicas of ``engine`` (stated times unless it says otherwise); ``parts`` as a scenario file has them."""
    spec = {"stated": STATED, "max_sequences": 64, **(engine or {})}
    tree: dict[str, Any] = {"groups": {"main": {"replicas": 2, "engine": spec}}}
    tree.update(parts)
    return LoadedScenario(parse_scenario(yaml.safe_dump(tree), name="test"), "test", Path())


def workload_of(
    arrivals: str = "poisson(30)",
    duration_s: float = 20.0,
    classes: dict[str, Any] | None = None,
    **more: Any,
) -> LoadedWorkload:
    """A workload of ``classes``: a mix of three lanes unless they are given."""
    tree = {"arrivals": arrivals, "duration_s": duration_s, "classes": MIX if classes is None else classes, **more}
    return LoadedWorkload(parse_workload(yaml.safe_dump(tree), name="test", folder=Path()), "test", Path())


def run_of(scenario: LoadedScenario, workload: LoadedWorkload, seed: int = 1, **options: Any) -> SimulatedRun:
    """A run with all its accounts checked."""
    return simulate(scenario, workload, RunOptions(seed=seed, checked=True, **options))
