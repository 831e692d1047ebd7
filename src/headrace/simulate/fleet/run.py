"""One simulated run: a workload sent to a scenario, with the records and facts of a measured one.

Everything comes from the scenario, the workload and one seed: the same three give the same bytes. Memory holds what is
alive, and the records where ``keep`` asks for them.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

import headrace
from headrace.bench.load.build_schedule import ScheduleDigest, ScheduleStream, stream_schedule
from headrace.bench.load.workload_file import LoadedWorkload
from headrace.bench.planned import PlannedRequest
from headrace.bench.records import GeneratorHealth, RequestRecord, RunInfo, new_record
from headrace.bench.session import check_warmup
from headrace.config.schema import Config
from headrace.errors import ConfigError
from headrace.simulate.fleet.client import Client
from headrace.simulate.fleet.fleet import Fleet, GroupFacts
from headrace.simulate.fleet.lanes_of import config_file, config_for
from headrace.simulate.fleet.scenario_file import LoadedScenario, check_scenario
from headrace.simulate.simulation import Event, Simulation, SimulationError

STARTED_AT: Final = "1970-01-01T00:00:00+00:00"
"""A simulated run begins when its clock does: the date of the simulation would make two of the same differ."""
_NS: Final = 1e9
_HASHED_TOGETHER: Final = 4096
_EVENTS_TOGETHER: Final = 20_000

Sink = Callable[[RequestRecord], None]


@dataclass(frozen=True)
class RunOptions:
    """``drain_s``: how long requests may still run after the load; ``warmup_s``: what figures leave out at the
    beginning. ``checked``: all accounts are compared now and then, SimulationError for a difference."""

    seed: int = 0
    warmup_s: float = 0.0
    drain_s: float = 60.0
    label: str = ""
    checked: bool = False


@dataclass(frozen=True)
class SimulatedRun:
    """What came of it. ``ended_s``: when the last request had ended, or the drain was over."""

    info: RunInfo
    groups: list[GroupFacts]
    ended_s: float
    events: int
    peak_in_flight: int
    records: list[RequestRecord] = field(default_factory=list)


class SimulatedLoad:
    """A workload in front of a scenario, ready to run once."""

    def __init__(self, scenario: LoadedScenario, workload: LoadedWorkload, options: RunOptions) -> None:
        check_scenario(scenario.scenario)
        self._scenario = scenario
        self._options = options
        self.stream: ScheduleStream = stream_schedule(workload, seed=options.seed)
        check_warmup(options.warmup_s, self.stream.duration_s)
        self.config: Config = lanes_config(scenario, workload)
        self._workload = workload

    def first_info(self) -> RunInfo:
        """The run's facts before it."""
        stream, options = self.stream, self._options
        scenario = self._scenario
        return RunInfo(
            tool_version=headrace.__version__,
            target=f"simulated:{scenario.name}",
            model="simulated",
            started_at=STARTED_AT,
            duration_s=stream.duration_s,
            wall_s=0.0,
            warmup_s=options.warmup_s,
            seed=options.seed,
            source={**stream.source, "scenario": msgspec.to_builtins(scenario.scenario)},
            slos={
                name: {key: value for key, value in msgspec.to_builtins(slo).items() if value is not None}
                for name, slo in stream.slos.items()
            },
            health=GeneratorHealth(0.0, 0.0, 0),
            simulated=True,
            concurrency=stream.concurrency,
            label=options.label,
        )

    def run(self, sink: Sink, progress: Callable[[float], None] | None = None) -> SimulatedRun:
        """Run it. ``sink`` gets every record as its request ends, ``progress`` the simulated time now and then.

        Raises ConfigError when not a single request comes, SimulationError for a part that breaks a promise.
        """
        stream, options, spec = self.stream, self._options, self._scenario.scenario.gateway
        digest = ScheduleDigest(stream.duration_s, stream.slos, stream.concurrency)
        simulation = Simulation(options.seed)
        client: Client

        def ended(record: RequestRecord, now_s: float) -> None:
            sink(record)
            client.ended(record, now_s)

        def send(planned: PlannedRequest, due_ns: int, ready_ns: int, now_s: float) -> Iterable[Event]:
            return fleet.gateway.arrive(planned, due_ns, ready_ns, now_s)

        def over() -> bool:
            quiet = client.exhausted and not client.unsent and not fleet.gateway.in_flight
            return quiet and simulation.now_s >= stream.duration_s

        fleet = Fleet(simulation, self._scenario.scenario, self.config, ended, over)
        client = Client(
            simulation,
            _hashed(stream.requests, digest),
            send,
            duration_s=stream.duration_s,
            closed=stream.concurrency is not None,
            network_s=spec.network_s,
        )
        simulation.add(*fleet.begin())
        simulation.add(*client.begin())
        self._happen(simulation, fleet, progress)
        now_s = simulation.now_s
        fleet.gateway.give_up(now_s)
        for request in client.unsent:
            sink(_unsent(request, now_s))
        if not client.sent and not client.unsent:
            raise ConfigError(f"not a single request comes in {stream.duration_s:g} s", where="arrivals")
        wall_s = max(now_s, stream.duration_s)
        info = msgspec.structs.replace(
            self.first_info(),
            wall_s=wall_s,
            health=GeneratorHealth(0.0, 0.0, fleet.gateway.peak_in_flight),
            schedule_sha256=digest.sha256(),
        )
        facts = fleet.facts(wall_s)
        info = msgspec.structs.replace(info, machine={"simulated_fleet": msgspec.to_builtins(facts)})
        return SimulatedRun(info, facts, now_s, simulation.happened, fleet.gateway.peak_in_flight)

    def _happen(self, simulation: Simulation, fleet: Fleet, progress: Callable[[float], None] | None) -> None:
        """Let everything happen until all is answered, or the drain is over."""
        last_s = self.stream.duration_s + self._options.drain_s
        while simulation.next_s <= last_s:
            simulation.run(last_s, most=_EVENTS_TOGETHER, to_the_end=False)
            if progress is not None:
                progress(simulation.now_s)
            if self._options.checked:
                problem = fleet.check_integrity()
                if problem is not None:
                    raise SimulationError(f"at {simulation.now_s} s: {problem}")
        if simulation.next_s < math.inf:
            simulation.run(last_s)


