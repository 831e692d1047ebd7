"""The situation this project exists for, simulated: a first-come engine past its knee, and the same hardware by lanes.

    python -m benchmarks.sim_knee --seconds 30       # about two minutes on one core
    python -m benchmarks.sim_knee                    # runs twice as long, less noise

Three questions, each for both: *first come* (vLLM's default scheduling, requests dealt out in turn, nobody refused) and
*headrace* (lanes, admission by prediction, the hybrid step policy with
steps of at most 30 ms while somebody waits, two choices):

1. P99 against the rate, on eight instances: where is the knee?
2. The highest rate that eight instances serve within the SLO of every lane that has one.
3. The fewest instances that serve 200 requests a second within those SLOs, and what they cost a year.

Hardware: A100-80GB with a dense model of 8 billion parameters, by the formula in the scenario ``a100-8b`` (weights read
at 0.8 of the memory's rate, computing at 0.6 of the sheet's arithmetic). It is not a measurement. Prices are an input
(``--price``, per instance and hour). Attainment counts what was shed as missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.harness import report
from headrace.bench.load.workload_file import LoadedWorkload, parse_workload
from headrace.bench.results.columns import build_columns
from headrace.bench.results.summary import summarise_columns
from headrace.bench.statistics.quantiles import FloatArray
from headrace.simulate.fleet.run import RunOptions, simulate
from headrace.simulate.fleet.scenario_file import LoadedScenario, load_scenario, with_knob

RATES_RPS: Final = (40.0, 80.0, 120.0, 160.0, 200.0, 240.0, 280.0, 320.0)
INSTANCES: Final = 8
MOST_INSTANCES: Final = 16
WANTED_RPS: Final = 200.0
GOOD: Final = 0.99
HOURS_A_YEAR: Final = 8760
STEP_RPS: Final = 10.0
URGENT: Final = ("realtime", "interactive", "retrieval", "captions")
"""Lanes that somebody waits for: those with an SLO."""
WORKLOAD: Final = """
arrivals: poisson(200)
duration_s: 60
classes:
  decision:
    {weight: 35, lane: realtime, input_length: "lognormal(median=90, p99=250)", output_length: 4, slo: {e2e_s: 0.35}}
  chat:
    weight: 20
    lane: interactive
    input_length: "lognormal(median=70, p99=400, max=1024)"
    output_length: "lognormal(median=10, p99=24, max=32)"
    slo: {e2e_s: 0.6}
  passages:
    {weight: 20, lane: retrieval, input_length: "uniform(400, 1000)", output_length: 8, slo: {e2e_s: 0.5}}
  caption:
    weight: 23
    lane: captions
    input_length: "lognormal(median=230, p99=700, max=1024)"
    output_length: "lognormal(median=12, p99=32, max=48)"
    slo: {e2e_s: 1.0}
  document:
    {weight: 2, lane: long, input_length: "uniform(1000, 4000)", output_length: "lognormal(median=40, p99=120)"}
