"""From a workload and a seed to the whole load of a run, before its first request.

Everything is fixed here: times, classes, lengths, text seeds, which requests are illegal. The same workload, seed and
context give the same schedule, and ``schedule_sha256`` says whether two schedules are the same load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

import msgspec

from headrace.bench.load.arrivals import ClosedLoop, OpenArrivals, TraceReplay, parse_arrivals
from headrace.bench.load.class_plan import IllegalPlan, class_plans
from headrace.bench.load.closed_plan import plan_closed, requests_per_user
from headrace.bench.load.context_fit import ContextFit
from headrace.bench.load.open_plan import stream_open
from headrace.bench.load.streams import Choices, Purpose, generator
from headrace.bench.load.trace_plan import plan_trace
from headrace.bench.load.workload import Workload
from headrace.bench.load.workload_file import LoadedWorkload, check_workload, gives_lengths
from headrace.bench.planned import PlannedRequest, Schedule, SloTarget
from headrace.errors import ConfigError

_NS_PER_S: Final = 1_000_000_000
_HASHED_TOGETHER: Final = 4096


def build_schedule(loaded: LoadedWorkload, *, seed: int) -> Schedule:
    """The schedule of a workload.

    In a closed loop every user's row is long enough for requests of 20 ms, as far as a million requests allow;
    ``source["requests_per_user"]`` says how long it is. Raises ConfigError for a workload that is not right, a trace
    that cannot be read, and a load without a single request.
    """
    stream = stream_schedule(loaded, seed=seed)
    requests = list(stream.requests)
    if not requests:
        raise ConfigError(f"not a single request comes in {stream.duration_s:g} s", where="arrivals")
    return Schedule(
        requests=requests,
        duration_s=stream.duration_s,
        seed=seed,
        source=stream.source,
        slos=stream.slos,
        concurrency=stream.concurrency,
    )


@dataclass(frozen=True)
class ScheduleStream:
    """A schedule whose requests come one after the other, in the order of their index, and are made as they are
    taken: for loads that would not fit into memory at once."""

    requests: Iterator[PlannedRequest]
    duration_s: float
    seed: int
    source: dict[str, object]
    slos: dict[str, SloTarget]
    concurrency: int | None


def stream_schedule(loaded: LoadedWorkload, *, seed: int) -> ScheduleStream:
    """The same as ``build_schedule``, request by request; only an open load that is no trace is not held in memory.
    Raises ConfigError for a workload that is not right and a trace that cannot be read."""
    workload = loaded.workload
    check_workload(workload, loaded.folder)
    arrivals = parse_arrivals(workload.arrivals, folder=loaded.folder)
    fit = ContextFit(workload.scale_to_context_tokens)
    source = _source(loaded, fit)
    requests: Iterable[PlannedRequest]
    if isinstance(arrivals, ClosedLoop):
        source["requests_per_user"] = _per_user(workload, arrivals)
        duration_s = _given_duration_s(workload)
        requests = _closed(loaded, arrivals, seed, fit)
    elif isinstance(arrivals, TraceReplay):
        duration_s = _trace_duration_s(workload, arrivals)
        if gives_lengths(workload):
            requests = _open(loaded, arrivals, seed, fit, duration_s)
        else:
            requests = _replayed(workload, arrivals, seed, fit, duration_s)
        name = "trace_rows_filled" if arrivals.options.keep_empty else "trace_rows_left_out"
        if without_tokens := arrivals.rows_without_tokens(duration_s):
            source[name] = without_tokens
    else:
        duration_s = _given_duration_s(workload)
        requests = _open(loaded, arrivals, seed, fit, duration_s)
    return ScheduleStream(
        requests=iter(requests),
        duration_s=duration_s,
        seed=seed,
        source=source,
        slos={name: traffic.slo for name, traffic in workload.classes.items()},
        concurrency=arrivals.users if isinstance(arrivals, ClosedLoop) else None,
    )


def schedule_sha256(schedule: Schedule) -> str:
    """The digest of the load: requests, duration, targets and concurrency, as JSON with sorted keys. ``seed`` and
    ``source`` say where a load came from and are left out."""
    digest = ScheduleDigest(schedule.duration_s, schedule.slos, schedule.concurrency)
    for first in range(0, len(schedule.requests), _HASHED_TOGETHER):
        digest.add(schedule.requests[first : first + _HASHED_TOGETHER])
    return digest.sha256()


class ScheduleDigest:
    """``schedule_sha256`` of a load that comes in pieces."""

    def __init__(self, duration_s: float, slos: Mapping[str, SloTarget], concurrency: int | None) -> None:
        self._encoder = msgspec.json.Encoder(order="sorted")
        self._digest = sha256(self._encoder.encode((duration_s, slos, concurrency)))

    def add(self, requests: Sequence[PlannedRequest]) -> None:
        """The next requests, in order."""
        self._digest.update(self._encoder.encode_lines(requests))

    def sha256(self) -> str:
        """Of all so far."""
        return self._digest.hexdigest()


def _open(
    loaded: LoadedWorkload, arrivals: OpenArrivals, seed: int, fit: ContextFit, duration_s: float
) -> Iterator[PlannedRequest]:
    workload = loaded.workload
    return stream_open(
        class_plans(workload, seed=seed, fit=fit, folder=loaded.folder),
        _class_choices(workload, seed),
        IllegalPlan(workload.malformed, seed=seed, fit=fit),
        map(int, arrivals.times_ns(generator(seed, Purpose.ARRIVALS), duration_s)),
        round(duration_s * _NS_PER_S),
    )


def _closed(loaded: LoadedWorkload, arrivals: ClosedLoop, seed: int, fit: ContextFit) -> list[PlannedRequest]:
    workload = loaded.workload
    return plan_closed(
        class_plans(workload, seed=seed, fit=fit, folder=loaded.folder),
        _class_choices(workload, seed),
        IllegalPlan(workload.malformed, seed=seed, fit=fit),
        users=arrivals.users,
        per_user=_per_user(workload, arrivals),
        think_ns=round(arrivals.think_s * _NS_PER_S),
    )


def _replayed(
    workload: Workload, arrivals: TraceReplay, seed: int, fit: ContextFit, duration_s: float
) -> list[PlannedRequest]:
    illegal = IllegalPlan(workload.malformed, seed=seed, fit=fit)
    duration_ns = round(duration_s * _NS_PER_S)
    return plan_trace(arrivals.rows(), workload, illegal, seed=seed, fit=fit, duration_ns=duration_ns)


def _class_choices(workload: Workload, seed: int) -> Choices:
    weights = {name: traffic.weight for name, traffic in workload.classes.items()}
    return Choices(weights, generator(seed, Purpose.CLASSES))


def _per_user(workload: Workload, arrivals: ClosedLoop) -> int:
    return requests_per_user(arrivals.users, _given_duration_s(workload), arrivals.think_s)


def _given_duration_s(workload: Workload) -> float:
    assert workload.duration_s is not None, "checked: only a trace needs no duration"
    return workload.duration_s


def _trace_duration_s(workload: Workload, arrivals: TraceReplay) -> float:
    """The given duration; else the trace's window; else the whole second after the last row."""
    if workload.duration_s is not None:
        return workload.duration_s
    if arrivals.options.duration_s is not None:
        return arrivals.options.duration_s / arrivals.options.speed
    last_ns = max((row.at_ns for row in arrivals.rows()), default=0)
    return float(last_ns // _NS_PER_S + 1)


def _source(loaded: LoadedWorkload, fit: ContextFit) -> dict[str, object]:
    """What reproduces the schedule, and by which factor lengths were scaled."""
    factors = {name: fit.factor(traffic) for name, traffic in loaded.workload.classes.items()}
    return {
        "name": loaded.name,
        "workload": msgspec.to_builtins(loaded.workload),
        "length_factors": {name: factor for name, factor in factors.items() if factor != 1},
    }
