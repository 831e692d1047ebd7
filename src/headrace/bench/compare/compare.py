"""``headrace bench compare A B``: what differs beyond noise, and what does not.

A and B are records files (the most can be said), summaries, or several of either (A1 A2 ... against B1 B2 ...:
then the spread between the runs decides). ``block_contrasts`` and ``summary_contrasts`` make the estimates; here
they become statements.

Many figures are compared at once, and among 20 of them one "differs" at 95 % by chance alone. So a difference is
called one only when it is beyond noise with all the comparisons taken together (Holm's rule, 1979: the chance of
a single false one among all of them is 5 %). The interval shown beside it is that figure's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from headrace.bench.compare.block_contrasts import by_blocks
from headrace.bench.compare.comparison import Comparison, Scale, Statement
from headrace.bench.compare.contrasts import EFFECT, SHARE_EFFECT, Contrast
from headrace.bench.compare.summary_contrasts import by_runs, by_summaries
from headrace.bench.record_file import read_info, read_records
from headrace.bench.report.units import show_number, show_percent
from headrace.bench.results.columns import Columns, build_columns
from headrace.bench.results.figures import FORMAT as SUMMARY_FORMAT
from headrace.bench.results.figures import Summary
from headrace.bench.results.summary import summarise_columns
from headrace.bench.results.summary_json import from_json
from headrace.bench.statistics.intervals import CONFIDENCE
from headrace.errors import ConfigError

Run = Columns | Summary
_SHORT_S = 30.0
_HEAD_BYTES = 200
"""Our JSON says what it is within its first line or two."""


def load_run(path: Path, warn: Callable[[str], None] | None = None) -> Run:
    """A records file as columns, or a summary of ours.

    ``warn`` gets a sentence when a records file's last line was cut; without it such a file is refused.
    Raises ConfigError when the file is neither.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    if f'"{SUMMARY_FORMAT}"'.encode() in begin:
        return from_json(path.read_bytes(), where=str(path))
    return build_columns(read_info(path), read_records(path, warn or _refuse))


def _refuse(warning: str) -> None:
    raise ConfigError(warning)


