"""The plot of a simulated sweep: every lane's attainment and P99 against the rate, or the first value varied."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from headrace.simulate.sweep import SweepPoint

_MOST_LINES = 40


def axis_of(points: Sequence[SweepPoint]) -> str | None:
    """What is drawn across: ``rate_rps``, else the first knob that has several numbers; None when there is nothing."""
    if len({point.rate_rps for point in points}) > 1:
        return "rate_rps"
    for key in points[0].knobs if points else ():
        values = {point.knobs[key] for point in points}
        if len(values) > 1 and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return key
    return None


def lines_of(points: Sequence[SweepPoint], axis: str) -> dict[str, list[tuple[float, SweepPoint]]]:
    """By the name of a line (the values that are not on the axis), its points ascending."""
    lines: dict[str, list[tuple[float, SweepPoint]]] = {}
    for point in points:
        others = [f"{key.rpartition('.')[2]}={value}" for key, value in point.knobs.items() if key != axis]
        if axis != "rate_rps" and point.rate_rps is not None:
            others.insert(0, f"{point.rate_rps:g}/s")
        at = point.rate_rps if axis == "rate_rps" else point.knobs[axis]
        assert isinstance(at, int | float)
        lines.setdefault(", ".join(others), []).append((float(at), point))
    for line in lines.values():
        line.sort(key=lambda pair: pair[0])
    return lines


def sweep_plot(points: Sequence[SweepPoint], title: str) -> bytes | None:
    """The plot as SVG; None where nothing numeric was varied. The same points give the same bytes."""
    axis = axis_of(points)
    if axis is None:
        return None
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    names = sorted({name for point in points for name in point.lanes})
    with matplotlib.rc_context({"svg.hashsalt": "headrace", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(10, 7), layout="constrained")
        FigureCanvasSVG(figure)
        upper, lower = figure.subplots(2, 1, sharex=True)
        drawn = 0
        for label, line in lines_of(points, axis).items():
            for name in names:
                if drawn >= _MOST_LINES:
                    break
                drawn += 1
                here = [(at, point.lanes[name]) for at, point in line if name in point.lanes]
                shown = f"{name} ({label})" if label else name
                shares = [100 * lane.good / lane.offered if lane.offered else math.nan for _, lane in here]
                late = [math.nan if lane.e2e_p99_s is None else lane.e2e_p99_s for _, lane in here]
                upper.plot([at for at, _ in here], shares, marker="o", markersize=3, label=shown)
                lower.plot([at for at, _ in here], late, marker="o", markersize=3)
        upper.set_ylabel("attained, %")
        lower.set_ylabel("E2E p99, s")
        if any(line.get_ydata().size and max(line.get_ydata(), default=0) > 0 for line in lower.lines):
            lower.set_yscale("log")
        lower.set_xlabel("requests/s" if axis == "rate_rps" else axis)
        upper.legend(fontsize=7, loc="lower left")
        for axes in (upper, lower):
            axes.grid(alpha=0.3)
        upper.set_title(f"{title} (simulated)", loc="left")
        data = io.BytesIO()
        figure.savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue()
