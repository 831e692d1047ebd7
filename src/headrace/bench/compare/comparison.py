"""What a comparison says: as a value, as JSON, as a table."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from headrace.bench.report.units import NOTHING, show_number, show_seconds, show_share
from headrace.bench.report.visible import visible

FORMAT = "headrace-bench-comparison"
VERSION = 1

Scale = Literal["latency", "share", "rate"]
"""Latencies (less is better) and rates (more is better) are compared as ratios, shares as differences."""


class Statement(Struct, frozen=True):
    """One figure of one group in A and in B.

    ``change``: B against A, relative (0.1: B's is 10 % higher), for a share the difference (0.01: one point).
    ``low`` and ``high``: its interval, of the comparison's confidence, for this statement alone. ``p``: the
    probability of a difference at least so large when there is none; ``p_holm``: the same with all the
    statements of the comparison taken together (Holm 1979), which is what ``beyond_noise`` goes by.
    ``count``: requests (or runs) that a side has; ``needed``: how many would show a difference of 5 % (of a share:
    one point) with a power of 80 %. A figure that cannot be compared has no ``change``; ``words`` says why.
    """

    group: str
    figure: str
    scale: Scale
    a: float | None
    b: float | None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    beyond_noise: bool = False
    better: Literal["A", "B"] | None = None
    count: float | None = None
    needed: int | None = None
    words: str = ""


class Comparison(Struct, frozen=True, tag_field="format", tag=FORMAT):
    """``method``: where the intervals come from: blocks of time in one run a side, the spread between repeated
    runs, or the intervals in two summaries."""

    a: str
    b: str
    method: Literal["blocks", "runs", "summaries"]
    runs: tuple[int, int]
    confidence: float
    warnings: list[str]
    statements: list[Statement]
    version: int = VERSION

    @property
    def differs(self) -> bool:
        """Something differs beyond noise."""
        return any(statement.beyond_noise for statement in self.statements)


METHODS = {
    "blocks": "intervals from bootstrap over blocks of time",
    "runs": "intervals from the spread between runs",
    "summaries": "intervals from the summaries, which take requests as independent; records files say more",
}


def comparison_to_json(comparison: Comparison) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(comparison), indent=2)


def comparison_table(comparison: Comparison) -> Table:
    """One row a statement, for a terminal."""
    tests = sum([statement.p is not None for statement in comparison.statements])
    table = Table(
        title=Text(f"A: {visible(comparison.a)}\nB: {visible(comparison.b)}"),
        title_justify="left",
        box=None,
        pad_edge=False,
        caption=Text(f"{METHODS[comparison.method]}; {tests} comparisons, taken together by Holm's rule"),
        caption_justify="left",
    )
    for heading, justify in (("", "left"), ("", "left"), ("A", "right"), ("B", "right"), ("B against A", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    previous = None
    for statement in comparison.statements:
        style = "" if not statement.beyond_noise else "green" if statement.better == "B" else "red"
        table.add_row(
            Text("" if statement.group == previous else visible(statement.group)),
            Text(statement.figure),
            Text(show_value(statement.scale, statement.a)),
            Text(show_value(statement.scale, statement.b)),
            Text(visible(statement.words), style=style),
        )
        previous = statement.group
    return table


def show_value(scale: Scale, value: float | None) -> str:
    """A figure in its unit."""
    if value is None:
        return NOTHING
    if scale == "latency":
        return show_seconds(value)
    return show_share(value) if scale == "share" else f"{show_number(value)} /s"