"""
SIDES: Final[dict[str, dict[str, object]]] = {
    "first come": {
        "groups.main.engine.policy": "vllm",
        "gateway.routing": "round-robin",
        "gateway.admission": False,
    },
    "headrace": {
        "groups.main.engine.policy": "hybrid",
        "gateway.routing": "power-of-two",
        "gateway.admission": True,
        "groups.main.engine.scheduling.urgent_step_s": 0.03,
    },
}


@dataclass(frozen=True)
class Point:
    """One run. ``p99_s`` is E2E, of answered requests; ``of_capacity`` the work that was answered over what the
    instances could do in large batches."""

    side: str
    rate_rps: float
    instances: int
    p99_s: dict[str, float]
    attained: dict[str, float]
    urgent_p99_s: float
    busy: float
    working: float
    shed: float

    @property
    def holds(self) -> bool:
        """Whether every lane with an SLO kept it for 99 % of its requests."""
        return all(self.attained[lane] >= GOOD for lane in URGENT)


def workload(rate_rps: float, seconds: float) -> LoadedWorkload:
    text = WORKLOAD.replace("poisson(200)", f"poisson({rate_rps:g})").replace(
        "duration_s: 60", f"duration_s: {seconds:g}"
    )
    return LoadedWorkload(parse_workload(text, name="sim_knee", folder=Path()), "sim_knee", Path())


def measure(
    side: str,
    rate_rps: float,
    instances: int,
    seconds: float,
    seed: int,
    changes: Mapping[str, object] | None = None,
) -> Point:
    """One run of ``seconds``, of which the first tenth is left out."""
    loaded = load_scenario("a100-8b")
    scenario = with_knob(loaded.scenario, "groups.main.replicas", instances)
    for key, value in {**SIDES[side], **(changes or {})}.items():
        scenario = with_knob(scenario, key, value)
    options = RunOptions(seed=seed, warmup_s=seconds / 10, drain_s=120.0)
    run = simulate(LoadedScenario(scenario, loaded.name, loaded.folder), workload(rate_rps, seconds), options)
    columns = build_columns(run.info, run.records)
    summary = summarise_columns(columns)
    p99_s = {}
    for group in summary.lanes:
        p99 = group.latencies["e2e_s"].percentiles["p99"]
        p99_s[group.name] = float("nan") if p99 is None else p99.value
    urgent = np.isin(columns.lane_ids, [columns.lanes.index(name) for name in URGENT]) & columns.measured
    e2e_s: FloatArray = columns.times["e2e_s"][urgent & columns.answered]
    stated = scenario.groups["main"].engine.stated
    assert stated is not None
    # At best a prompt token takes its computing, and an output token a row of a full batch.
    served = columns.answered & columns.measured
    tokens = int(columns.input_tokens[served].sum() + columns.output_tokens[served].sum())
    window_s = summary.window.end_s - summary.window.start_s
    attained = {group.name: 0.0 if group.attainment is None else group.attainment.value for group in summary.lanes}
    return Point(
        side,
        rate_rps,
        instances,
        p99_s,
        attained,
        float(np.quantile(e2e_s, 0.99)) if len(e2e_s) else float("nan"),
        run.groups[0].busy,
        tokens * stated.row_s / (window_s * instances),
        summary.whole.outcomes.get("shed", 0) / max(1, summary.whole.offered),
    )


def highest_rate(side: str, seconds: float, seed: int) -> tuple[Point, float]:
    """The highest rate, to ``STEP_RPS``, that holds on ``INSTANCES``; and the lowest tried that does not."""
    low, high = 0.0, 0.0
    best = measure(side, STEP_RPS, INSTANCES, seconds, seed)
    rate_rps = 100.0
    while not high or high - low > STEP_RPS:
        point = measure(side, rate_rps, INSTANCES, seconds, seed)
        if point.holds:
            low, best = rate_rps, point
        else:
            high = rate_rps
        rate_rps = low + 100.0 if not high else STEP_RPS * round((low + high) / 2 / STEP_RPS)
        if rate_rps in (low, high):
            break
    return best, high


def fewest_instances(side: str, seconds: float, seed: int) -> Point | None:
    """The fewest instances, from four up, with which ``WANTED_RPS`` holds."""
    for instances in range(4, MOST_INSTANCES + 1):
        point = measure(side, WANTED_RPS, instances, seconds, seed)
        if point.holds:
            return point
    return None


def _task(name: str, seconds: float, seed: int) -> object:
    side, _, what = name.partition("/")
    if what == "rate":
        return highest_rate(side, seconds, seed)
    if what == "instances":
        return fewest_instances(side, seconds, seed)
    return measure(side, float(what), INSTANCES, seconds, seed)


def row(question: str, point: Point) -> list[str]:
    """A point as the table shows it."""
    lanes = " ".join([f"{1e3 * point.p99_s[name]:.0f}" for name in URGENT])
    attained = " ".join([f"{100 * point.attained[name]:.1f}" for name in URGENT])
    return [
        question,
        point.side,
        f"{point.rate_rps:g}",
        str(point.instances),
        f"{1e3 * point.urgent_p99_s:.0f} ms",
        lanes,
        attained,
        f"{point.p99_s.get('long', float('nan')):.1f} s",
        f"{100 * point.busy:.0f} %",
        f"{100 * point.working:.0f} %",
        f"{100 * point.shed:.1f} %",
        "yes" if point.holds else "no",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim_knee", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated seconds of a run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--price", type=float, default=2.0, help="of an instance and hour, any currency")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    names = [f"{side}/{what}" for side in SIDES for what in ("rate", "instances", *[f"{r:g}" for r in RATES_RPS])]
    task = partial(_task, seconds=options.seconds, seed=options.seed)
    if options.processes > 1:
        with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
            found = dict(zip(names, pool.map(task, names), strict=True))
    else:
        found = {name: task(name) for name in names}
    rows: list[list[str]] = []
    facts: dict[str, object] = {"price_per_hour": options.price, "seconds": options.seconds, "seed": options.seed}
    for side in SIDES:
        for rate_rps in RATES_RPS:
            point = found[f"{side}/{rate_rps:g}"]
            assert isinstance(point, Point)
            rows.append(row("P99 against rate", point))
    for side in SIDES:
        best = found[f"{side}/rate"]
        assert isinstance(best, tuple)
        rows.append(row("highest rate", best[0]))
        facts[f"{side}: highest rate"] = best[0].rate_rps
    for side in SIDES:
        point = found[f"{side}/instances"]
        if isinstance(point, Point):
            rows.append(row(f"instances for {WANTED_RPS:g}/s", point))
            yearly = point.instances * options.price * HOURS_A_YEAR
            facts[f"{side}: instances"] = point.instances
            facts[f"{side}: cost a year"] = yearly
        else:
            facts[f"{side}: instances"] = f"more than {MOST_INSTANCES}"
    report(
        "sim_knee",
        f"python -m benchmarks.sim_knee --seconds {options.seconds:g} --seed {options.seed} --price {options.price:g}",
        _HEADINGS,
        rows,
        facts,
    )
    for key, value in facts.items():
        print(f"{key}: {value}")


_HEADINGS: Final[Sequence[str]] = (
    "question", "side", "rate /s", "instances", "P99 urgent", "P99 by lane, ms", "attained by lane, %", "P99 long",
    "busy", "working", "shed", "holds",
)  # fmt: skip


if __name__ == "__main__":
    main()
