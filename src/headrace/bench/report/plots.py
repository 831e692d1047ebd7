"""The report's plots as SVG text: matplotlib draws, the page colours.

Colours are written as CSS variables, so that one drawing serves a light page, a dark one and a printed one.
Text stays text. No drawing refers to anything outside itself, and the same data gives the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.bench.report.markup import Html, text
from headrace.bench.report.timeline import Timeline
from headrace.bench.report.units import show_percent, show_seconds
from headrace.bench.report.visible import visible
from headrace.bench.statistics.quantiles import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

SERIES = 8
"""Colours there are; further lanes begin again, dashed."""

# What matplotlib is told, and what the page reads instead. No drawing uses these colours for anything else.
_INK, _FAINT, _GRID, _BAD = "#010101", "#010102", "#010103", "#010104"
_VARIABLES = {_INK: "--ink", _FAINT: "--faint", _GRID: "--grid", _BAD: "--bad"} | {
    f"#0102{i:02x}": f"--s{i + 1}" for i in range(SERIES)
}

_SETTINGS: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "headrace",
    "font.size": 10.0,
    "font.family": ["DejaVu Sans"],
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "text.color": _INK,
    "text.parse_math": False,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
_WIDTH_IN = 11.0
_TAIL_LEVELS = (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999)
_CURVE_POINTS = 240
_NAME_CHARS = 40
_TOP_SHARE = 0.9995
"""The stretched scale has no end; shares above this one are drawn at it."""


@dataclass(frozen=True)
class Curve:
    """One lane's values of one metric, ascending, of ``offered`` requests or gaps. ``slo_s``: its bound."""

    series: int
    values_s: FloatArray
    offered: int
    slo_s: float | None = None


@dataclass(frozen=True)
class Panel:
    """One metric's curves."""

    title: str
    curves: Sequence[Curve]


@dataclass(frozen=True)
class ShareBar:
    """A lane's attainment with its interval."""

    series: int
    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RateLine:
    """A lane's attainment at several rates, ascending by rate."""

    series: int
    rates_rps: Sequence[float]
    values: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


def cdf_plot(panels: Sequence[Panel], label: str) -> Html:
    """Latency distributions, one panel a metric: the share of what was offered that was at most so slow.

    The vertical scale stretches the tail (equal steps from 90 to 99 to 99.9 %). A request that was never
    answered is never reached: the curve ends below 100 %. Dashed lines are the lanes' SLOs.
    """

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import LogLocator, NullLocator

        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            axis.set_title(panel.title)
            axis.set_xscale("log")
            for curve in panel.curves:
                x, y = _curve_points(curve)
                axis.plot(x, _tail_scale(y), color=_series(curve.series), linestyle=_dashes(curve.series))
                if curve.slo_s is not None:
                    axis.axvline(curve.slo_s, color=_series(curve.series), linewidth=1, linestyle=(0, (4, 3)))
            most = max([len(curve.values_s) for curve in panel.curves], default=1)
            _tail_ticks(axis, [level for level in _TAIL_LEVELS if level == 0 or (1 - level) * most >= 1])
            left, right = axis.get_xlim()
            # Decades alone leave a range such as 0.2 s to 0.8 s without a number.
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if right / left < 300 else (1,)))
            axis.xaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(lambda value, _: show_seconds(value))

    return _svg(draw, 3.3, "cdf", label)


def timeline_plot(line: Timeline, warmup_s: float, load_end_s: float, label: str) -> Html:
    """Requests per second, requests in the server, tokens per second and failures, one above the other."""

    def draw(figure: Figure) -> None:
        rows = 4 if line.failed_rps else 3
        axes = figure.subplots(rows, 1, sharex=True)
        x = line.edges_s

        def steps(axis: Axes, values: FloatArray, series: int, name: str, *, fill: bool = False) -> None:
            axis.stairs(values, x, color=_series(series), label=name, linewidth=1.4)
            if fill:
                axis.stairs(values, x, color=_series(series), alpha=0.25, fill=True)

        steps(axes[0], line.offered_rps, 7, "offered")
        steps(axes[0], line.completed_rps, 0, "completed")
        axes[0].set_title("requests per second")
        steps(axes[1], line.in_flight, 0, "in flight")
        steps(axes[1], line.queued, 1, "of these without a first token", fill=True)
        axes[1].set_title("requests in the server")
        steps(axes[2], line.output_tokens_per_s, 2, "output tokens", fill=True)
        axes[2].set_title("output tokens per second")
        for series, (name, values) in enumerate(line.failed_rps.items()):
            steps(axes[3], values, (5 + series) % SERIES, name.replace("_", " "), fill=True)
        if line.failed_rps:
            axes[3].set_title("requests that failed, per second")
        for axis in axes:
            _from_zero(axis)
            axis.axvspan(0, warmup_s, color=_FAINT, alpha=0.15, linewidth=0)
            axis.axvline(load_end_s, color=_FAINT, linewidth=1, linestyle=(0, (2, 2)))
            if len(axis.get_legend_handles_labels()[0]) > 1 or axis is axes[-1]:
                axis.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=9, borderaxespad=0.1)
        axes[-1].set_xlim(0, x[-1])
        axes[-1].set_xlabel("seconds after the start")

    return _svg(draw, 7.2 if line.failed_rps else 5.6, "timeline", label)


