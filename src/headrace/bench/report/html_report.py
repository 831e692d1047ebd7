"""The report: one HTML file that needs nothing but itself.

No script, no font, no address is loaded; plots are SVG in the page. Everything that comes from outside (names,
addresses, error texts, arguments) goes through ``markup``, which escapes it.
"""

from __future__ import annotations

import numpy as np

from headrace.bench.report import report_tables as tables
from headrace.bench.report.markup import Html, join, table, tag
from headrace.bench.report.plots import SERIES, Curve, Panel, ShareBar, cdf_plot, rate_plot, share_plot, timeline_plot
from headrace.bench.report.report_style import STYLE
from headrace.bench.report.timeline import timeline
from headrace.bench.report.units import show_number, show_percent, show_seconds, show_share
from headrace.bench.results.columns import BoolArray, Columns, gaps_s
from headrace.bench.results.figures import METRIC_NAMES, Summary
from headrace.bench.statistics.quantiles import FloatArray
from headrace.bench.sweep.sweep_result import SWEEP_HEADINGS, SWEEP_TEXT_COLUMNS, SweepResult, rate_lines, sweep_rows

TARGET = 0.99
"""The share that an SLO asks for: lanes state theirs for the p99."""

_DEFINITIONS = (
    ("TTFT", "sent to first content. From due: from the moment the schedule wanted the request sent."),
    ("E2E", "sent to last content; from due likewise."),
    ("TPOT", "(E2E − TTFT) / (n − 1) of each answer with n ≥ 2 output tokens."),
    (
        "ITL",
        "the gaps between tokens, pooled over all answers; of a chunk that holds several tokens, as far as the "
        "server says so, the first has the gap and the others have 0.",
    ),
    ("NTPOT", "E2E / n."),
    (
        "attainment",
        "good / offered: requests that were answered whole and met every bound of their SLO, of all legal requests "
        "due in the measured window. Errors, timeouts, sheds and cut streams are misses. Bounds are judged from "
        "sending; “from due” judges them from the schedule.",
    ),
    (
        "goodput",
        "good answers that ended in the measured window, per second of it. Attainment counts those that ended later "
        "too.",
    ),
    ("tokens per second", "of answers that ended whole, as far as they arrived in the measured window."),
    (
        "percentiles",
        "nearest rank of the raw values, with a distribution-free 95 % interval that takes requests as independent "
        "(gaps: as many as their streams are worth). One that the sample cannot bound is not given.",
    ),
    ("intervals of shares", "Wilson, 95 %."),
)


def html_report(summary: Summary, columns: Columns, sweep: SweepResult | None = None) -> str:
    """The report of one run; with a sweep, also attainment against the rate."""
    title = f"{summary.run.model} at {summary.run.target}"
    series = {group.name: number for number, group in enumerate(summary.lanes)}
    return _page(
        f"headrace bench: {title}",
        join(
            [
                tag("h1", "headrace bench"),
                tag("p", title, class_="subject"),
                _banners(summary),
                _headline(summary),
                _section("Lanes", _legend(series), _share_plot(summary, series), tables.lanes_table(summary)),
                _section("Latency", _cdfs(summary, columns, series), tables.latency_tables(summary)),
                _section("Over time", _timeline(summary, columns)),
                _sweep_section(sweep) if sweep is not None else "",
                _section("What became of the requests", tables.outcomes_table(summary), tables.misses_table(summary)),
                _section("Failures, most frequent first", tables.failures_table(summary)) if summary.failures else "",
                _section("Illegal requests", tables.refusals_table(summary)) if summary.refusals else "",
                _section("The run", tables.facts_table(summary)),
                _section("How these figures are made", _definitions()),
            ]
        ),
    )


def sweep_report(sweep: SweepResult) -> str:
    """The report of a sweep alone."""
    return _page("headrace bench sweep", join([tag("h1", "headrace bench sweep"), _sweep_section(sweep)]))


def _page(title: str, body: Html) -> str:
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            tag("title", title),
            tag("style", Html(STYLE)),
        ]
    )
    return "<!doctype html>\n" + Html(f'<html lang="en"><head>{head}</head><body>{tag("main", body)}</body></html>\n')


def _section(title: str, *parts: str) -> Html:
    return tag("section", tag("h2", title), *parts)


def _banners(summary: Summary) -> Html:
    parts = []
    if summary.invalid:
        lines = [tag("li", reason) for reason in summary.invalid]
        parts.append(tag("div", tag("strong", "This run is invalid."), tag("ul", *lines), class_="banner bad"))
    if summary.nothing_answered:
        text = f" Of {summary.whole.offered:,} offered requests not one."
        parts.append(tag("div", tag("strong", "Nothing was answered."), text, class_="banner bad"))
    if summary.run.simulated:
        text = " Its times are those of a model, not of a server."
        parts.append(tag("div", tag("strong", "This run is simulated."), text, class_="banner simulated"))
    if summary.warnings:
        lines = [tag("li", warning) for warning in summary.warnings]
        parts.append(tag("div", tag("strong", "Read with care"), tag("ul", *lines), class_="banner care"))
    return join(parts)


