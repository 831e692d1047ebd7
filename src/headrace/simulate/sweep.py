"""A sweep of simulated runs: every combination of rates and values of a scenario, over several processes.

Runs do not depend on one another or on which process they are in: the result is the same bytes with any number of
processes. Each combination has the same seed, so that differences are those of the values.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from msgspec import Struct

from headrace.bench.load.workload_file import LoadedWorkload
from headrace.bench.report.units import NOTHING, show_number, show_percent, show_seconds, show_share
from headrace.bench.results.columns import build_columns
from headrace.bench.results.figures import Summary
from headrace.bench.results.summary import summarise_columns
from headrace.bench.session import at_rate
from headrace.errors import ConfigError
from headrace.simulate.fleet.run import RunOptions, SimulatedRun, simulate
from headrace.simulate.fleet.scenario_file import LoadedScenario, with_knob

FORMAT = "headrace-simulate-sweep"
VERSION = 1
MOST_POINTS = 10_000


class LanePoint(Struct, frozen=True):
    """A lane at one point. Latencies are those of the answered requests, seconds; None: too few for a p99."""

    offered: int
    good: int
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    e2e_p99_s: float | None


class SweepPoint(Struct, frozen=True):
    """One run. ``knobs`` are the values that were set, by key; ``rate_rps`` None: the workload's own arrivals."""

    rate_rps: float | None
    knobs: dict[str, object]
    lanes: dict[str, LanePoint]
    offered: int
    good: int
    goodput_rps: float
    output_tokens_per_s: float
    busy: float
    replicas: float
    cost_per_hour: float | None
    problem: str = ""


class SimulatedSweep(Struct, frozen=True, tag_field="format", tag=FORMAT):
    """All points, in the order of their combinations."""

    scenario: str
    workload: str
    seed: int
    duration_s: float
    points: list[SweepPoint]
    simulated: bool = True
    version: int = VERSION


@dataclass(frozen=True)
class Combination:
    """What one run is made of."""

    scenario: LoadedScenario
    workload: LoadedWorkload
    options: RunOptions
    rate_rps: float | None
    knobs: Mapping[str, object]


def combinations(
    scenario: LoadedScenario,
    workload: LoadedWorkload,
    options: RunOptions,
    *,
    rates_rps: Sequence[float],
    arrivals: str,
    knobs: Mapping[str, Sequence[object]],
) -> list[Combination]:
    """Every rate with every combination of values. Without rates the workload's arrivals stay; ``arrivals`` has the
    word RATE in it. Raises ConfigError for a knob that there is not or a value that it does not take, before anything
    runs."""
    count = max(1, len(rates_rps))
    for values in knobs.values():
        count *= len(values)
    if count > MOST_POINTS:
        raise ConfigError(f"{count:,} combinations are more than {MOST_POINTS:,}: give fewer values", where="--knob")
    found = []
    wanted: Sequence[float | None] = rates_rps or [None]
    for rate_rps in wanted:
        loaded = workload
        if rate_rps is not None:
            duration_s = workload.workload.duration_s
            if duration_s is None:
                raise ConfigError("say how long the load lasts, since the trace's own arrivals go", where="--duration")
            loaded = at_rate(workload, arrivals, rate_rps, duration_s)
        for values in itertools.product(*knobs.values()):
            chosen = dict(zip(knobs, values, strict=True))
            changed = scenario.scenario
            for key, value in chosen.items():
                changed = with_knob(changed, key, value)
            one = LoadedScenario(changed, scenario.name, scenario.folder)
            found.append(Combination(one, loaded, options, rate_rps, chosen))
    return found


def run_point(combination: Combination) -> SweepPoint:
    """One run and what is kept of it."""
    run = simulate(combination.scenario, combination.workload, combination.options)
    return point_of(combination.rate_rps, combination.knobs, run)


def point_of(rate_rps: float | None, knobs: Mapping[str, object], run: SimulatedRun) -> SweepPoint:
    """A run as a point of a sweep."""
    summary = summarise_columns(build_columns(run.info, run.records))
    paid_s = sum([one.paid_s for group in run.groups for one in group.replicas])
    busy_s = sum([one.busy_s for group in run.groups for one in group.replicas])
    costs = [group.cost for group in run.groups]
    hours = run.info.wall_s / 3600
    cost = None if any(one is None for one in costs) else sum([one for one in costs if one is not None]) / hours
    return SweepPoint(
        rate_rps=rate_rps,
        knobs=dict(knobs),
        lanes=_lanes(summary),
        offered=summary.whole.offered,
        good=summary.whole.good,
        goodput_rps=summary.whole.goodput_rps,
        output_tokens_per_s=summary.whole.output_tokens_per_s,
        busy=busy_s / paid_s if paid_s else 0.0,
        replicas=paid_s / run.info.wall_s,
        cost_per_hour=cost,
        problem="; ".join(summary.invalid),
    )