def compare(
    a: Sequence[Run],
    b: Sequence[Run],
    rng: np.random.Generator,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = 500,
) -> Comparison:
    """Compare the runs of A with the runs of B. ``rng`` draws the bootstrap's blocks.

    Raises ConfigError when a side is empty or the two have no lane in common.
    """
    if not a or not b:
        raise ConfigError("a comparison needs at least one run on each side", where="compare")
    of_a, of_b = [_summary(run) for run in a], [_summary(run) for run in b]
    lanes = _common_lanes(of_a + of_b)
    if not lanes:
        raise ConfigError("the runs have no lane in common: there is nothing to compare", where="compare")
    method: Literal["blocks", "runs", "summaries"]
    first_a, first_b = a[0], b[0]
    if len(a) + len(b) > 2:
        method, contrasts = "runs", by_runs(of_a, of_b, lanes, confidence)
    elif isinstance(first_a, Columns) and isinstance(first_b, Columns):
        method = "blocks"
        contrasts = by_blocks(first_a, first_b, lanes, rng, confidence=confidence, resamples=resamples)
    else:
        method, contrasts = "summaries", by_summaries(of_a[0], of_b[0], lanes, confidence)
    return Comparison(
        a=_name(of_a),
        b=_name(of_b),
        method=method,
        runs=(len(a), len(b)),
        confidence=confidence,
        warnings=_warnings(of_a, of_b, lanes),
        statements=_statements(contrasts, confidence, "runs" if method == "runs" else "requests"),
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the i-th smallest of m times m - i + 1, never falling, at most 1."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - place)))
        adjusted[i] = largest
    return adjusted


def _summary(run: Run) -> Summary:
    return summarise_columns(run) if isinstance(run, Columns) else run


def _common_lanes(summaries: Sequence[Summary]) -> list[str]:
    sets = [{group.name for group in summary.lanes if group.offered} for summary in summaries]
    return sorted(set.intersection(*sets))


def _name(summaries: Sequence[Summary]) -> str:
    run = summaries[0].run
    name = run.label or f"{run.model} at {run.target}"
    repeats = f" ({len(summaries)} runs)" if len(summaries) > 1 else ""
    simulated = " [simulated]" if any(summary.run.simulated for summary in summaries) else ""
    return f"{name}{repeats}{simulated}"


def _statements(contrasts: Sequence[Contrast], confidence: float, unit: str) -> list[Statement]:
    tested = [contrast for contrast in contrasts if not contrast.why_not]
    adjusted = dict(zip([id(contrast) for contrast in tested], holm([c.p for c in tested]), strict=True))
    return [_statement(contrast, adjusted.get(id(contrast)), confidence, unit) for contrast in contrasts]


def _statement(contrast: Contrast, p_holm: float | None, confidence: float, unit: str) -> Statement:
    start = Statement(contrast.group, contrast.figure, contrast.scale, contrast.a, contrast.b)
    if p_holm is None:
        return msgspec.structs.replace(start, words=contrast.why_not)
    change, low, high = (_change(contrast.scale, x) for x in (contrast.estimate, contrast.low, contrast.high))
    beyond = p_holm <= 1 - confidence
    more_is_better = contrast.scale != "latency"
    better: Literal["A", "B"] = "B" if (contrast.estimate > 0) == more_is_better else "A"
    statement = msgspec.structs.replace(
        start,
        change=change,
        low=low,
        high=high,
        p=contrast.p,
        p_holm=p_holm,
        beyond_noise=beyond,
        better=better if beyond else None,
        count=contrast.count,
        needed=contrast.needed,
    )
    return msgspec.structs.replace(statement, words=_words(statement, confidence, unit))


def _change(scale: Scale, estimate: float) -> float:
    return estimate if scale == "share" else float(np.expm1(estimate))


def _words(statement: Statement, confidence: float, unit: str) -> str:
    assert statement.change is not None and statement.low is not None and statement.high is not None
    if statement.beyond_noise:
        return f"B {_verb(statement)} by {_size(statement, confidence)}"
    single = statement.p is not None and statement.p <= 1 - confidence
    text = "no difference beyond noise"
    if single:
        text += f" once all comparisons are counted (alone: {_size(statement, confidence)} {_direction(statement)})"
    effect = f"{SHARE_EFFECT * 100:g} point" if statement.scale == "share" else f"{EFFECT * 100:g} %"
    if statement.needed is None or statement.count is None:
        return text
    if statement.needed <= statement.count:
        return text if single else f"{text}; {effect} would have been seen"
    return f"{text}; needs about {show_number(_two_digits(statement.needed))} {unit} a side to see {effect}"


def _verb(statement: Statement) -> str:
    if statement.scale == "latency":
        return "is faster" if statement.better == "B" else "is slower"
    return f"is {_direction(statement)}"


def _direction(statement: Statement) -> str:
    return "higher" if (statement.change or 0) > 0 else "lower"


def _size(statement: Statement, confidence: float) -> str:
    """``12 % (95 % CI 8 to 15)``: how much, without its sign; an interval across 0 keeps its signs."""
    assert statement.change is not None and statement.low is not None and statement.high is not None
    unit = "points" if statement.scale == "share" else "%"
    sign = 1 if statement.change > 0 else -1
    ends = sorted([sign * statement.low * 100, sign * statement.high * 100])
    low, high = (show_number(end) for end in ends)
    return f"{show_number(abs(statement.change) * 100)} {unit} ({show_percent(confidence)} CI {low} to {high})"


def _two_digits(count: int) -> float:
    return float(f"{count:.2g}")


def _warnings(a: Sequence[Summary], b: Sequence[Summary], lanes: Sequence[str]) -> list[str]:
    found = []
    for side, summaries in (("A", a), ("B", b)):
        for number, summary in enumerate(summaries, 1):
            name = side if len(summaries) == 1 else f"{side}{number}"
            if summary.run.simulated:
                found.append(f"{name} is simulated: its times are those of a model")
            if summary.invalid:
                found.append(f"{name} is invalid: {summary.invalid[0]}")
            if summary.window.length_s < _SHORT_S:
                found.append(f"{name} is short: {summary.window.length_s:g} s were measured")
            missing = sorted({group.name for group in summary.lanes if group.offered} - set(lanes))
            if missing:
                found.append(f"{name} has lanes that are not in every run, left out: {', '.join(missing)}")
    every = [summary.run for summary in (*a, *b)]
    schedules = {run.schedule_sha256 for run in every}
    if len(schedules) > 1 or "" in schedules:
        found.append("the runs did not have the same schedule (or do not say): the load may differ, not the server")
    if len({str(sorted((name, sorted(slo.items())) for name, slo in run.slos.items())) for run in every}) > 1:
        found.append("the runs were judged by different SLOs: attainment does not compare")
    if len({run.model for run in every}) > 1:
        found.append(f"the runs used different models: {', '.join(sorted({run.model for run in every}))}")
    if len({run.concurrency for run in every}) > 1:
        found.append("the runs differ in their loop (open, or closed with other numbers of users)")
    return found
