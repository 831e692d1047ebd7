"""The summary on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.bench.report.report_tables import percentile_text, share_range, slo_text, title_of
from headrace.bench.report.units import NOTHING, show_number, show_range, show_seconds, show_share
from headrace.bench.results.figures import METRIC_NAMES, METRICS, Distribution, Group, Summary
from headrace.bench.statistics.quantiles import PERCENTILES


def print_summary(summary: Summary, console: Console, *, full: bool = False) -> None:
    """The verdict, the groups, the misses; with ``full`` every percentile with its interval."""
    _print_verdict(summary, console)
    console.print(groups_table(summary))
    console.print()
    console.print(group_latencies_table(summary))
    if full:
        for group in summary.groups:
            console.print()
            console.print(latency_table(group))
    misses = misses_table(summary)
    if misses is not None:
        console.print()
        console.print(misses)
    if summary.refusals:
        console.print()
        console.print(refusals_table(summary))


def groups_table(summary: Summary) -> Table:
    """One row per group: offered, attainment, rates. Fits 80 columns, as what a file or a pipe gets."""
    headings = ("", "offered", "attained", "95 % CI", "good/s", "out tok/s", "all tok/s")
    table = _table(headings)
    for group in summary.groups:
        attainment = group.attainment
        row = [
            title_of(group),
            f"{group.offered:,}",
            show_share(None if attainment is None else attainment.value),
            share_range(attainment) or NOTHING,
            show_number(group.goodput_rps),
            show_number(group.output_tokens_per_s),
            show_number(group.total_tokens_per_s),
        ]
        # Text, not markup: a lane's name may hold square brackets.
        table.add_row(*[Text(cell) for cell in row])
    return table


def group_latencies_table(summary: Summary) -> Table:
    """One row per group: p50 and p99 of TTFT, TPOT and E2E."""
    table = _table(("", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "p99"))
    for group in summary.groups:
        row = [
            percentile_text(group.latencies[metric], name)
            for metric in ("ttft_s", "tpot_s", "e2e_s")
            for name in ("p50", "p99")
        ]
        table.add_row(*[Text(cell) for cell in (title_of(group), *row)])
    return table


def latency_table(group: Group) -> Table:
    """Every metric of a group with its percentiles and their intervals."""
    title = " ".join([title_of(group), *([f"({slo_text(group.slo)})"] if group.slo else [])])
    table = _table(("", "count", "mean", *PERCENTILES, "max"), title=title)
    for metric in METRICS:
        spread = group.latencies[metric]
        if spread.count:
            row = [METRIC_NAMES[metric], f"{spread.count:,}", show_seconds(spread.mean)]
            row += [_with_interval(spread, name) for name in PERCENTILES]
            table.add_row(*[Text(cell) for cell in (*row, show_seconds(spread.max))])
    return table


def misses_table(summary: Summary) -> Table | None:
    """Why requests were misses, per group; None when none was."""
    reasons = sorted({name for group in summary.groups for name in group.missed_by})
    if not reasons:
        return None
    table = _table(("misses", "offered", "good", *[name.replace("_", " ") for name in reasons]))
    for group in summary.groups:
        row = [title_of(group), f"{group.offered:,}", f"{group.good:,}"]
        table.add_row(*[Text(cell) for cell in (*row, *[f"{group.missed_by.get(name, 0):,}" for name in reasons])])
    return table


def refusals_table(summary: Summary) -> Table:
    """Illegal requests: how many of each kind were refused as they should be."""
    table = _table(("illegal requests", "sent", "refused rightly", "not so", "shed or cut off", "statuses"))
    for refusal in summary.refusals:
        statuses = ", ".join([f"{status}: {count}" for status, count in refusal.statuses.items()])
        row = [refusal.kind.replace("_", " "), refusal.count, refusal.right, refusal.wrong, refusal.unjudged, statuses]
        table.add_row(*[Text(str(cell)) for cell in row], style="red" if refusal.wrong else None)
    return table


def _print_verdict(summary: Summary, console: Console) -> None:
    run, window, whole, health = summary.run, summary.window, summary.whole, summary.run.health
    console.print(Text(f"{run.model} at {run.target}", style="bold"))
    loop = "open loop" if run.concurrency is None else f"closed loop, {run.concurrency} users"
    facts = (
        f"{loop}; measured {window.start_s:g} s to {window.end_s:g} s",
        f"{show_number(whole.offered_rps)} requests/s offered, {show_number(whole.completed_rps)} completed",
        f"send lag p99 {show_seconds(summary.send_lag_p99_s)}, generator at {health.cpu_share * 100:.0f} % of a core",
    )
    console.print(Text("; ".join(facts)))
    for reason in summary.invalid:
        console.print(Text(f"INVALID: {reason}", style="bold red"))
    if run.simulated:
        console.print(Text("SIMULATED: these times are those of a model, not of a server", style="bold magenta"))
    for warning in summary.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))
    console.print()


def _table(headings: tuple[str, ...], title: str | None = None) -> Table:
    shown = None if title is None else Text(title, style="bold")
    table = Table(box=None, pad_edge=False, title=shown, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", overflow="fold", no_wrap=i > 0)
    return table


def _with_interval(spread: Distribution, name: str) -> str:
    figure = spread.percentiles[name]
    if figure is None:
        return NOTHING
    return f"{show_seconds(figure.value)}\n{show_range(show_seconds(figure.low), show_seconds(figure.high))}"
