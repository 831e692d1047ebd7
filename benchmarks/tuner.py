"""Does the tuner beat fixed settings? Three workloads on the virtual clock, its learning time counted.

One engine with SmolLM2's measured step times, ``hybrid``, and on the same requests:

- **fixed**: the default settings, all the time;
- **tuner**: begins with the defaults and tries steps of its grid on the running traffic, trials and all;
- **oracle**: the best fixed setting of the tuner's grid (two steps each way, six knobs), found beforehand by trying
  every value of every knob in turn, twice, on other requests. No tuner can know it;
- **safe oracle**: the same among settings with which no lane attains less than with the defaults, by 2 points: the
  tuner may not trade one lane for another.

Goodput counts requests that met their whole SLO and ended within the run. Attainment is their share of all that
arrived. Nothing is refused at the door.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import msgspec

from benchmarks.harness import report
from headrace.config.knobs import KnobValue
from headrace.config.schema import BandConfig, Config, EngineConfig
from headrace.control.grid import Grid, Setting, fits, grids_of, home_of, values_of
from headrace.control.tuner import Decision, Outcome, Tuner
from headrace.scheduling.bands import Band
from headrace.scheduling.caps import knee
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.simulate.arrivals import RequestStream, feed, requests_of
from headrace.simulate.requests import RequestRecord, Targets
from headrace.simulate.simulation import Simulation
from headrace.simulate.step_times import SMOLLM2_2_THREADS
from headrace.simulate.tuned import TunedEngine
from headrace.simulate.virtual_engine import EngineShape, VirtualEngine

CONTEXT_TOKENS: Final = 2048
STREAMS: Final = 32
SHAPE: Final = EngineShape(
    (Band(CONTEXT_TOKENS, STREAMS),), layout="libllama", cuts=True, overhead_s=0.0005, noise=0.05
)
CONFIG: Final = Config(engine=EngineConfig(bands=(BandConfig(CONTEXT_TOKENS, STREAMS),)))
WEIGHTS: Final = {"realtime": 8.0, "interactive": 8.0, "captions": 4.0, "long": 2.0, "batch": 1.0}
WINDOW_S: Final = 30.0
SETTLE_S: Final = 5.0
STEPS: Final = 2
SEARCH_S: Final = 400.0
SEARCH_SEED: Final = 1000
ALLOWED_LOSS: Final = 0.02

_CHAT: Final = Targets(ttft_s=1.0, tpot_s=0.1)
_DOCUMENT: Final = Targets(ttft_s=30.0, tpot_s=0.25)


def _stream(
    lane: str, rate: float, inputs: str, outputs: str, priority: int, targets: Targets, expected: int
) -> RequestStream:
    return RequestStream(lane, lane, f"poisson({rate})", inputs, outputs, priority, targets, expected_tokens=expected)


WORKLOADS: Final = {
    "mixed enterprise": (
        _stream("interactive", 0.7, "uniform(30, 120)", "lognormal(median=120, p99=384, max=400)", 10, _CHAT, 130),
        _stream(
            "captions",
            0.7,
            "lognormal(median=150, p99=760, max=1024)",
            "lognormal(median=24, p99=60, max=96)",
            30,
            Targets(ttft_s=0.5, e2e_s=3.0),
            26,
        ),
        _stream("long", 0.25, "uniform(128, 1800)", "lognormal(median=120, p99=200, max=200)", 50, _DOCUMENT, 120),
    ),
    "decisions beside documents": (
        _stream("realtime", 3.0, "lognormal(median=40, p99=120)", "fixed(4)", 0, Targets(e2e_s=0.6), 4),
        _stream("long", 0.35, "uniform(700, 1700)", "lognormal(median=60, p99=150, max=200)", 50, _DOCUMENT, 65),
    ),
    "batch with few chats": (
        _stream(
            "interactive",
            0.3,
            "lognormal(median=80, p99=600, max=1024)",
            "lognormal(median=60, p99=200, max=256)",
            10,
            Targets(ttft_s=1.0, tpot_s=0.15),
            65,
        ),
        _stream("batch", 1.0, "uniform(200, 1000)", "fixed(100)", 100, Targets(), 100),
    ),
}
"""A chat with cached dialogue, captions and documents; decisions with a tight E2E target beside documents; offline
work at the engine's limit beside a few chats."""


