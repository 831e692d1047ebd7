"""Schedules of small workloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.bench.load.build_schedule import build_schedule
from headrace.bench.load.workload import TrafficClass, Workload
from headrace.bench.load.workload_file import LoadedWorkload
from headrace.bench.planned import PlannedRequest, Schedule

SHORT = TrafficClass(input_length="uniform(10, 500)", output_length="uniform(1, 64)", lane="captions")


def schedule(seed: int = 7, folder: Path = Path(), **fields: Any) -> Schedule:
    fields = {"arrivals": "poisson(50)", "duration_s": 60.0, "classes": {"short": SHORT}, **fields}
    return build_schedule(LoadedWorkload(Workload(**fields), "test", folder), seed=seed)


def legal(planned: Schedule) -> list[PlannedRequest]:
    return [request for request in planned.requests if request.malformed is None]
