"""The table that ``serve`` prints at start: which lane targets this machine can meet."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from headrace.lanes.feasibility import LaneFeasibility, TargetFeasibility

_SHORT_NAMES = {"p99_ttft_s": "TTFT", "p99_tpot_s": "TPOT", "p99_e2e_s": "E2E"}


def format_duration(seconds: float) -> str:
    """``seconds`` in the unit a person would choose: ``85 ms``, ``1.2 s``, ``3 min``, ``never``."""
    if math.isinf(seconds):
        return "never"
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min"


def feasibility_table(rows: Sequence[LaneFeasibility]) -> Table:
    """A rich table: a line per lane, its typical request, the prediction and each target's verdict."""
    table = Table(title="Lane targets on this machine, for a typical request when idle", title_justify="left")
    table.add_column("lane", no_wrap=True)
    table.add_column("prompt + output tokens", justify="right")
    for column in ("TTFT", "TPOT", "E2E"):
        table.add_column(column, justify="right")
    table.add_column("targets")
    for row in rows:
        table.add_row(
            row.lane,
            f"{row.prompt_tokens} + {row.output_tokens}",
            *(format_duration(value) for value in (row.ttft_s, row.tpot_s, row.e2e_s)),
            Text(_verdict(row), style="green" if row.met else "red"),
        )
    return table


def feasibility_lines(rows: Sequence[LaneFeasibility]) -> list[str]:
    """The same as plain lines, for a log."""
    return [
        f"lane {row.lane}: {row.prompt_tokens} + {row.output_tokens} tokens:"
        f" TTFT {format_duration(row.ttft_s)}, TPOT {format_duration(row.tpot_s)},"
        f" E2E {format_duration(row.e2e_s)}; {_verdict(row)}"
        for row in rows
    ]


def _verdict(row: LaneFeasibility) -> str:
    if not row.targets:
        return "no target"
    return ", ".join(_target_verdict(target) for target in row.targets)


def _target_verdict(target: TargetFeasibility) -> str:
    word = "can be met" if target.met else "CANNOT be met"
    return f"{_SHORT_NAMES[target.name]} {format_duration(target.target_s)} {word}"