@dataclass(frozen=True)
class Run:
    """What came of one run: goodput of all of it and of its second half, attainment by lane, and what the tuner did
    and left in force (besides the defaults)."""

    goodput_rps: float
    late_goodput_rps: float
    attainment: dict[str, float]
    outcomes: dict[str, int] = field(default_factory=dict)
    final: dict[str, KnobValue] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[RequestRecord], duration_s: float, **of_tuner: Any) -> Run:
        """From what became of the requests."""
        arrived = Counter(record.request.lane for record in records)
        good = Counter(record.request.lane for record in records if record.good)
        late = sum(record.good and (record.ended_s or 0.0) > duration_s / 2 for record in records)
        return cls(
            goodput_rps=good.total() / duration_s,
            late_goodput_rps=2 * late / duration_s,
            attainment={lane: good[lane] / count for lane, count in sorted(arrived.items())},
            **of_tuner,
        )


def run(
    workload: Sequence[RequestStream],
    seed: int,
    duration_s: float,
    *,
    values: Mapping[str, KnobValue] | None = None,
    tuner: Tuner | None = None,
    log: bool = False,
) -> Run:
    """One run, with fixed values or with a tuner that begins at the defaults."""
    requests = requests_of(workload, seed=seed, duration_s=duration_s, longest_tokens=CONTEXT_TOKENS)
    simulation = Simulation(seed)
    knobs = msgspec.structs.replace(SchedulingKnobs(lane_weights=WEIGHTS), **(values or {}))
    engine = VirtualEngine(SHAPE, SMOLLM2_2_THREADS, simulation.random("engine"), knobs=knobs)
    if tuner is None:
        simulation.add(*feed(requests, engine.submit))
        simulation.run(duration_s)
        return Run.of(list(engine.records.values()), duration_s)
    tuned = TunedEngine(
        engine,
        tuner,
        simulation.random("tuner"),
        window_s=WINDOW_S,
        settle_s=SETTLE_S,
        batch_cap=knee(SMOLLM2_2_THREADS, STREAMS, knobs.knee_gain),
        watch=_printed if log else None,
    )
    simulation.add(*feed(requests, tuned.submit), *tuned.begin(0.0))
    simulation.run(duration_s)
    final = values_of(tuner.grids, tuned.state.good)
    home = values_of(tuner.grids, home_of(tuner.grids))
    moved = {name: value for name, value in final.items() if value != home[name]}
    return Run.of(list(engine.records.values()), duration_s, outcomes=dict(tuned.outcomes), final=moved)


class Oracle:
    """Searches the grid for the best fixed setting, one knob after the other, twice."""

    def __init__(self, workload: Sequence[RequestStream], grids: Mapping[str, Grid]) -> None:
        self._workload = workload
        self._grids = grids
        self._seen: dict[tuple[int, ...], Run] = {}
        self._usual = self._measured(home_of(grids)).attainment

    def best(self, *, safe: bool) -> dict[str, KnobValue]:
        """The values with the most goodput; with ``safe`` only where no lane loses."""
        setting = home_of(self._grids)
        for _ in range(2):
            for name, grid in self._grids.items():
                # Nearest to the defaults first: of equals, the first is taken.
                places = sorted(range(len(grid.values)), key=lambda place: abs(place - grid.home))
                options = [{**setting, name: place} for place in places]
                setting = max(options, key=lambda option: self._score(option, safe=safe))
        return values_of(self._grids, setting)

    def _score(self, setting: Setting, *, safe: bool) -> float:
        if not fits(values_of(self._grids, setting), {}):
            return -math.inf
        found = self._measured(setting)
        reached = found.attainment
        if safe and any(reached[lane] < usual - ALLOWED_LOSS for lane, usual in self._usual.items()):
            return -math.inf
        return found.goodput_rps

    def _measured(self, setting: Setting) -> Run:
        key = tuple(setting[name] for name in self._grids)
        if key not in self._seen:
            values = values_of(self._grids, setting)
            self._seen[key] = run(self._workload, SEARCH_SEED, SEARCH_S, values=values)
        return self._seen[key]


