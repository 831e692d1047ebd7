"""The summary on a terminal. Names and errors come from servers and files: all pass through ``visible``."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from headrace.bench.report.grid import Grid, print_grid
from headrace.bench.report.report_tables import percentile_text, share_range, slo_text, title_of
from headrace.bench.report.units import NOTHING, show_number, show_range, show_seconds, show_share
from headrace.bench.report.visible import visible
from headrace.bench.results.figures import METRIC_NAMES, METRICS, Distribution, Failure, Group, ShareFigure, Summary
from headrace.bench.statistics.quantiles import PERCENTILES

_SHOWN_FAILURES = 3


def print_summary(summary: Summary, console: Console, *, full: bool = False) -> None:
    """The verdict, the groups, the misses; with ``full`` every percentile with its interval."""
    _print_verdict(summary, console)
    print_grid(groups_grid(summary), console)
    _print_from_due(summary, console)
    console.print()
    print_grid(group_latencies_grid(summary), console)
    if full:
        for group in summary.groups:
            console.print()
            print_grid(latency_grid(group), console)
    misses = misses_grid(summary)
    if misses is not None:
        console.print()
        print_grid(misses, console)
    if summary.refusals:
        console.print()
        print_grid(refusals_grid(summary), console)


def groups_grid(summary: Summary) -> Grid:
    """One row per group: offered, attainment, rates. Fits 80 columns, as what a file or a pipe gets."""
    rows = [
        [
            title_of(group),
            f"{group.offered:,}",
            _share(group.attainment),
            share_range(group.attainment) or NOTHING,
            show_number(group.goodput_rps),
            show_number(group.output_tokens_per_s),
            show_number(group.total_tokens_per_s),
        ]
        for group in summary.groups
    ]
    return Grid(("", "offered", "attained", "95 % CI", "good/s", "out tok/s", "all tok/s"), rows)


def group_latencies_grid(summary: Summary) -> Grid:
    """One row per group: p50 and p99 of TTFT, TPOT and E2E."""
    shown = [(metric, name) for metric in ("ttft_s", "tpot_s", "e2e_s") for name in ("p50", "p99")]
    labels = ["", *[f"{METRIC_NAMES[metric]} {name}" for metric, name in shown]]
    rows = [
        [title_of(group), *[percentile_text(group.latencies[metric], name) for metric, name in shown]]
        for group in summary.groups
    ]
    return Grid([label.split()[-1] if label.endswith("p99") else label for label in labels], rows, labels=labels)


def latency_grid(group: Group) -> Grid:
    """Every metric of a group with its percentiles and their intervals."""
    title = " ".join([title_of(group), *([f"({slo_text(group.slo)})"] if group.slo else [])])
    rows = [
        [
            METRIC_NAMES[metric],
            f"{spread.count:,}",
            show_seconds(spread.mean),
            *[_with_interval(spread, name) for name in PERCENTILES],
            show_seconds(spread.max),
        ]
        for metric in METRICS
        if (spread := group.latencies[metric]).count
    ]
    return Grid(("", "count", "mean", *PERCENTILES, "max"), rows, title=title)


def misses_grid(summary: Summary) -> Grid | None:
    """Why requests were misses, per group; None when none was."""
    reasons = sorted({name for group in summary.groups for name in group.missed_by})
    if not reasons:
        return None
    rows = [
        [
            title_of(group),
            f"{group.offered:,}",
            f"{group.good:,}",
            *[f"{group.missed_by.get(name, 0):,}" for name in reasons],
        ]
        for group in summary.groups
    ]
    return Grid(("misses", "offered", "good", *[name.replace("_", " ") for name in reasons]), rows)


def refusals_grid(summary: Summary) -> Grid:
    """Illegal requests: how many of each kind were refused as they should be."""
    rows = [
        [
            refusal.kind.replace("_", " "),
            str(refusal.count),
            str(refusal.right),
            str(refusal.wrong),
            str(refusal.unjudged),
            ", ".join([f"{status}: {count}" for status, count in refusal.statuses.items()]),
        ]
        for refusal in summary.refusals
    ]
    wrong = {i: "red" for i, refusal in enumerate(summary.refusals) if refusal.wrong}
    headings = ("illegal requests", "sent", "refused rightly", "not so", "shed or cut off", "statuses")
    return Grid(headings, rows, styles=wrong)


def _print_verdict(summary: Summary, console: Console) -> None:
    run, window, whole, health = summary.run, summary.window, summary.whole, summary.run.health
    _say(console, f"{run.model} at {run.target}", "bold")
    loop = "open loop" if run.concurrency is None else f"closed loop, {run.concurrency} users"
    facts = (
        f"{loop}; measured {window.start_s:g} s to {window.end_s:g} s",
        f"{show_number(whole.offered_rps)} requests/s offered, {show_number(whole.completed_rps)} completed",
        f"send lag p99 {show_seconds(summary.send_lag_p99_s)}, generator at {health.cpu_share * 100:.0f} % of a core",
    )
    _say(console, "; ".join(facts))
    for reason in summary.invalid:
        _say(console, f"INVALID: {reason}", "bold red")
    if summary.nothing_answered:
        _say(console, f"NOTHING WAS ANSWERED: of {whole.offered:,} offered requests not one", "bold red")
    if run.simulated:
        _say(console, "SIMULATED: these times are those of a model, not of a server", "bold magenta")
    for warning in summary.warnings:
        _say(console, f"note: {warning}", "yellow")
    for failure in summary.failures[:_SHOWN_FAILURES]:
        _say(console, f"failed: {_failure(failure)}", "red" if summary.nothing_answered else "yellow")
    console.print()


def _print_from_due(summary: Summary, console: Console) -> None:
    """Attainment by the schedule's clock, of the groups where it is another one."""
    differing = [group for group in summary.groups if group.good_from_due != group.good]
    if differing:
        shares = [f"{title_of(group)} {_share(group.attainment_from_due)}" for group in differing]
        _say(console, f"attained from due: {', '.join(shares)}")


def _say(console: Console, line: str, style: str = "") -> None:
    # Not rich's highlighter, and no markup: the line holds foreign text.
    console.print(Text(visible(line), style=style))


def _failure(failure: Failure) -> str:
    """``120 x http error 500: out of memory``."""
    status = "" if failure.status is None else f" {failure.status}"
    text = f": {failure.error}" if failure.error else ""
    return f"{failure.count:,} x {failure.outcome.replace('_', ' ')}{status}{text}"


def _share(share: ShareFigure | None) -> str:
    return show_share(None if share is None else share.value)


def _with_interval(spread: Distribution, name: str) -> str:
    figure = spread.percentiles[name]
    if figure is None:
        return NOTHING
    return f"{show_seconds(figure.value)}\n{show_range(show_seconds(figure.low), show_seconds(figure.high))}"
