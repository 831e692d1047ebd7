"""The situation this project exists for, simulated: a first-come engine past its knee, and the same hardware by lanes.

    python -m benchmarks.sim_knee            # about ten minutes on one core; --processes 2 for two

Three sides on the same machines: *first come as it comes* (vLLM's defaults, requests dealt out in turn, nobody
refused), *first come, tuned* (its token budget and its routing chosen), and *headrace, tuned* (lanes, admission by
prediction, its own routing, the hybrid step policy; its longest urgent step and token budget chosen). Both get ten
settings, tried on the seeds ``TUNING_SEEDS`` at the rates ``TUNING_RATES_RPS``; the one with the highest mean of the
worst lane's attainment is taken. Everything that is reported runs on ``SEEDS``, which choosing never saw. Then:

1. P99 against the rate, on eight instances: where is the knee?
2. The highest of the rates that eight instances serve within the SLO of every lane that has one, on every seed.
3. The fewest instances that serve 200 requests a second within those SLOs on every seed, and what they cost a year.

Hardware: ``TIMES``, a roofline with headrace's default calibration, which comes from public measurements of another
machine. Nothing here was measured on A100s. Prices are an input (``--price``, per instance and hour). Attainment
counts what was shed as missed.
"""

from __future__ import annotations

import argparse
import json
import sys
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
from headrace.simulate.fleet.engine_times import times_of
from headrace.simulate.fleet.run import RunOptions, simulate
from headrace.simulate.fleet.scenario_file import LoadedScenario, load_scenario, with_knob

TIMES: Final = "roofline(a100-80, llama-3.1-8b)"
RATES_RPS: Final = tuple(float(rate) for rate in range(60, 321, 20))
SHOWN_RPS: Final = tuple(float(rate) for rate in range(80, 321, 40))
INSTANCES: Final = 8
MOST_INSTANCES: Final = 16
WANTED_RPS: Final = 200.0
TUNING_SEEDS: Final = (101, 102)
TUNING_RATES_RPS: Final = (140.0, 180.0, 220.0)
SEEDS: Final = (1001, 1002, 1003)
GOOD: Final = 0.99
HOURS_A_YEAR: Final = 8760
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
FIRST_COME: Final[dict[str, object]] = {"groups.main.engine.policy": "vllm", "gateway.admission": False}
HEADRACE: Final[dict[str, object]] = {
    "groups.main.engine.policy": "hybrid",
    "gateway.routing": "gateway",
    "gateway.admission": True,
}
AS_IT_COMES: Final[dict[str, object]] = {**FIRST_COME, "gateway.routing": "round-robin"}
_STEP: Final = "groups.main.engine.scheduling.step_tokens"
_PROMPTS: Final = "groups.main.engine.scheduling.max_prefill_tokens"
_URGENT_STEP: Final = "groups.main.engine.scheduling.urgent_step_s"
CANDIDATES: Final[dict[str, tuple[dict[str, object], ...]]] = {
    "first come, tuned": tuple(
        {**FIRST_COME, "gateway.routing": routing, _STEP: tokens}
        for routing in ("round-robin", "power-of-two")
        for tokens in (128, 256, 384, 1024, 2048)
    ),
    "headrace, tuned": tuple(
        {**HEADRACE, _URGENT_STEP: step_s, _STEP: tokens, _PROMPTS: tokens}
        for step_s in (0.02, 0.03, 0.045, 0.06, 0.09)
        for tokens in (1024, 2048)
    ),
}
"""As many settings for one side as for the other."""
Settings = Mapping[str, object]


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


def measure(side: str, settings: Settings, rate_rps: float, instances: int, seconds: float, seed: int) -> Point:
    """One run of ``seconds``, of which the first tenth is left out."""
    loaded = load_scenario("a100-8b")
    scenario = with_knob(loaded.scenario, "groups.main.replicas", instances)
    hardware = {"groups.main.engine.stated": None, "groups.main.engine.times": TIMES}
    for key, value in {**hardware, **settings}.items():
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
    # At best every token takes what one more takes in a large pass.
    times = times_of(scenario.groups["main"].engine)
    row_s = (times.call_s(4096, 0, 1) - times.call_s(2048, 0, 1)) / 2048
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
        tokens * row_s / (window_s * instances),
        summary.whole.outcomes.get("shed", 0) / max(1, summary.whole.offered),
    )


def score(side: str, settings: Settings, seconds: float) -> float:
    """What a setting is chosen by: the attainment of the lane that has least, on average."""
    runs = [
        measure(side, settings, rate_rps, INSTANCES, seconds, seed)
        for rate_rps in TUNING_RATES_RPS
        for seed in TUNING_SEEDS
    ]
    return float(np.mean([min(one.attained[lane] for lane in URGENT) for one in runs]))


def on_seeds(side: str, settings: Settings, rate_rps: float, instances: int, seconds: float) -> list[Point]:
    """The same on every seed that is reported."""
    return [measure(side, settings, rate_rps, instances, seconds, seed) for seed in SEEDS]