def _rows(name: str, kinds: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    fixed = kinds["fixed"]
    rows = []
    for kind, runs in kinds.items():
        gains = [one.goodput_rps / base.goodput_rps - 1 for one, base in zip(runs, fixed, strict=True)]
        lanes = {lane: statistics.fmean(one.attainment[lane] for one in runs) for lane in runs[0].attainment}
        did = sum((Counter(one.outcomes) for one in runs), Counter[str]())
        rows.append(
            [
                name,
                kind,
                f"{statistics.fmean(one.goodput_rps for one in runs):.3f}",
                f"{statistics.fmean(one.late_goodput_rps for one in runs):.3f}",
                f"{100 * statistics.fmean(gains):+.1f} ({100 * min(gains):+.1f} to {100 * max(gains):+.1f})",
                " ".join(f"{lane} {share:.3f}" for lane, share in lanes.items()),
                " ".join(f"{did[what]} {what}" for what in _SHOWN if did[what]),
            ]
        )
    return rows


_SHOWN: Final[tuple[Outcome, ...]] = ("tried", "kept", "returned", "alarm", "taken_back", "home")


def _data(name: str, kinds: Mapping[str, Sequence[Run]], found: Mapping[str, object]) -> dict[str, object]:
    return {
        "workload": name,
        "oracles": found,
        "runs": {kind: [asdict(one) for one in runs] for kind, runs in kinds.items()},
    }


def searched(name: str) -> dict[str, dict[str, KnobValue]]:
    """Both oracles' values for a workload."""
    oracle = Oracle(WORKLOADS[name], grids_of(CONFIG, steps=STEPS))
    return {"oracle": oracle.best(safe=False), "safe oracle": oracle.best(safe=True)}


def tuned(name: str, seed: int, duration_s: float, log: bool) -> Run:
    """One run with the tuner."""
    return run(WORKLOADS[name], seed, duration_s, tuner=Tuner(grids_of(CONFIG, steps=STEPS)), log=log)


def fixed(name: str, seed: int, duration_s: float, values: Mapping[str, KnobValue]) -> Run:
    """One run with fixed values."""
    return run(WORKLOADS[name], seed, duration_s, values=values)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuner", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--hours", type=float, default=2.0, help="virtual hours of each run")
    parser.add_argument("--processes", type=int, default=2, help="runs at the same time")
    parser.add_argument("--log", action="store_true", help="print what the tuner does")
    options = parser.parse_args()
    duration_s, seeds = options.hours * 3600, range(1, options.seeds + 1)
    with ProcessPoolExecutor(options.processes) as pool:
        searches = {name: pool.submit(searched, name) for name in WORKLOADS}
        runs = {
            name: {
                "fixed": [pool.submit(fixed, name, seed, duration_s, {}) for seed in seeds],
                "tuner": [pool.submit(tuned, name, seed, duration_s, options.log) for seed in seeds],
            }
            for name in WORKLOADS
        }
        for name, search in searches.items():
            for kind, values in search.result().items():
                runs[name][kind] = [pool.submit(fixed, name, seed, duration_s, values) for seed in seeds]
        done = {
            name: {kind: [one.result() for one in several] for kind, several in kinds.items()}
            for name, kinds in runs.items()
        }
    report(
        "tuner",
        f"python -m benchmarks.tuner --seeds {options.seeds} --hours {options.hours:g}",
        ["workload", "settings", "goodput/s", "second half", "against fixed, %", "attainment", "moves"],
        [row for name, kinds in done.items() for row in _rows(name, kinds)],
        {
            "window_s": WINDOW_S,
            "settle_s": SETTLE_S,
            "workloads": [_data(name, kinds, searches[name].result()) for name, kinds in done.items()],
        },
    )


def _printed(now_s: float, decision: Decision) -> None:
    if decision.outcome not in ("hold", "alternated"):
        print(f"{now_s:7.0f} {decision.outcome:10s} {decision.knob:20s} {dict(decision.changes)} {decision.why}")


if __name__ == "__main__":
    main()