def run_all(
    wanted: Sequence[Combination], processes: int, on_point: Callable[[int, SweepPoint], None] | None = None
) -> Iterator[SweepPoint]:
    """All points in order; ``on_point`` hears of each one's number as it ends."""
    if processes <= 1 or len(wanted) <= 1:
        for number, combination in enumerate(wanted):
            point = run_point(combination)
            if on_point is not None:
                on_point(number, point)
            yield point
        return
    # Not forked: a fork would copy the threads' locks of whatever has been imported.
    with ProcessPoolExecutor(min(processes, len(wanted)), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run_point, combination): number for number, combination in enumerate(wanted)}
        done: dict[int, SweepPoint] = {}
        next_number = 0
        try:
            for future in as_completed(futures):
                number = futures[future]
                done[number] = future.result()
                if on_point is not None:
                    on_point(number, done[number])
                while next_number in done:
                    yield done.pop(next_number)
                    next_number += 1
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _lanes(summary: Summary) -> dict[str, LanePoint]:
    lanes = {}
    for group in summary.lanes:
        values = [group.latencies[name].percentiles["p99"] for name in ("ttft_s", "tpot_s", "e2e_s")]
        lanes[group.name] = LanePoint(
            group.offered, group.good, *[None if one is None else one.value for one in values]
        )
    return lanes


HEADINGS = ("lane", "offered", "attained", "TTFT p99", "TPOT p99", "E2E p99", "good/s", "busy", "replicas", "cost/h")


def headings(points: Sequence[SweepPoint]) -> list[str]:
    """The columns of the table: the rate and the values that were set, then the figures."""
    rate = ["rate /s"] if any(point.rate_rps is not None for point in points) else []
    return [*rate, *[_short(key) for key in _keys(points)], *HEADINGS]


def rows(points: Sequence[SweepPoint]) -> list[list[str]]:
    """One row per point and lane."""
    with_rate = any(point.rate_rps is not None for point in points)
    found = []
    for point in points:
        start = [show_number(point.rate_rps)] if with_rate else []
        start += [str(point.knobs[key]) for key in _keys(points)]
        end = [
            show_number(point.goodput_rps),
            show_percent(point.busy),
            f"{point.replicas:.4g}",
            NOTHING if point.cost_per_hour is None else show_number(point.cost_per_hour),
        ]
        for name, lane in point.lanes.items():
            share = show_share(lane.good / lane.offered if lane.offered else None)
            latencies = [show_seconds(one) for one in (lane.ttft_p99_s, lane.tpot_p99_s, lane.e2e_p99_s)]
            found.append([*start, name, f"{lane.offered:,}", share, *latencies, *end])
            start, end = [""] * len(start), [""] * len(end)
    return found


def to_csv(points: Iterable[SweepPoint]) -> str:
    """One line per point and lane, numbers in base units."""
    points = list(points)
    keys = _keys(points)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("lane", "offered", "good", "ttft_p99_s", "tpot_p99_s", "e2e_p99_s")
    whole = ("goodput_rps", "output_tokens_per_s", "busy", "replicas", "cost_per_hour")
    writer.writerow(["rate_rps", *keys, *names, *whole, "simulated"])
    for point in points:
        for name, lane in point.lanes.items():
            values: list[object] = [point.rate_rps, *[point.knobs[key] for key in keys], name, lane.offered, lane.good]
            values += [lane.ttft_p99_s, lane.tpot_p99_s, lane.e2e_p99_s]
            values += [point.goodput_rps, point.output_tokens_per_s, point.busy, point.replicas, point.cost_per_hour]
            writer.writerow(["" if value is None else value for value in [*values, "true"]])
    return text.getvalue()


def _keys(points: Sequence[SweepPoint]) -> list[str]:
    return list(points[0].knobs) if points else []


def _short(key: str) -> str:
    return key.rpartition(".")[2]
