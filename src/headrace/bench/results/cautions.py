"""What a reader of a run's figures must know beside them: sentences, each with its counts."""

from __future__ import annotations

import numpy as np

from headrace.bench.records import RunInfo
from headrace.bench.results.columns import Columns
from headrace.bench.results.figures import Group

_MANY_AFTER = 0.1
"""The share of requests that ended after the window from which on that is said."""
_GROWN = 1.5
"""The unanswered requests at the load's end against those at the window's middle. A queue that grows evenly has
twice as many there; one that does not grow has as many."""


def warnings_of(columns: Columns, whole: Group, lanes: list[Group]) -> list[str]:
    """The sentences on a run, in the order of their weight."""
    answered = whole.outcomes.get("ok", 0)
    found = [*_early_end(columns.info), *_after_the_load(columns, whole), *_unanswered(columns, whole)]
    if whole.wasted_tokens_per_s:
        found.append(
            f"{whole.wasted_tokens_per_s:.4g} output tokens/s came of answers that then failed; they are in no other "
            "figure"
        )
    if whole.without_usage:
        found.append(
            f"{whole.without_usage} of {answered} answers came without usage: their output tokens are counted as "
            "chunks, which is too few where a chunk holds several tokens"
        )
    if whole.served_elsewhere:
        found.append(f"{whole.served_elsewhere} requests were served in another lane than the one they asked for")
    short = [
        f"{lane.name} ({lane.latencies['e2e_s'].count})"
        for lane in sorted(lanes, key=lambda group: group.name)
        if lane.offered and lane.latencies["e2e_s"].percentiles["p99"] is None
    ]
    if short:
        found.append(f"short: a p99 needs 368 answered requests; there are fewer in {', '.join(short)}")
    return found


def _early_end(info: RunInfo) -> list[str]:
    if info.interrupted:
        return [f"the run was interrupted: its load ended after {info.duration_s:.4g} s"]
    if info.wall_s == 0:
        return [f"the run did not end: its figures are of the {info.duration_s:.4g} s that its records reach"]
    if 0 < info.wall_s < info.duration_s * 0.999:  # a schedule's last request may end a moment before its duration
        return [f"the run ended after {info.wall_s:.4g} s of {info.duration_s:.4g} s"]
    return []


def _after_the_load(columns: Columns, whole: Group) -> list[str]:
    """Requests that ended after the load: the server was behind, or the run is short for answers so long."""
    if whole.ended_after <= _MANY_AFTER * whole.offered:
        return []
    counts = f"{whole.ended_after} of {whole.offered} offered requests ended after the load"
    info = columns.info
    middle, last = (
        _pending(columns, moment_s) for moment_s in ((info.warmup_s + info.duration_s) / 2, info.duration_s)
    )
    # Of counts so small a few more are chance; three standard deviations of a Poisson count are not.
    if info.concurrency is None and last > _GROWN * middle + 3 * middle**0.5:
        return [
            f"{counts}: the server was behind, the backlog grew (from {middle} unanswered requests in the middle of "
            f"the measured window to {last} at its end). Good answers and tokens per second are those of the window; "
            "attainment counts the later answers too, and would be lower in a longer run"
        ]
    return [f"{counts}: good answers and tokens per second, which are those of the window, leave them out"]


def _pending(columns: Columns, moment_s: float) -> int:
    """Requests that were due and had not ended at a moment."""
    return int(np.sum((columns.times["due_s"] <= moment_s) & ~(columns.times["end_s"] <= moment_s)))


def _unanswered(columns: Columns, whole: Group) -> list[str]:
    found = []
    failed = whole.offered - whole.outcomes.get("ok", 0)
    if failed:
        found.append(
            f"{failed} of {whole.offered} offered requests were not answered whole; latencies and their "
            "percentiles are those of the answered ones, attainment and goodput count the others as misses"
        )
    if whole.empty:
        found.append(f"{whole.empty} answers had no content: they count as misses, and in no rate and no latency")
    closed = columns.info.concurrency is not None
    cut_off = whole.outcomes.get("cancelled", 0)
    if closed and cut_off:
        found.append(f"{cut_off} requests were still without their whole answer when the run ended: they are misses")
    if whole.not_offered:
        found.append(
            f"{whole.not_offered} requests were cut off by the end of the run before anybody had waited for their "
            "answers: they are in no figure"
        )
    return found