def _headline(summary: Summary) -> Html:
    whole = summary.whole
    ttft, e2e = whole.latencies["ttft_s"], whole.latencies["e2e_s"]
    attainment = None if whole.attainment is None else whole.attainment.value
    tiles = (
        ("attainment", show_share(attainment), tables.share_range(whole.attainment)),
        ("goodput", f"{show_number(whole.goodput_rps)} /s", f"of {show_number(whole.offered_rps)} /s offered"),
        (
            "output tokens",
            f"{show_number(whole.output_tokens_per_s)} /s",
            f"with input {show_number(whole.total_tokens_per_s)} /s",
        ),
        ("TTFT p99", tables.percentile_text(ttft, "p99"), f"p50 {tables.percentile_text(ttft, 'p50')}"),
        ("E2E p99", tables.percentile_text(e2e, "p99"), f"p50 {tables.percentile_text(e2e, 'p50')}"),
        ("send lag p99", show_seconds(summary.send_lag_p99_s), f"limit {show_seconds(summary.limits.send_lag_p99_s)}"),
    )
    shown = [
        tag("div", tag("span", name), tag("b", value), tag("small", note), class_="tile") for name, value, note in tiles
    ]
    return tag("div", *shown, class_="tiles")


def _legend(series: dict[str, int]) -> Html:
    entries = []
    for name, number in series.items():
        color = f"var(--s{number % SERIES + 1})"
        style = f"background: {color}" if number < SERIES else f"border: 2px dashed {color}"
        entries.append(tag("span", tag("i", style=style), name))
    return tag("p", *entries, class_="legend")


def _share_plot(summary: Summary, series: dict[str, int]) -> Html:
    bars = [
        ShareBar(series[group.name], group.name, share.value, share.low, share.high)
        for group in summary.lanes
        if (share := group.attainment) is not None
    ]
    if not bars:
        return Html("")
    label = "; ".join(f"{bar.name}: {show_share(bar.value)}" for bar in bars)
    caption = "Attainment per lane with its 95 % interval; the dashed line is 99 %."
    return _figure(share_plot(bars, TARGET, f"Attainment per lane. {label}"), caption)


def _cdfs(summary: Summary, columns: Columns, series: dict[str, int]) -> Html:
    answered = columns.measured & columns.offered & columns.answered
    panels = []
    for metric, bound in (("ttft_s", "ttft_s"), ("e2e_s", "e2e_s"), ("itl_s", "")):
        curves = []
        for group in summary.lanes:
            members = answered & columns.lane(group.name)
            values = _sorted_values(columns, metric, members)
            offered = len(values) if metric == "itl_s" else group.offered
            curves.append(Curve(series[group.name], values, offered, (group.slo or {}).get(bound)))
        panels.append(Panel(METRIC_NAMES[metric], curves))
    label = "Distributions of TTFT, E2E and ITL per lane; the tables below have the percentiles."
    caption = (
        "Share of the offered requests (ITL: of the gaps) that took at most so long. The scale stretches the tail. "
        "Requests without an answer are never reached. Dashed: the lane's SLO."
    )
    return join([_legend(series), _figure(cdf_plot(panels, label), caption)])


def _sorted_values(columns: Columns, metric: str, members: BoolArray) -> FloatArray:
    values = gaps_s(columns, members)[0] if metric == "itl_s" else columns.times[metric][members]
    return np.sort(values[~np.isnan(values)])


def _timeline(summary: Summary, columns: Columns) -> Html:
    line = timeline(columns)
    label = "Load, requests in the server, tokens per second and failures over the run."
    caption = f"Bins of {show_seconds(line.step_s)}. Shaded: the warm-up. Dotted: the end of the load."
    return _figure(timeline_plot(line, summary.window.start_s, summary.window.end_s, label), caption)


def _sweep_section(sweep: SweepResult) -> Html:
    lines = rate_lines(sweep)
    target = sweep.settings.target
    label = f"Attainment against rate. {sweep.finding}"
    plot = rate_plot([line.numbers for line in lines], target, sweep.answer_rps, label)
    caption = (
        f"Attainment of the offered requests at each rate, with its interval; dashed: {show_percent(target)}. "
        "The scale stretches the top; shares above 99.95 % lie at its end."
    )
    return _section(
        "The highest rate that holds",
        tag("p", sweep.finding, class_="finding"),
        *[tag("div", note, class_="banner care") for note in sweep.notes],
        _legend({line.name: line.numbers.series for line in lines}),
        _figure(plot, caption),
        table(SWEEP_HEADINGS, sweep_rows(sweep), text_columns=SWEEP_TEXT_COLUMNS),
    )


def _definitions() -> Html:
    return tag("dl", *[join([tag("dt", word), tag("dd", meaning)]) for word, meaning in _DEFINITIONS])


def _figure(plot: Html, caption: str) -> Html:
    return tag("figure", plot, tag("figcaption", caption))
