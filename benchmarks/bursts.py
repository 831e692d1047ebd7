"""Bursts and floods on the virtual clock: does every lane keep its SLO, and does a flood hurt only itself?

One engine with SmolLM2's measured step times under mixed traffic at 70 % of its capacity (requests a second of the
mix that ``continuous`` completes when a backlog of it waits). Three questions, for every strategy on the same requests:

- **burst**: for 10 s five times as much of everything. How long is a lane below its SLO? Yardstick: at most twice the
  burst's length.
- **flood of a lane**: for a minute one lane sends ten times its rate; each lane in turn. What do the other lanes lose?
- **flood of a tenant**: the same from one tenant of a lane that others use too. What do those others lose?
  Yardstick of both: at most 2 points of attainment.

Attainment is the share of requests that met their whole SLO. With and without a flood the other requests are the same,
so differences are differences; a burst adds requests in the same way. By default nothing is refused at the door: this
is what scheduling does alone. With
``--admission`` the gateway's admission by prediction stands before the engine, with a patience of 1: what would be late
is shed, and counts as missed. Lanes have equal weights.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from benchmarks.harness import report
from headrace.bench.load.lengths import parse_lengths
from headrace.lanes.lane import SLO, Lane
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs, Strategy
from headrace.simulate.arrivals import RequestStream, feed, requests_of
from headrace.simulate.door import Door
from headrace.simulate.requests import RequestRecord, Targets, VirtualRequest
from headrace.simulate.simulation import Simulation
from headrace.simulate.step_times import SMOLLM2_2_THREADS
from headrace.simulate.virtual_engine import EngineShape, VirtualEngine

LOAD: Final = 0.7
BURST: Final = 5.0
BURST_S: Final = 10.0
FLOOD: Final = 10.0
FLOOD_S: Final = 60.0
STARTS_S: Final = 60.0
LASTS_S: Final = 240.0
BIN_S: Final = 5.0
CONTEXT_TOKENS: Final = 2048
BACKLOG: Final = 600
SHARED_LANE: Final = "interactive"
GOOD: Final = 0.99
ALLOWED_LOSS: Final = 0.02
SHAPE: Final = EngineShape((Band(CONTEXT_TOKENS, 32),), layout="libllama", cuts=True, overhead_s=0.0005, noise=0.05)


@dataclass(frozen=True)
class LaneMix:
    """A lane of the mix: its share of all requests, and what they are like."""

    share: float
    input_length: str
    output_length: str
    priority: int
    targets: Targets


MIX: Final = {
    "realtime": LaneMix(0.2, "lognormal(median=40, p99=120)", "fixed(4)", 0, Targets(e2e_s=1.0)),
    "interactive": LaneMix(
        0.3,
        "lognormal(median=80, p99=600, max=1024)",
        "lognormal(median=60, p99=200, max=256)",
        10,
        Targets(ttft_s=1.0, tpot_s=0.1),
    ),
    "captions": LaneMix(
        0.3, "lognormal(median=150, p99=1000, max=1024)", "lognormal(median=24, p99=64)", 30, Targets(e2e_s=5.0)
    ),
    "long": LaneMix(
        0.15, "uniform(700, 1700)", "lognormal(median=100, p99=300, max=300)", 50, Targets(ttft_s=30.0, tpot_s=0.25)
    ),
    "batch": LaneMix(0.05, "uniform(200, 1000)", "fixed(200)", 100, Targets()),
}
LANES: Final = {
    name: Lane(
        priority=mix.priority,
        slo=SLO(p99_ttft_s=mix.targets.ttft_s, p99_tpot_s=mix.targets.tpot_s, p99_e2e_s=mix.targets.e2e_s),
        typical_output_tokens=round(parse_lengths(mix.output_length).mean()),
        patience=1.0,
    )
    for name, mix in MIX.items()
}
TENANTS: Final = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}


def stream(name: str, lane: str, arrivals: str, tenants: dict[str, float] | None = None) -> RequestStream:
    """Requests of a lane of the mix."""
    mix = MIX[lane]
    return RequestStream(
        name,
        lane,
        arrivals,
        mix.input_length,
        mix.output_length,
        mix.priority,
        mix.targets,
        TENANTS if tenants is None else tenants,
        expected_tokens=round(parse_lengths(mix.output_length).mean()),
    )


def usual(rate: float) -> list[RequestStream]:
    """The mix at ``rate`` requests a second."""
    return [stream(lane, lane, f"poisson({rate * mix.share})") for lane, mix in MIX.items()]


def drawn(streams: Sequence[RequestStream], seed: int) -> list[VirtualRequest]:
    return requests_of(streams, seed=seed, duration_s=LASTS_S, longest_tokens=CONTEXT_TOKENS)


def served(
    requests: Iterable[VirtualRequest], strategy: Strategy, seed: int, *, admission: bool = False
) -> list[RequestRecord]:
    """What became of every request."""
    simulation = Simulation(seed)
    engine = VirtualEngine(
        SHAPE, SMOLLM2_2_THREADS, simulation.random("engine"), knobs=SchedulingKnobs(strategy=strategy)
    )
    door = Door(engine, LANES, SMOLLM2_2_THREADS) if admission else None
    simulation.add(*(feed(requests, engine.submit) if door is None else door.feed(requests)))
    simulation.run()
    return [*engine.records.values(), *([record for _, record in door.shed] if door else [])]


def capacity(seed: int) -> float:
    """Requests of the mix a second that ``continuous`` completes while it has a backlog."""
    backlog = [
        msgspec.structs.replace(request, arrived_s=0.0)
        for request in requests_of(usual(10.0), seed=seed, duration_s=BACKLOG / 10, longest_tokens=CONTEXT_TOKENS)
    ]
    records = served(backlog, "continuous", seed)
    return len(records) / max(record.ended_s or 0.0 for record in records)


def attainment(records: Sequence[RequestRecord]) -> float:
    """Share of good ones; nan for none."""
    return sum(record.good for record in records) / len(records) if records else math.nan


def below_slo_s(burst: Sequence[RequestRecord], without: Sequence[RequestRecord]) -> float:
    """How long after its beginning a burst is felt: the end of the last stretch of arrivals in which fewer than 99 %
    were good and more were missed than without the burst, by over two standard errors (of a difference of counts), so
    that a chance miss long after is not taken for the burst's."""
    bins: dict[int, tuple[list[RequestRecord], list[RequestRecord]]] = defaultdict(lambda: ([], []))
    for place, records in enumerate((burst, without)):
        for record in records:
            if record.request.arrived_s >= STARTS_S:
                bins[int((record.request.arrived_s - STARTS_S) / BIN_S)][place].append(record)
    last = -1
    for number, (during, usually) in bins.items():
        missed, expected = (sum(not record.good for record in records) for records in (during, usually))
        # A burst sends more of the lane's requests: the usual misses would be more as well.
        scaled = expected * (len(during) / len(usually) if during and usually else 1.0)
        if during and attainment(during) < GOOD and missed - scaled > 2 * math.sqrt(missed + scaled):
            last = max(last, number)
    return (last + 1) * BIN_S