def fewest_instances(side: str, settings: Settings, seconds: float) -> list[Point] | None:
    """The fewest instances, from four up, with which ``WANTED_RPS`` holds on every seed."""
    for instances in range(4, MOST_INSTANCES + 1):
        points: list[Point] = []
        for seed in SEEDS:
            points.append(measure(side, settings, WANTED_RPS, instances, seconds, seed))
            if not points[-1].holds:
                break
        else:
            return points
    return None


Task = tuple[str, dict[str, object], float | None]
"""A side, its settings, and a rate (None: the fewest instances)."""


def _score(task: tuple[str, dict[str, object]], seconds: float) -> float:
    return score(task[0], task[1], seconds)


def _answer(task: Task, seconds: float) -> list[Point] | None:
    side, settings, rate_rps = task
    if rate_rps is None:
        return fewest_instances(side, settings, seconds)
    return on_seeds(side, settings, rate_rps, INSTANCES, seconds)


def row(question: str, points: Sequence[Point]) -> list[str]:
    """Runs on several seeds as the table shows them: medians, and from least to most where it matters."""
    urgent_ms = [1e3 * one.urgent_p99_s for one in points]
    lanes = " ".join([f"{1e3 * _median([one.p99_s[name] for one in points]):.0f}" for name in URGENT])
    attained = " ".join([f"{100 * _median([one.attained[name] for one in points]):.1f}" for name in URGENT])
    worst = [100 * min(one.attained[name] for name in URGENT) for one in points]
    return [
        question,
        points[0].side,
        f"{points[0].rate_rps:g}",
        str(points[0].instances),
        f"{_median(urgent_ms):.0f} ({min(urgent_ms):.0f} to {max(urgent_ms):.0f})",
        lanes,
        attained,
        f"{min(worst):.1f} to {max(worst):.1f}",
        f"{_median([one.p99_s.get('long', float('nan')) for one in points]):.1f}",
        f"{100 * _median([one.busy for one in points]):.0f}",
        f"{100 * _median([one.working for one in points]):.0f}",
        f"{100 * _median([one.shed for one in points]):.1f}",
        "yes" if all(one.holds for one in points) else "no",
    ]


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim_knee", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated seconds of a reported run")
    parser.add_argument("--tuning-seconds", type=float, default=10.0, help="simulated seconds of a run while choosing")
    parser.add_argument("--price", type=float, default=2.0, help="of an instance and hour, any currency")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        tried = [(side, settings) for side, all_of_it in CANDIDATES.items() for settings in all_of_it]
        scores = list(pool.map(partial(_score, seconds=options.tuning_seconds), tried))
        rows: list[list[str]] = []
        facts: dict[str, object] = {"price_per_hour": options.price, "seconds": options.seconds, "seeds": SEEDS}
        sides: dict[str, dict[str, object]] = {"first come as it comes": dict(AS_IT_COMES)}
        for side in CANDIDATES:
            of_side = [(found, settings) for found, (of, settings) in zip(scores, tried, strict=True) if of == side]
            sides[side] = max(of_side, key=lambda one: one[0])[1]
            facts[f"{side}: tried"] = [{"score": found, **settings} for found, settings in of_side]
            facts[f"{side}: chosen"] = sides[side]
        print(json.dumps(facts), file=sys.stderr, flush=True)
        tasks: list[Task] = [(name, how, rate) for name, how in sides.items() for rate in (*RATES_RPS, None)]
        answers = list(pool.map(partial(_answer, seconds=options.seconds), tasks))
    for side in sides:
        holding: list[Point] | None = None
        for (of, _, rate_rps), points in zip(tasks, answers, strict=True):
            if of != side:
                continue
            if rate_rps is None:
                facts[f"{side}: instances"] = f"more than {MOST_INSTANCES}" if points is None else points[0].instances
                if points is not None:
                    rows.append(row(f"instances for {WANTED_RPS:g}/s", points))
                    facts[f"{side}: cost a year"] = points[0].instances * options.price * HOURS_A_YEAR
                continue
            assert points is not None
            if rate_rps in SHOWN_RPS:
                rows.append(row("P99 against rate", points))
            if all(one.holds for one in points):
                holding = points
        if holding is not None:
            rows.append(row("highest rate", holding))
        facts[f"{side}: highest rate"] = f"below {RATES_RPS[0]:g}" if holding is None else holding[0].rate_rps
    report(
        "sim_knee",
        f"python -m benchmarks.sim_knee --seconds {options.seconds:g} --tuning-seconds {options.tuning_seconds:g}"
        f" --price {options.price:g}",
        _HEADINGS,
        rows,
        facts,
    )


_HEADINGS: Final[Sequence[str]] = (
    "question", "side", "rate /s", "instances", "P99 urgent, ms", "P99 by lane, ms", "attained by lane, %",
    "worst lane, %", "P99 long, s", "busy %", "working %", "shed %", "holds",
)  # fmt: skip


if __name__ == "__main__":
    main()
