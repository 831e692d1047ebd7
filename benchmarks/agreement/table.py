"""The comparison of both tools as Markdown, and whether it is within the tolerance.

    python -m benchmarks.agreement.table FOLDER

First table: they never meet the same conditions, so the medians over the rounds may lie apart by 2 % or 1 ms,
whichever is more, and by the wider of the two tools' own ranges over the rounds. Counts of answers and of output
tokens must be equal. Second table: what each tool reads beyond the server's own figures of the very same run, which
leaves out that the server was not equally fast; there the tools may be 1 ms apart.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.agreement.results import (
    GUIDELLM_FILE,
    HEADRACE_FOLDER,
    SERVED_FILE,
    Figures,
    guidellm_figures,
    headrace_figures,
    read_figures,
    rounds,
)

RELATIVE = 0.02
"""Of a figure of a server that is asked twice."""
ABSOLUTE_MS = 1.0
"""Of a time between two moments: a client that shares its machine with the server wakes up, parses and takes the time
within this. Times per token are such a time divided by the tokens, and so is what is allowed."""

_QUANTILES = ("mean", "p50", "p90", "p99")
MEASURED = tuple(f"{name} {figure}" for name in ("TTFT", "TPOT", "NTPOT", "E2E") for figure in _QUANTILES)
RATES = ("requests/s", "output tokens/s")
COUNTS = ("answered", "output tokens")
SHOWN = ("prompt tokens", "send lag mean", "send lag p99")
"""What each tool did, not what it measured: no tolerance."""


class Spread(NamedTuple):
    """A figure over the rounds."""

    median: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        if self.width == 0:
            return f"{self.median:.4g}"
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"


class Tool(NamedTuple):
    """What a tool read in each round, and what the server says of the same run."""

    figures: Sequence[Figures]
    served: Sequence[Figures]


def spread(name: str, figures: Sequence[Figures]) -> Spread | None:
    """None where a round does not have the figure."""
    values = [one[name] for one in figures if name in one]
    return Spread(statistics.median(values), min(values), max(values)) if len(values) == len(figures) else None


def allowed_ms(name: str, output_tokens: float) -> float:
    """The absolute tolerance of a latency."""
    return ABSOLUTE_MS / output_tokens if name.startswith(("TPOT", "NTPOT")) else ABSOLUTE_MS


def comparison(ours: Sequence[Figures], theirs: Sequence[Figures]) -> Iterator[str]:
    """Tool against tool."""
    output_tokens = ours[0]["output tokens"]
    yield "| figure, latencies in ms | headrace | GuideLLM | difference | allowed | |"
    yield "|---|---|---|---|---|---|"
    for name in (*MEASURED, *RATES, *COUNTS, *SHOWN):
        a, b = spread(name, ours), spread(name, theirs)
        if a is None or b is None:
            continue
        apart = a.median - b.median
        if name in SHOWN:
            yield f"| {name} | {a} | {b} | {apart:+.2g} | - | |"
            continue
        allowed = 0.0
        if name not in COUNTS:
            least = 0.0 if name in RATES else allowed_ms(name, output_tokens)
            allowed = max(RELATIVE * b.median, least) + max(a.width, b.width)
        verdict = "within" if abs(apart) <= allowed else "**beyond**"
        yield f"| {name} | {a} | {b} | {apart:+.2g} | {allowed:.2g} | {verdict} |"


def judgement(ours: Tool, theirs: Tool) -> Iterator[str]:
    """What each tool reads beyond the server's own figures of the same run, and how far the tools are apart in it."""
    yield "| ms | server (headrace) | headrace reads | server (GuideLLM) | GuideLLM reads | apart | allowed | |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in MEASURED:
        cells, medians = [], []
        for figures, served in (ours, theirs):
            own = spread(row, served)
            if own is None or spread(row, figures) is None:
                break
            excess = [one[row] - true[row] for one, true in zip(figures, served, strict=True)]
            medians.append(statistics.median(excess))
            cells += [str(own), f"{medians[-1]:+.2g} ({min(excess):+.2g} to {max(excess):+.2g})"]
        else:
            apart, allowed = medians[0] - medians[1], allowed_ms(row, ours.figures[0]["output tokens"])
            verdict = "within" if abs(apart) <= allowed else "**beyond**"
            yield f"| {row} | {' | '.join(cells)} | {apart:+.2g} | {allowed:.2g} | {verdict} |"


def seen(served: Sequence[Figures]) -> Sequence[str]:
    """What the server counted."""
    return [name for name in ("answered", "connections") if name in served[0]]


def main() -> None:
    """Print the tables."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m benchmarks.agreement.table FOLDER")
    folders = rounds(Path(sys.argv[1]))
    ours = [headrace_figures(folder / HEADRACE_FOLDER) for folder in folders]
    theirs = [guidellm_figures(folder / GUIDELLM_FILE) for folder in folders]
    print("\n".join(comparison(ours, theirs)))
    for name in RATES:
        print(f"\nheadrace, {name} inside the window: {spread(f'{name} in the window', ours)}")
    tools = []
    for name, figures in (("headrace", ours), ("GuideLLM", theirs)):
        served = [read_figures(folder / SERVED_FILE.format(tool=name.lower())) for folder in folders]
        tools.append(Tool(figures, served))
        print(f"\nThe server saw of {name}: " + ", ".join(f"{spread(what, served)} {what}" for what in seen(served)))
    print()
    print("\n".join(judgement(*tools)))


if __name__ == "__main__":
    main()
