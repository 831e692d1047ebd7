"""``headrace bench``: the commands of the load generator."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from headrace.bench.load.arrivals import ARRIVAL_FORMS
from headrace.bench.load.lengths import LENGTH_FORMS
from headrace.bench.results.figures import Limits
from headrace.cli.bench_options import LoadOptions, load_options
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.sweep.sweep_result import SweepSettings, Trial

EXIT_INVALID = 3
"""The run ended, but the generator was not up to it: its figures are not the server's."""
EXIT_DIFFERS = 4
"""``bench compare --check`` found B worse than A beyond noise."""

_FORMS = "\b\nArrivals:\n{arrivals}\n\n\b\nLengths (tokens):\n{lengths}".format(
    arrivals="\n".join(f"  {form.signature:<44} {form.example}" for form in ARRIVAL_FORMS),
    lengths="\n".join(f"  {form.signature:<44} {form.example}" for form in LENGTH_FORMS),
)


@click.group()
def bench() -> None:
    """Load an OpenAI-compatible server, and say what its answers were like."""


@bench.command(epilog=_FORMS)
@load_options
@click.option("--arrivals", metavar="FORM", help="When requests come: poisson(2), closed(32), trace(FILE)...")
@click.option("--duration", "duration_s", type=float, metavar="S", help="Seconds in which requests come.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the results [bench-TIME].")
@click.option("--full", is_flag=True, help="Print every percentile with its interval.")
def run(arrivals: str | None, duration_s: float | None, output: Path | None, full: bool, **given: Any) -> int:
    """Send a load, whatever the server does, and report.

    The load comes from a workload file (--workload) or from --arrivals, --input-length and --output-length. It is
    computed before the first request, from one seed. The folder of results holds the raw records (records.jsonl),
    summary.json, the same in the shape of vLLM's benchmark (vllm.json), two CSV tables and report.html.

    Exit status: 0 done; 1 failed; 3 the run is invalid, because the generator itself was late.
    """
    from headrace.bench.drive.live import open_progress
    from headrace.bench.outputs import RECORDS, new_folder, write_outputs
    from headrace.bench.report.text_report import print_summary
    from headrace.bench.results.columns import build_columns
    from headrace.bench.session import ask_scale, prepare, run_load

    options = LoadOptions(**given)
    workload = options.workload_with(arrivals, duration_s)
    settings, requests = options.run_settings(), options.request_options(salt=_salt(options.salt))
    scale = ask_scale(settings, requests.endpoint, os.environ)
    load = prepare(workload, requests, scale, model=options.model, seed=options.seed)
    folder = new_folder(output or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}"))
    result = run_load(load, settings, os.environ, records_path=folder / RECORDS, progress=open_progress(sys.stderr))
    for warning in result.warnings:
        click.echo(f"warning: {warning}", err=True)
    summary = write_outputs(folder, build_columns(result.info, result.records), options.limits())
    print_summary(summary, Console(), full=full)
    click.echo(f"\nresults: {folder}")
    return EXIT_INVALID if summary.invalid else 0


@bench.command(epilog=_FORMS)
@load_options
@click.option(
    "--arrivals", default="poisson(RATE)", show_default=True, metavar="FORM", help="Arrivals with RATE in it."
)
@click.option("--start", "start_rps", type=float, default=1.0, show_default=True, help="First rate tried, requests/s.")
@click.option("--duration", "duration_s", type=float, default=60.0, show_default=True, help="Seconds a measurement.")
@click.option("--attainment", type=float, default=0.99, show_default=True, help="Share of good requests to hold.")
@click.option("--confidence", type=float, default=0.95, show_default=True, help="Of the answer.")
@click.option("--tolerance", type=float, default=0.05, show_default=True, help="How near to look, relative.")
@click.option("--most-trials", type=int, default=40, show_default=True, help="Measurements at most.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the results [sweep-TIME].")
def sweep(
    arrivals: str,
    start_rps: float,
    duration_s: float,
    attainment: float,
    confidence: float,
    tolerance: float,
    most_trials: int,
    output: Path | None,
    **given: Any,
) -> int:
    """Find the highest rate at which every lane holds its SLO.

    Measures rate after rate: doubling until one fails, then halving the distance. A rate holds when the lower end
    of every lane's interval is above --attainment, and fails when the upper end of one is below; in between it is
    measured again. Exit status: 0 found; 1 failed; 3 no rate was shown to hold.
    """
    from headrace.bench.outputs import new_folder
    from headrace.bench.sweep.sweep import check_settings
    from headrace.bench.sweep.sweep_result import SweepSettings

    options = LoadOptions(**given)
    if "RATE" not in arrivals:
        raise ConfigError("needs the word RATE where the rate belongs, e.g. poisson(RATE)", where="--arrivals")
    folder = new_folder(output or Path(f"sweep-{datetime.now():%Y%m%d-%H%M%S}"))
    settings = SweepSettings(
        start_rps=start_rps,
        duration_s=duration_s,
        target=attainment,
        confidence=confidence,
        tolerance=tolerance,
        most_trials=most_trials,
    )
    check_settings(settings)
    return _sweep(options, arrivals, settings, folder)


