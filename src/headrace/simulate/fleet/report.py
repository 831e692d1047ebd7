"""A simulated run's own facts for a terminal: what every group of replicas did, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.bench.report.grid import Grid
from headrace.bench.report.units import NOTHING, show_number, show_percent
from headrace.simulate.fleet.fleet import GroupFacts


def groups_grid(groups: Sequence[GroupFacts]) -> Grid:
    """One row per group."""
    rows = []
    for group in groups:
        replicas = group.replicas
        asked = sum([one.asked_tokens for one in replicas])
        hits = sum([one.hit_tokens for one in replicas])
        rows.append(
            [
                group.name,
                f"{group.mean_replicas:.4g}",
                str(group.most_replicas),
                show_percent(group.busy),
                f"{sum([one.routed for one in replicas]):,}",
                f"{sum([one.shed for one in replicas]):,}",
                f"{sum([one.lost for one in replicas]):,}",
                f"{sum([one.preempted for one in replicas]):,}",
                show_percent(hits / asked) if asked else NOTHING,
                NOTHING if group.cost is None else show_number(group.cost),
            ]
        )
    headings = ("group", "replicas", "most", "busy", "requests", "shed", "lost", "preempted", "prefix hits", "cost")
    return Grid(headings, rows)
