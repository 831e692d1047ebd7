"""What a sweep was told, measured and found; as a value, as JSON, as rows of a table, as lines of a plot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Struct
from rich.table import Table
from rich.text import Text

from headrace.bench.report.plots import RateLine
from headrace.bench.report.units import NOTHING, show_number, show_range, show_seconds, show_share
from headrace.bench.report.visible import visible
from headrace.bench.statistics.intervals import two_sided_z
from headrace.errors import ConfigError

FORMAT = "headrace-bench-sweep"
VERSION = 1

Verdict = Literal["holds", "fails", "undecided", "invalid"]


class SweepSettings(Struct, frozen=True):
    """``target``: the share of every lane's requests that must be good. ``trials``: how often an undecided rate is
    measured at most; ``confirmations``: how often the answer is measured again; ``most_trials``: the end in any
    case. ``tolerance``: how far apart the answer and the first rate that does not hold may be (0.05: 5 %)."""

    start_rps: float
    duration_s: float = 60.0
    target: float = 0.99
    confidence: float = 0.95
    tolerance: float = 0.05
    trials: int = 3
    confirmations: int = 1
    most_trials: int = 40
    lowest_rps: float = 0.01
    highest_rps: float = 100_000.0

    @property
    def looks(self) -> int:
        """How often a rate's verdict may be looked at."""
        return self.trials + self.confirmations

    @property
    def z(self) -> float:
        """The reach of one look's interval, in standard errors."""
        return two_sided_z(1 - (1 - self.confidence) / self.looks)

    @property
    def fewest_requests(self) -> int:
        """How many requests can show the target when all are good: Wilson's lower end is then n / (n + z^2)."""
        return math.ceil(self.z**2 * self.target / (1 - self.target))


class LaneTrial(Struct, frozen=True):
    """A lane in one trial, or in a rate's trials together."""

    good: int
    offered: int
    ttft_p99_s: float | None = None
    e2e_p99_s: float | None = None


class Trial(Struct, frozen=True):
    """One measurement. ``invalid``: the generator's faults, empty when there are none."""

    rate_rps: float
    duration_s: float
    lanes: dict[str, LaneTrial]
    goodput_rps: float = 0.0
    output_tokens_per_s: float = 0.0
    simulated: bool = False
    invalid: list[str] = []


class RatePoint(Struct, frozen=True):
    """A rate with its trials pooled. ``lows`` and ``highs``: the interval of each lane's attainment, at the level
    that one look has. Goodput and tokens per second are means over the valid trials."""

    rate_rps: float
    trials: int
    valid_trials: int
    verdict: Verdict
    lanes: dict[str, LaneTrial]
    lows: dict[str, float]
    highs: dict[str, float]
    goodput_rps: float | None
    output_tokens_per_s: float | None


class SweepResult(Struct, frozen=True, tag_field="format", tag=FORMAT):
    """``answer_rps``: the highest rate that was shown to hold, None when none was. ``finding`` says it in words,
    ``notes`` what speaks against it."""

    settings: SweepSettings
    answer_rps: float | None
    first_not_holding_rps: float | None
    reason: str
    finding: str
    notes: list[str]
    points: list[RatePoint]
    trials: list[Trial]
    version: int = VERSION


@dataclass(frozen=True)
class NamedLine:
    """A lane's line in the plot of attainment against rate."""

    name: str
    numbers: RateLine


SWEEP_HEADINGS = ("rate /s", "verdict", "lane", "attainment", "interval", "TTFT p99", "E2E p99", "goodput /s", "trials")
SWEEP_TEXT_COLUMNS = 3
"""The first headings stand over text, the others over numbers."""


def sweep_rows(result: SweepResult) -> list[list[str]]:
    """The points as text, one row per rate and lane, under ``SWEEP_HEADINGS``."""
    rows = []
    for point in result.points:
        shown = [show_number(point.rate_rps), point.verdict]
        rest = [show_number(point.goodput_rps), str(point.trials)]
        if not point.lows:
            rows.append([*shown, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, *rest])
        for name in point.lows:
            lane = point.lanes[name]
            rows.append(
                [
                    *shown,
                    name,
                    show_share(lane.good / lane.offered),
                    show_range(show_share(point.lows[name]), show_share(point.highs[name])),
                    show_seconds(lane.ttft_p99_s),
                    show_seconds(lane.e2e_p99_s),
                    *rest,
                ]
            )
            shown, rest = ["", ""], ["", ""]
    return rows


def sweep_table(result: SweepResult) -> Table:
    """The points as a table for a terminal."""
    table = Table(title=Text(visible(result.finding), style="bold"), title_justify="left", box=None, pad_edge=False)
    for i, heading in enumerate(SWEEP_HEADINGS):
        table.add_column(heading, justify="left" if i < SWEEP_TEXT_COLUMNS else "right", no_wrap=i != 2)
    styles = {"holds": "green", "fails": "red", "undecided": "yellow", "invalid": "red"}
    for row in sweep_rows(result):
        table.add_row(
            Text(row[0]), Text(row[1], style=styles.get(row[1], "")), *[Text(visible(cell)) for cell in row[2:]]
        )
    if result.notes:
        table.caption = Text("\n".join([visible(note) for note in result.notes]))
    return table


def rate_lines(result: SweepResult) -> list[NamedLine]:
    """Attainment against rate, one line a lane; rates without a valid trial have no point."""
    lines = []
    for series, name in enumerate(sorted({name for point in result.points for name in point.lows})):
        points = [point for point in result.points if name in point.lows]
        numbers = RateLine(
            series=series,
            rates_rps=[point.rate_rps for point in points],
            values=[point.lanes[name].good / point.lanes[name].offered for point in points],
            lows=[point.lows[name] for point in points],
            highs=[point.highs[name] for point in points],
        )
        lines.append(NamedLine(name, numbers))
    return lines


def sweep_to_json(result: SweepResult) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2)


def sweep_from_json(text: bytes, *, where: str = "") -> SweepResult:
    """The result again. Raises ConfigError when ``text`` (from the file ``where``) is none."""
    try:
        return msgspec.json.decode(text, type=SweepResult)
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no result of headrace bench sweep: {error}", where=where) from error
