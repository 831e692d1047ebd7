"""The summary as CSV, for spreadsheets: one table of groups, one of latency distributions.

The headers do not depend on the run. A figure that cannot be given is an empty cell. Numbers are plain, with a
point, seconds and per second as the column's name says. Names stand as they are, control characters and all (quoted
as CSV quotes): a program that joins these rows with others needs the names themselves.
"""

from __future__ import annotations

import csv
import io

from headrace.bench.results.columns import OUTCOMES, REASONS
from headrace.bench.results.figures import METRICS, Group, Summary
from headrace.bench.statistics.quantiles import PERCENTILES

GROUP_COLUMNS = (
    "kind",
    "name",
    "offered",
    "good",
    "good_from_due",
    "not_offered",
    "attainment",
    "attainment_low",
    "attainment_high",
    "attainment_from_due",
    "offered_rps",
    "sent_rps",
    "completed_rps",
    "goodput_rps",
    "input_tokens_per_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    "wasted_tokens_per_s",
    "empty",
    "ended_after",
    *(f"outcome_{name}" for name in OUTCOMES),
    *(f"missed_by_{name}" for name in REASONS),
    *(f"{metric.removesuffix('_s')}_{name}_s" for metric in METRICS for name in PERCENTILES),
)
"""The header of ``groups_csv``: one row per group, everything in it."""

LATENCY_COLUMNS = (
    "kind",
    "name",
    "metric",
    "count",
    "independent",
    "mean",
    "std",
    "min",
    "max",
    *(f"{name}{end}" for name in PERCENTILES for end in ("", "_low", "_high")),
)
"""The header of ``latencies_csv``: one row per group and metric, with the intervals. The metric's name ends in
its unit."""


def groups_csv(summary: Summary) -> str:
    """One row for the whole run, one per lane, one per class."""
    return _table(GROUP_COLUMNS, [_group_row(group) for group in _all_groups(summary)])


def latencies_csv(summary: Summary) -> str:
    """One row per group and metric."""
    rows = []
    for group in _all_groups(summary):
        for metric in METRICS:
            spread = group.latencies[metric]
            row: dict[str, object] = {"kind": group.kind, "name": group.name, "metric": metric}
            row |= {name: getattr(spread, name) for name in ("count", "independent", "mean", "std", "min", "max")}
            for name, figure in spread.percentiles.items():
                if figure is not None:
                    row |= {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}
            rows.append(row)
    return _table(LATENCY_COLUMNS, rows)


def _all_groups(summary: Summary) -> list[Group]:
    return [summary.whole, *summary.lanes, *summary.classes]


def _group_row(group: Group) -> dict[str, object]:
    row: dict[str, object] = {}
    for name in GROUP_COLUMNS:
        if hasattr(group, name):
            row[name] = getattr(group, name)
    shares = (("attainment", group.attainment), ("attainment_from_due", group.attainment_from_due))
    for name, share in shares:
        row[name] = None if share is None else share.value
    if group.attainment is not None:
        row |= {"attainment_low": group.attainment.low, "attainment_high": group.attainment.high}
    row |= {f"outcome_{name}": group.outcomes.get(name, 0) for name in OUTCOMES}
    row |= {f"missed_by_{name}": group.missed_by.get(name, 0) for name in REASONS}
    for metric in METRICS:
        for name, figure in group.latencies[metric].percentiles.items():
            row[f"{metric.removesuffix('_s')}_{name}_s"] = None if figure is None else figure.value
    return row


def _table(columns: tuple[str, ...], rows: list[dict[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