def share_plot(bars: Sequence[ShareBar], target: float, label: str) -> Html:
    """Attainment per lane: a point, its interval, and a line where the SLO's share lies."""

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        for row, bar in enumerate(bars):
            color = _series(bar.series)
            axis.plot([bar.low, bar.high], [row, row], color=color, linewidth=5, alpha=0.4, solid_capstyle="butt")
            axis.plot([bar.value], [row], marker="o", markersize=7, color=color)
        left = min([bar.low for bar in bars] + [target])
        left = np.floor(left * 20 - 0.5) / 20 if left > 0.05 else 0.0
        axis.axvline(target, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
        axis.set_xlim(left, 1.0 + (1 - left) * 0.01)
        axis.set_yticks(range(len(bars)), [_drawable(_short(bar.name)) for bar in bars])
        for row, drawn in enumerate(axis.get_yticklabels()):
            drawn.set_gid(f"lane-{row}")
        axis.set_ylim(len(bars) - 0.5, -0.5)
        axis.grid(axis="y", visible=False)
        axis.xaxis.set_major_formatter(lambda value, _: show_percent(value))

    names = {f"lane-{row}": _short(bar.name) for row, bar in enumerate(bars)}
    return _svg(draw, 0.75 + 0.38 * len(bars), "share", label, names)


def rate_plot(lines: Sequence[RateLine], target: float, answer_rps: float | None, label: str) -> Html:
    """Attainment against the offered rate, per lane, with intervals; the rate found is the vertical line.

    The vertical scale is stretched towards 100 % as in ``cdf_plot``; everything above 99.95 % lies at its top.
    """

    def draw(figure: Figure) -> None:
        axis = figure.subplots()
        for line in lines:
            color = _series(line.series)
            low, value, high = (
                _tail_scale(np.minimum(np.array(shares), _TOP_SHARE)) for shares in (line.lows, line.values, line.highs)
            )
            axis.fill_between(line.rates_rps, low, high, color=color, alpha=0.18, linewidth=0)
            axis.plot(line.rates_rps, value, color=color, marker="o", markersize=4, linestyle=_dashes(line.series))
        axis.axhline(float(_tail_scale(np.array(target))), color=_INK, linewidth=1, linestyle=(0, (4, 3)))
        if answer_rps is not None:
            axis.axvline(answer_rps, color=_INK, linewidth=1)
        axis.set_xlabel("offered requests per second")
        axis.set_title("attainment")
        _tail_ticks(axis, _TAIL_LEVELS[:-1])
        axis.set_ylim(0, float(_tail_scale(np.array(_TOP_SHARE))) * 1.03)

    return _svg(draw, 3.8, "rate", label)


def _curve_points(curve: Curve) -> tuple[FloatArray, FloatArray]:
    """Steps of the distribution function, as many as a plot can show, evenly along the stretched scale."""
    count = len(curve.values_s)
    if count == 0:
        return np.empty(0), np.empty(0)
    even = np.linspace(0, count - 1, min(count, _CURVE_POINTS))
    tail = count - np.geomspace(1, count, min(count, _CURVE_POINTS))
    ranks = np.unique(np.concatenate((even, tail)).astype(np.int64))
    ranks = ranks[curve.values_s[ranks] > 0]  # a logarithmic scale has no place for gaps of 0
    if not len(ranks):
        return np.empty(0), np.empty(0)
    # F at the k-th of n values is k / (n + 1) here, so that the last one lies on the stretched scale too.
    return curve.values_s[ranks], (ranks + 1) / (curve.offered + 1)


def _tail_scale(share: FloatArray) -> FloatArray:
    scaled: FloatArray = -np.log10(1 - share)
    return scaled


def _tail_ticks(axis: Axes, levels: Sequence[float]) -> None:
    axis.set_yticks(_tail_scale(np.array(levels)), [f"{level * 100:g} %" for level in levels])
    _from_zero(axis)


def _from_zero(axis: Axes) -> None:
    """Begin the vertical scale at 0, and leave it a length where nothing lies above that."""
    top = axis.get_ylim()[1]
    axis.set_ylim(0, top if top > 0 else 1)


def _short(name: str) -> str:
    """A name that leaves the drawing its room; the tables have the whole one."""
    shown = visible(name)
    return shown if len(shown) <= _NAME_CHARS else f"{shown[: _NAME_CHARS - 1]}…"


def _drawable(name: str) -> str:
    """A name of the same length in characters that matplotlib's font has, so that it can be laid out. The page has
    more fonts: ``_svg`` puts the name itself there."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties(family=_SETTINGS["font.family"]))).get_charmap()
    return "".join([one if ord(one) in known else "M" for one in name])


def _series(number: int) -> str:
    return f"#0102{number % SERIES:02x}"


def _dashes(number: int) -> str:
    return "-" if number < SERIES else "--"


def _svg(
    draw: Callable[[Figure], None], height_in: float, name: str, label: str, texts: Mapping[str, str] | None = None
) -> Html:
    """``texts``: what stands in the page for the drawn text of the group with an id."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        figure.patch.set_visible(False)
        draw(figure)
        for axis in figure.axes:
            axis.patch.set_visible(False)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    svg = written.getvalue()
    for group, shown in (texts or {}).items():
        # By position, not by a replacement pattern: the text may hold backslashes.
        drawn = re.search(rf'<g id="{group}">.*?<text[^>]*>([^<]*)<', svg, flags=re.DOTALL)
        assert drawn is not None
        svg = svg[: drawn.start(1)] + text(shown) + svg[drawn.end(1) :]
    return Html(_page_ready(svg, name, label))


def _page_ready(svg: str, name: str, label: str) -> str:
    """A drawing that can stand in a page: no prologue, no namespaces, no fixed size, colours from the page, and
    ids that no other drawing has."""
    svg = svg[svg.index("<svg") :]
    viewbox = re.search(r'viewBox="([^"]*)"', svg)
    assert viewbox is not None
    svg = re.sub(r"<svg[^>]*>", "", svg, count=1)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return f'<svg viewBox="{viewbox.group(1)}" role="img" aria-label="{text(label)}">{svg}'