def lanes_config(scenario: LoadedScenario, workload: LoadedWorkload) -> Config:
    """The configuration that the simulated gateway has. Raises ConfigError."""
    named = scenario.scenario.config
    if named is None:
        return config_for(workload.workload, workload.folder)
    return config_file(Path(scenario.folder) / named)


def simulate(
    scenario: LoadedScenario, workload: LoadedWorkload, options: RunOptions, *, sink: Sink | None = None
) -> SimulatedRun:
    """A whole run; without a ``sink`` the result has the records. Raises ConfigError."""
    records: list[RequestRecord] = []
    with quiet_collector():
        run = SimulatedLoad(scenario, workload, options).run(records.append if sink is None else sink)
    return SimulatedRun(run.info, run.groups, run.ended_s, run.events, run.peak_in_flight, records)


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """The cycle collector looks at everything alive; a run makes few cycles and keeps much: it is asked rarely."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _hashed(requests: Iterator[PlannedRequest], digest: ScheduleDigest) -> Iterator[PlannedRequest]:
    while piece := list(islice(requests, _HASHED_TOGETHER)):
        digest.add(piece)
        yield from piece


def _unsent(request: PlannedRequest, now_s: float) -> RequestRecord:
    """A later turn that was due, and whose conversation was behind until the end."""
    now_ns = round(now_s * _NS)
    due_ns = request.due_ns or 0
    record = new_record(request, due_ns, max(due_ns, now_ns))
    record.end_ns = record.ready_ns
    record.error = "the run ended before it was sent"
    return record