def _sweep(options: LoadOptions, arrivals: str, search: SweepSettings, folder: Path) -> int:
    from headrace.bench.drive.live import open_progress
    from headrace.bench.outputs import write_file
    from headrace.bench.report.html_report import sweep_report
    from headrace.bench.results.summary import summarise
    from headrace.bench.session import ask_scale, at_rate, prepare, run_load
    from headrace.bench.sweep.sweep import NextTrial, next_step, result_of, trial_of
    from headrace.bench.sweep.sweep_result import sweep_table, sweep_to_json

    base = options.workload_with(arrivals.replace("RATE", f"{search.start_rps:.6g}"), search.duration_s)
    settings = options.run_settings()
    salt = _salt(options.salt)
    scale = ask_scale(settings, options.endpoint, os.environ)
    console = Console()
    trials: list[Trial] = []
    while isinstance(step := next_step(trials, search), NextTrial):
        number = len(trials)
        load = prepare(
            at_rate(base, arrivals, step.rate_rps, step.duration_s),
            options.request_options(salt=salt + number),  # other texts each time: no hits in the target's cache
            scale,
            model=options.model,
            seed=options.seed + number,
        )
        path = folder / f"records-{number + 1:02d}-{step.rate_rps:.4g}rps.jsonl"
        result = run_load(load, settings, os.environ, records_path=path, progress=open_progress(sys.stderr))
        trial = trial_of(step.rate_rps, step.duration_s, summarise(result.info, result.records, options.limits()))
        trials.append(trial)
        lanes = ", ".join(f"{name} {lane.good}/{lane.offered}" for name, lane in trial.lanes.items())
        console.print(f"{step.rate_rps:.4g} requests/s: {lanes}{' (invalid)' if trial.invalid else ''}", markup=False)
        if result.info.interrupted:
            click.echo("interrupted", err=True)
            break
    else:
        found = result_of(trials, search, step)
        write_file(folder / "sweep.json", sweep_to_json(found))
        write_file(folder / "report.html", sweep_report(found).encode())
        console.print(sweep_table(found))
        click.echo(f"\nresults: {folder}")
        return 0 if found.answer_rps is not None else EXIT_INVALID
    return 130


@bench.command()
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option("--more-a", multiple=True, type=click.Path(exists=True, path_type=Path), help="Another run of A.")
@click.option("--more-b", multiple=True, type=click.Path(exists=True, path_type=Path), help="Another run of B.")
@click.option("--confidence", type=float, default=0.95, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the bootstrap.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--check", is_flag=True, help="Exit with 4 when B is worse than A beyond noise.")
def compare(
    a: Path,
    b: Path,
    more_a: Sequence[Path],
    more_b: Sequence[Path],
    confidence: float,
    seed: int,
    as_json: bool,
    check: bool,
) -> int:
    """Say what differs between two runs beyond noise.

    A and B are folders of runs, records files or summaries. Several runs of each (--more-a, --more-b) are
    compared by the spread between runs, which is the surest.
    """
    import numpy as np

    from headrace.bench.compare.compare import compare as compared
    from headrace.bench.compare.compare import load_run
    from headrace.bench.compare.comparison import comparison_table, comparison_to_json
    from headrace.bench.outputs import RECORDS

    def warn(text: str) -> None:
        click.echo(f"warning: {text}", err=True)

    def loaded(path: Path) -> Any:
        return load_run(path / RECORDS if path.is_dir() else path, warn)

    comparison = compared(
        [loaded(path) for path in (a, *more_a)],
        [loaded(path) for path in (b, *more_b)],
        np.random.default_rng(seed),
        confidence=confidence,
    )
    if as_json:
        click.echo(comparison_to_json(comparison).decode())
    else:
        for warning in comparison.warnings:
            click.echo(f"warning: {warning}", err=True)
        Console().print(comparison_table(comparison))
    worse = any(one.beyond_noise and one.better == "A" for one in comparison.statements)
    return EXIT_DIFFERS if check and worse else 0


@bench.command()
@click.argument("records", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the files [RECORDS' folder]."
)
@click.option(
    "--send-lag-limit", "send_lag_limit_ms", type=float, default=10.0, show_default=True, help="Milliseconds."
)
@click.option("--full", is_flag=True, help="Print every percentile with its interval.")
def report(records: Path, output: Path | None, send_lag_limit_ms: float, full: bool) -> int:
    """Make summary, CSV and HTML again from a run's records (its folder or its records.jsonl)."""
    from headrace.bench.outputs import read_columns, write_outputs
    from headrace.bench.report.text_report import print_summary

    columns = read_columns(records, lambda warning: click.echo(f"warning: {warning}", err=True))
    folder = output or (records if records.is_dir() else records.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror or error}", where="--output") from error
    summary = write_outputs(folder, columns, Limits(send_lag_p99_s=send_lag_limit_ms / 1e3))
    print_summary(summary, Console(), full=full)
    return EXIT_INVALID if summary.invalid else 0


@bench.command()
@click.argument("name", required=False)
def workloads(name: str | None) -> None:
    """List the workloads that come with headrace, or print one to copy."""
    from headrace.bench.load.workload_file import find_workload, load_workload, shipped_workloads

    if name is not None:
        click.echo(find_workload(name).read_text(encoding="utf-8"), nl=False)
        return
    for known in shipped_workloads():
        click.echo(f"{known}: {load_workload(known).workload.description}")


def _salt(given: int | None) -> int:
    return secrets.randbits(31) if given is None else given
