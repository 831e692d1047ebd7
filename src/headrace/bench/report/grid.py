"""A table of figures on a terminal that never cuts one: what does not fit side by side is printed line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.bench.report.visible import visible

_NARROWEST_NAME = 16
"""Cells down to which the first column, of names, may be folded."""
_GAP = 2


@dataclass(frozen=True)
class Grid:
    """Rows of cells under ``headings``; the first cell of a row is its name. A cell may have several lines.

    ``labels``: what the cells are called where they stand alone, in place of headings that need their neighbours.
    ``styles``: rich's style of a row, by position; none where there is none.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: Sequence[str] = ()
    title: str = ""
    styles: dict[int, str] = field(default_factory=dict)


def print_grid(grid: Grid, console: Console) -> None:
    """As a table where every figure fits, else as one block of lines per row."""
    names, *others = [_width(column) for column in zip(grid.headings, *grid.rows, strict=True)]
    needed = min(names, _NARROWEST_NAME) + sum(others) + _GAP * len(others)
    if needed <= console.width:
        console.print(_table(grid))
    else:
        _print_blocks(grid, console)


def _table(grid: Grid) -> Table:
    title = Text(visible(grid.title), style="bold") if grid.title else None
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for i, heading in enumerate(grid.headings):
        table.add_column(heading, justify="right" if i else "left", overflow="fold", no_wrap=i > 0)
    for i, row in enumerate(grid.rows):
        # Text, not markup: a lane's name may hold square brackets.
        table.add_row(*[Text(_shown(cell)) for cell in row], style=grid.styles.get(i))
    return table


def _print_blocks(grid: Grid, console: Console) -> None:
    if grid.title:
        console.print(Text(visible(grid.title), style="bold"))
    labels = list(grid.labels or grid.headings)
    for i, row in enumerate(grid.rows):
        style = grid.styles.get(i, "")
        name = visible(row[0]) if not labels[0] else f"{labels[0]}: {visible(row[0])}"
        console.print(Text(name, style=style or "bold"))
        for label, cell in zip(labels[1:], row[1:], strict=True):
            value, *more = _shown(cell).split("\n")
            beside = f" ({' '.join(more)})" if more else ""
            console.print(Text(f"  {label}: {value}{beside}", style=style))


def _width(cells: Sequence[str]) -> int:
    return max([cell_len(line) for cell in cells for line in _shown(cell).split("\n")])


def _shown(cell: str) -> str:
    return visible(cell, keep="\n")
