"""The tables of the HTML report."""

from __future__ import annotations

import msgspec

from headrace.bench.report.markup import Html, join, table, tag
from headrace.bench.report.units import NOTHING, show_number, show_range, show_seconds, show_share
from headrace.bench.results.figures import METRIC_NAMES, METRICS, Distribution, Group, ShareFigure, Summary
from headrace.bench.statistics.quantiles import PERCENTILES


def lanes_table(summary: Summary) -> Html:
    """What matters of every group, one row each."""
    headings = (
        "", "offered", "attainment", "from due", "goodput /s", "output tok/s",
        "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "E2E p50", "E2E p99",
    )  # fmt: skip
    return table(headings, [_lane_row(group) for group in summary.groups])


def latency_tables(summary: Summary) -> Html:
    """Every percentile of every metric with its interval, a table per group."""
    headings = ("", "count", "mean", "std", "min", *PERCENTILES, "max")
    parts = []
    for group in summary.groups:
        rows = [
            [
                METRIC_NAMES[metric],
                f"{spread.count:,}",
                show_seconds(spread.mean),
                show_seconds(spread.std),
                show_seconds(spread.min),
                *[_with_interval(spread, name) for name in PERCENTILES],
                show_seconds(spread.max),
            ]
            for metric in METRICS
            if (spread := group.latencies[metric]).count
        ]
        parts.append(tag("h3", title_of(group)))
        parts.append(table(headings, rows) if rows else tag("p", "No request was sent."))
    return join(parts)


def outcomes_table(summary: Summary) -> Html:
    """What became of the offered requests."""
    names = sorted({name for group in summary.groups for name in group.outcomes}, key=lambda name: (name != "ok", name))
    cut_off = any(group.not_offered for group in summary.groups)
    headings = ["", "offered", *[name.replace("_", " ") for name in names]]
    rows = [
        [title_of(g), f"{g.offered:,}", *[f"{g.outcomes.get(name, 0):,}" for name in names]] for g in summary.groups
    ]
    if cut_off:
        headings.append("not offered: cut off by the end")
        for row, group in zip(rows, summary.groups, strict=True):
            row.append(f"{group.not_offered:,}")
    return table(headings, rows, caption="Outcomes of the offered requests")


def misses_table(summary: Summary) -> Html:
    """Why requests were misses."""
    names = sorted({name for group in summary.groups for name in group.missed_by})
    if not names:
        return tag("p", "Every offered request was good.")
    rows = [
        [title_of(g), f"{g.offered - g.good:,}", *[f"{g.missed_by.get(name, 0):,}" for name in names]]
        for g in summary.groups
    ]
    headings = ("", "misses", *[_reason(name) for name in names])
    return table(headings, rows, caption="Why requests were misses; one request may have several reasons")


def failures_table(summary: Summary) -> Html:
    """The most frequent failures with their texts."""
    rows = [
        [
            f.outcome.replace("_", " "),
            NOTHING if f.status is None else str(f.status),
            f.error or NOTHING,
            f"{f.count:,}",
        ]
        for f in summary.failures
    ]
    return table(("outcome", "status", "error", "count"), rows, text_columns=3)


def refusals_table(summary: Summary) -> Html:
    """Illegal requests and how they were answered."""
    rows = [
        [
            refusal.kind.replace("_", " "),
            ", ".join([f"{status}: {count:,}" for status, count in refusal.statuses.items()]),
            f"{refusal.count:,}",
            f"{refusal.right:,}",
            tag("b", f"{refusal.wrong:,}", class_="bad") if refusal.wrong else "0",
            f"{refusal.unjudged:,}",
        ]
        for refusal in summary.refusals
    ]
    headings = ("kind", "statuses", "sent", "refused rightly", "not so", "shed or cut off")
    return table(headings, rows, text_columns=2)


def facts_table(summary: Summary) -> Html:
    """What was run, where, when, and how the generator did."""
    run, health = summary.run, summary.run.health
    illegal = sum([refusals.count for refusals in summary.refusals])
    rows = [
        ("target", run.target),
        ("model", run.model),
        ("label", run.label or NOTHING),
        ("started", run.started_at),
        ("load", f"{show_seconds(run.duration_s)}; the run took {show_seconds(run.wall_s)}"),
        ("measured window", f"{summary.window.start_s:g} s to {summary.window.end_s:g} s after the start"),
        (
            "records",
            f"{summary.records:,}: {summary.legal_in_window:,} legal in the window, {summary.legal_before_window:,} "
            f"before it, {summary.legal_after_window:,} after it, {illegal:,} illegal",
        ),
        ("loop", "open" if run.concurrency is None else f"closed, {run.concurrency:,} users"),
        ("seed", str(run.seed)),
        ("schedule (SHA-256)", run.schedule_sha256 or NOTHING),
        ("headrace", run.tool_version),
        (
            "generator",
            f"{health.cpu_share * 100:.0f} % of a core, event loop late by {show_seconds(health.loop_lag_p99_s)} "
            f"(p99), at most {health.peak_in_flight:,} requests in flight",
        ),
    ]
    blocks = [table(("", ""), rows, text_columns=2)]
    for name, value in (("Load, as asked for", run.source), ("Machine", run.machine), ("SLOs, by class", run.slos)):
        if value:
            shown = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
            blocks.append(tag("h3", name))
            blocks.append(tag("pre", shown))
    return join(blocks)


def title_of(group: Group) -> str:
    """How a group is called."""
    if group.kind == "whole":
        return "all requests"
    return group.name if group.kind == "lane" else f"class {group.name}"


def slo_text(slo: dict[str, float] | None) -> str:
    """``SLO TTFT 500 ms, E2E 3 s``; nothing without an SLO, or where the group has several."""
    if not slo:
        return ""
    return "SLO " + ", ".join([f"{METRIC_NAMES[name]} {show_seconds(value)}" for name, value in slo.items()])


def percentile_text(spread: Distribution, name: str) -> str:
    """A percentile, or the sign that there is none."""
    figure = spread.percentiles[name]
    return NOTHING if figure is None else show_seconds(figure.value)


def share_range(share: ShareFigure | None) -> str:
    """A share's interval; nothing of nothing."""
    return "" if share is None else show_range(show_share(share.low), show_share(share.high))


def _lane_row(group: Group) -> list[str]:
    latencies = group.latencies
    figures: list[str] = []
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        figures += [percentile_text(latencies[metric], "p50"), _with_interval(latencies[metric], "p99")]
    return [
        join([title_of(group), tag("small", slo_text(group.slo))]),
        f"{group.offered:,}",
        _share(group.attainment),
        show_share(None if group.attainment_from_due is None else group.attainment_from_due.value),
        show_number(group.goodput_rps),
        show_number(group.output_tokens_per_s),
        *figures,
    ]


def _with_interval(spread: Distribution, name: str) -> str:
    figure = spread.percentiles[name]
    if figure is None:
        return NOTHING
    interval = show_range(show_seconds(figure.low), show_seconds(figure.high))
    return join([show_seconds(figure.value), tag("small", interval)])


def _share(share: ShareFigure | None) -> str:
    return NOTHING if share is None else join([show_share(share.value), tag("small", share_range(share))])


def _reason(name: str) -> str:
    return name.upper() if name in ("ttft", "tpot", "e2e") else name.replace("_", " ")
