"""From a run's records to its summary: whole run, lanes, classes, refusals, and whether the run is valid.

**Measured window.** From the end of the warm-up to the end of the load, ``[warmup_s, duration_s]``. A request
belongs to it by its *due* time, so that a slow server cannot push its slow requests out of it; it counts
however late its answer came. Tokens, completions and good answers per second are those that arrived inside the
window: the same time above and below the line.

**Offered.** Every legal request due in the window, sent or not, except those of a closed loop that were cut off
without having been waited for (``judge`` has the exact rule). Attainment = good / offered.

Illegal requests have a table of their own and are in no other figure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from headrace.bench.records import RequestRecord, RunInfo
from headrace.bench.results.cautions import warnings_of
from headrace.bench.results.columns import Columns, build_columns
from headrace.bench.results.figures import VERSION, Failure, Group, Limits, Refusals, Summary, Window
from headrace.bench.results.groups import GroupMaker, renamed, sample_p99
from headrace.bench.results.validity import generator_faults
from headrace.bench.statistics.intervals import CONFIDENCE
from headrace.errors import ConfigError

_SHOWN_FAILURES = 20


def summarise(info: RunInfo, records: Iterable[RequestRecord], limits: Limits | None = None) -> Summary:
    """The summary of a run.

    Raises ConfigError when the warm-up leaves no measured window, and for records that contradict themselves.
    """
    return summarise_columns(build_columns(info, records), limits)


def summarise_columns(columns: Columns, limits: Limits | None = None) -> Summary:
    """The summary of a run whose records are columns already."""
    info, limits = columns.info, limits or Limits()
    window = measured_window(info)
    maker = GroupMaker(columns, window)
    whole = maker.make("whole", "all", np.ones(len(columns), dtype=np.bool_))
    pairs = sorted(set(zip(columns.lane_ids.tolist(), columns.class_ids.tolist(), strict=True)))
    same = len(pairs) == len(columns.lanes) == len(columns.classes)
    lanes = _lanes(columns, maker, whole)
    if same:
        by_lane = {group.name: group for group in lanes}
        classes = [renamed(by_lane[columns.lanes[lane]], "class", columns.classes[name]) for lane, name in pairs]
    else:
        classes = [maker.make("class", name, columns.class_ids == i) for i, name in enumerate(columns.classes)]
    lag_p99_s = sample_p99(columns.send_lags_s)
    due_s = columns.times["due_s"]
    return Summary(
        version=VERSION,
        run=info,
        window=window,
        limits=limits,
        confidence=CONFIDENCE,
        send_lag_p99_s=lag_p99_s,
        invalid=_invalid(columns, whole, lag_p99_s, limits),
        warnings=warnings_of(columns, whole, lanes),
        records=len(columns) + sum(columns.refusals.values()),
        legal_in_window=int(columns.measured.sum()),
        legal_before_window=int((due_s < window.start_s).sum()),
        legal_after_window=int((due_s > window.end_s).sum()),
        whole=whole,
        lanes=sorted(lanes, key=lambda group: group.name),
        classes=sorted(classes, key=lambda group: group.name),
        classes_are_lanes=same,
        refusals=_refusals(columns),
        failures=_failures(columns),
    )


def measured_window(info: RunInfo) -> Window:
    """What of the run is measured. Raises ConfigError when the warm-up takes all of it."""
    if info.warmup_s >= info.duration_s:
        raise ConfigError(
            f"a warm-up of {info.warmup_s:g} s leaves nothing of a run of {info.duration_s:g} s to measure; "
            "make the run longer or the warm-up shorter",
            where="warmup_s",
        )
    return Window(info.warmup_s, info.duration_s)


def _lanes(columns: Columns, maker: GroupMaker, whole: Group) -> list[Group]:
    if len(columns.lanes) == 1:
        return [renamed(whole, "lane", columns.lanes[0])]
    return [maker.make("lane", name, columns.lane(name)) for name in columns.lanes]


def _invalid(columns: Columns, whole: Group, lag_p99_s: float | None, limits: Limits) -> list[str]:
    reasons = []
    if columns.info.wall_s == 0:
        reasons.append("the run that wrote these records did not end: requests are missing, its health is not known")
    if whole.offered == 0:
        reasons.append("no legal request was due in the measured window: there is nothing to report")
    own_failures, example = columns.own_failures
    faults = generator_faults(
        lag_p99_s,
        columns.info.health,
        own_failures=own_failures,
        example=example,
        send_lag_limit_s=limits.send_lag_p99_s,
        cpu_share_limit=limits.cpu_share,
    )
    return [*reasons, *faults]


def _refusals(columns: Columns) -> list[Refusals]:
    verdicts: dict[str, dict[str, int]] = defaultdict(lambda: {"right": 0, "wrong": 0, "unjudged": 0})
    statuses: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (kind, verdict, status), count in columns.refusals.items():
        verdicts[kind][verdict] += count
        statuses[kind]["none" if status is None else str(status)] += count
    return [
        Refusals(
            kind=kind,
            count=sum(verdicts[kind].values()),
            right=verdicts[kind]["right"],
            wrong=verdicts[kind]["wrong"],
            unjudged=verdicts[kind]["unjudged"],
            statuses=dict(sorted(statuses[kind].items())),
        )
        for kind in sorted(verdicts)
    ]


def _failures(columns: Columns) -> list[Failure]:
    ordered = sorted(columns.failures.items(), key=lambda item: (-item[1], item[0][0], item[0][2]))
    return [Failure(*key, count=count) for key, count in ordered[:_SHOWN_FAILURES]]