class Results:
    """The rows of the table, and the same for JSON."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.data: list[dict[str, object]] = []

    def burst(
        self, strategy: str, lane: str, during: Sequence[RequestRecord], without: Sequence[RequestRecord]
    ) -> None:
        """A lane in the burst: attainment before, while and after, and how long it was below its SLO."""
        lost_s = below_slo_s(during, without)
        spans = [(0.0, STARTS_S), (STARTS_S, STARTS_S + BURST_S), (STARTS_S + BURST_S, STARTS_S + 3 * BURST_S)]
        spans += [(STARTS_S + 3 * BURST_S, LASTS_S)]
        parts = [attainment([r for r in during if first <= r.request.arrived_s < last]) for first, last in spans]
        verdict = _verdict(lost_s <= 2 * BURST_S) if MIX[lane].targets != Targets() else ""
        shown = " ".join(f"{part:.3f}" for part in parts)
        self.rows.append(["burst 5x", strategy, lane, f"{attainment(without):.3f}", shown, f"{lost_s:.0f} s", verdict])
        self.data.append(
            {"case": "burst", "strategy": strategy, "lane": lane, "without": attainment(without), "spans": parts}
            | {"below_slo_s": lost_s}
        )

    def flood(
        self, case: str, strategy: str, who: str, during: Sequence[RequestRecord], without: Sequence[RequestRecord]
    ) -> None:
        """What others lost by a flood."""
        with_flood, before = attainment(during), attainment(without)
        loss = before - with_flood
        self.rows.append(
            [
                case,
                strategy,
                who,
                f"{before:.3f}",
                f"{with_flood:.3f}",
                f"{100 * loss:+.1f} points",
                _verdict(loss <= ALLOWED_LOSS),
            ]
        )
        self.data.append(
            {"case": case, "strategy": strategy, "who": who, "without": before, "with": with_flood, "loss": loss}
        )


def _verdict(holds: bool) -> str:
    return "yes" if holds else "NO"


def run_all(
    streams: Sequence[RequestStream], strategy: Strategy, seeds: Sequence[int], admission: bool
) -> list[RequestRecord]:
    return [record for seed in seeds for record in served(drawn(streams, seed), strategy, seed, admission=admission)]


def of(
    records: Sequence[RequestRecord], chosen: Callable[[VirtualRequest], bool], from_s: float = STARTS_S
) -> list[RequestRecord]:
    """The usual traffic among the records, arrived from ``from_s`` on, as far as chosen."""
    return [
        record
        for record in records
        if not record.request.request_id.startswith("flood")
        and record.request.arrived_s >= from_s
        and chosen(record.request)
    ]


def compare(
    strategy: Strategy, rate: float, seeds: Sequence[int], results: Results, *, admission: bool = False
) -> None:
    """All three questions for one strategy."""
    usually = run_all(usual(rate), strategy, seeds, admission)
    bursts = [
        stream(f"burst-{lane}", lane, f"burst(0, {(BURST - 1) * rate * mix.share}, at={STARTS_S}, length={BURST_S})")
        for lane, mix in MIX.items()
    ]
    burst = run_all([*usual(rate), *bursts], strategy, seeds, admission)
    for lane in MIX:
        of_lane = _in_lane(lane)
        results.burst(strategy, lane, of(burst, of_lane, 0.0), of(usually, of_lane, 0.0))
    for flooding, mix in MIX.items():
        flood = f"burst(0, {(FLOOD - 1) * rate * mix.share}, at={STARTS_S}, length={FLOOD_S})"
        records = run_all([*usual(rate), stream("flood", flooding, flood)], strategy, seeds, admission)
        for lane in MIX:
            if lane != flooding and MIX[lane].targets != Targets():
                of_lane = _in_lane(lane)
                results.flood(f"{flooding} floods 10x", strategy, lane, of(records, of_lane), of(usually, of_lane))
    share = MIX[SHARED_LANE].share
    flood = f"burst(0, {FLOOD * rate * share}, at={STARTS_S}, length={FLOOD_S})"
    records = run_all([*usual(rate), stream("flood", SHARED_LANE, flood, {"flooder": 1.0})], strategy, seeds, admission)
    for lane in MIX:
        if MIX[lane].targets != Targets():
            of_lane = _in_lane(lane)
            who = f"{lane}, other tenants" if lane == SHARED_LANE else lane
            results.flood(
                f"a tenant of {SHARED_LANE} floods 10x", strategy, who, of(records, of_lane), of(usually, of_lane)
            )


def _in_lane(lane: str) -> Callable[[VirtualRequest], bool]:
    return lambda request: request.lane == lane


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bursts", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--strategies", nargs="+", default=["continuous", "hybrid"])
    parser.add_argument("--load", type=float, default=LOAD, help="share of the capacity")
    parser.add_argument("--admission", action="store_true", help="shed at the door what is predicted to be late")
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    full = capacity(1)
    results = Results()
    for strategy in options.strategies:
        compare(msgspec.convert(strategy, Strategy), options.load * full, seeds, results, admission=options.admission)
    results.rows.sort(key=lambda row: row[0] != "burst 5x")
    report(
        "bursts",
        f"python -m benchmarks.bursts --seeds {options.seeds} --load {options.load:g} "
        f"--strategies {' '.join(options.strategies)}{' --admission' if options.admission else ''}",
        ["case", "strategy", "lane", "without", "with (burst: before, in, 20 s after, later)", "lost", "within target"],
        results.rows,
        {"capacity_rps": full, "load": options.load, "admission": options.admission, "rows": results.data},
    )


if __name__ == "__main__":
    main()
