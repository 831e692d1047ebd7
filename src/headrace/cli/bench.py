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

from headrace.bench.load.arrivals import ARRIVAL_FORMS
from headrace.bench.load.lengths import LENGTH_FORMS
from headrace.bench.results.figures import Limits
from headrace.cli.bench_options import LoadOptions, load_options
from headrace.cli.bench_streams import StreamGroup, open_console, printing, say
from headrace.cli.bench_values import CONFIDENCE, MILLISECONDS, POSITIVE_S, RATE, SEED, SHARE, TOLERANCE
from headrace.cli.main import EXIT_INTERRUPTED
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.drive.runner import RunSettings
    from headrace.bench.record_file import RunResult
    from headrace.bench.records import RequestRecord, RunInfo
    from headrace.bench.session import Load
    from headrace.bench.sweep.sweep import NextTrial
    from headrace.bench.sweep.sweep_result import SweepSettings, Trial

EXIT_INVALID = 3
"""The run ended, but the generator was not up to it: its figures are not the server's."""
EXIT_DIFFERS = 4
"""``bench compare --check`` found B worse than A beyond noise."""

_ASKING = "asking the target how long its words are"
_FORMS = "\b\nArrivals:\n{arrivals}\n\n\b\nLengths (tokens):\n{lengths}".format(
    arrivals="\n".join(f"  {form.signature:<44} {form.example}" for form in ARRIVAL_FORMS),
    lengths="\n".join(f"  {form.signature:<44} {form.example}" for form in LENGTH_FORMS),
)


@click.group(cls=StreamGroup)
def bench() -> None:
    """Load an OpenAI-compatible server, and say what its answers were like."""


@bench.command(epilog=_FORMS)
@load_options
@click.option("--arrivals", metavar="FORM", help="When requests come: poisson(2), closed(32), trace(FILE)...")
@click.option("--duration", "duration_s", type=POSITIVE_S, metavar="S", help="Seconds in which requests come.")
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the results [bench-TIME].")
@click.option("--full", is_flag=True, help="Print every percentile with its interval.")
def run(arrivals: str | None, duration_s: float | None, output: Path | None, full: bool, **given: Any) -> int:
    """Send a load, whatever the server does, and report.

    The load comes from a workload file (--workload) or from --arrivals, --input-length and --output-length. It is
    computed before the first request, from one seed. The folder of results holds the raw records (records.jsonl),
    summary.json, the same in the shape of vLLM's benchmark (vllm.json), two CSV tables and report.html.

    Exit status: 0 done; 1 failed; 3 the run is invalid, because the generator itself was late; 130 interrupted
    (Ctrl-C), with the results of what was sent until then.
    """
    from headrace.bench.outputs import RECORDS, check_packages, new_folder

    check_packages()
    from headrace.bench.session import ask_scale, check_warmup, prepare

    options = LoadOptions(**given)
    workload = options.workload_with(arrivals, duration_s)
    settings, requests = options.run_settings(), options.request_options(salt=_salt(options.salt))
    if workload.workload.duration_s is not None:  # else a trace's, which ``prepare`` reads
        check_warmup(settings.warmup_s, workload.workload.duration_s)
    say(_ASKING)
    scale = ask_scale(settings, requests.endpoint, os.environ)
    load = prepare(workload, requests, scale, model=options.model, seed=options.seed, warmup_s=settings.warmup_s)
    folder = new_folder(output or Path(f"bench-{datetime.now():%Y%m%d-%H%M%S}"))
    result, failure = _run(load, settings, folder / RECORDS)
    return _finish(folder, result, failure, options.limits(), full=full)


def _run(load: Load, settings: RunSettings, records_path: Path) -> tuple[RunResult, ConfigError | None]:
    """The run, and why its records are not all in their file: it is not lost with them."""
    from headrace.bench.drive.live import open_progress
    from headrace.bench.record_file import RecordsNotWritten
    from headrace.bench.session import run_load

    failure: ConfigError | None = None
    try:
        result = run_load(load, settings, os.environ, records_path=records_path, progress=open_progress(sys.stderr))
    except RecordsNotWritten as error:
        result, failure = error.result, error
    for warning in result.warnings:
        say(f"warning: {warning}")
    return result, failure


def _finish(folder: Path, result: RunResult, failure: ConfigError | None, limits: Limits, *, full: bool) -> int:
    """Write, then print, then say what could not be written: a full disk or terminal takes only its own part."""
    from headrace.bench.outputs import nothing_measured, write_outputs
    from headrace.bench.report.text_report import print_summary
    from headrace.bench.results.columns import build_columns
    from headrace.bench.results.summary import summarise_columns

    unmeasured = nothing_measured(result.info)
    summary = None
    if unmeasured is None:
        columns = build_columns(result.info, result.records)
        summary = summarise_columns(columns, limits)
        try:
            write_outputs(folder, columns, summary)
        except ConfigError as error:
            failure = failure or error
    try:
        with printing():
            if summary is None:
                click.echo(unmeasured)
            else:
                print_summary(summary, open_console(), full=full)
            if failure is None:
                click.echo(f"\nresults: {folder}")
    finally:
        if failure is not None:
            raise failure
    if result.info.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_INVALID if summary is None or summary.invalid else 0


@bench.command(epilog=_FORMS)
@load_options
@click.option(
    "--arrivals", default="poisson(RATE)", show_default=True, metavar="FORM", help="Arrivals with RATE in it."
)
@click.option("--start", "start_rps", type=RATE, default=1.0, show_default=True, help="First rate tried, requests/s.")
@click.option(
    "--duration", "duration_s", type=POSITIVE_S, default=60.0, show_default=True, help="Seconds a measurement."
)
@click.option("--attainment", type=SHARE, default=0.99, show_default=True, help="Share of good requests to hold.")
@click.option("--confidence", type=CONFIDENCE, default=0.95, show_default=True, help="Of the answer.")
@click.option("--tolerance", type=TOLERANCE, default=0.05, show_default=True, help="How near to look, relative.")
@click.option("--most-trials", type=click.IntRange(min=1), default=40, show_default=True, help="Measurements at most.")
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
    measured again. Exit status: 0 found; 1 failed; 3 no rate was shown to hold; 130 interrupted (Ctrl-C), with the
    results of the measurements that were whole.
    """
    from headrace.bench.outputs import check_packages

    check_packages()
    from headrace.bench.session import check_warmup
    from headrace.bench.sweep.sweep import check_settings
    from headrace.bench.sweep.sweep_result import SweepSettings

    options = LoadOptions(**given)
    if "RATE" not in arrivals:
        raise ConfigError("needs the word RATE where the rate belongs, e.g. poisson(RATE)", where="--arrivals")
    settings = SweepSettings(
        start_rps=start_rps,
        duration_s=duration_s,
        target=attainment,
        confidence=confidence,
        tolerance=tolerance,
        most_trials=most_trials,
    )
    check_settings(settings)
    check_warmup(options.warmup_s, duration_s)
    return _sweep(options, arrivals, settings, output or Path(f"sweep-{datetime.now():%Y%m%d-%H%M%S}"))


def _sweep(options: LoadOptions, arrivals: str, search: SweepSettings, folder: Path) -> int:
    from headrace.bench.outputs import new_folder, write_file
    from headrace.bench.report.html_report import sweep_report
    from headrace.bench.session import ask_scale, at_rate, prepare
    from headrace.bench.sweep.sweep import sweep as search_rates
    from headrace.bench.sweep.sweep_result import sweep_table, sweep_to_json

    base = options.workload_with(arrivals.replace("RATE", f"{search.start_rps:.6g}"), search.duration_s)
    settings = options.run_settings()
    salt = _salt(options.salt)
    options.request_options(salt=salt)  # what is wrong with them comes before the target is asked
    say(_ASKING)
    scale = ask_scale(settings, options.endpoint, os.environ)
    new_folder(folder)
    console = open_console()
    failure: ConfigError | None = None

    def measure(number: int, step: NextTrial) -> tuple[RunInfo, Sequence[RequestRecord]]:
        nonlocal failure
        load = prepare(
            at_rate(base, arrivals, step.rate_rps, step.duration_s),
            options.request_options(salt=salt + number),  # other texts each time: no hits in the target's cache
            scale,
            model=options.model,
            seed=options.seed + number,
            warmup_s=settings.warmup_s,
        )
        result, failure = _run(load, settings, folder / f"records-{number + 1:02d}-{step.rate_rps:.4g}rps.jsonl")
        return result.info, result.records

    def on_trial(trial: Trial) -> None:
        lanes = ", ".join(f"{name} {lane.good}/{lane.offered}" for name, lane in trial.lanes.items())
        with printing():
            console.print(
                f"{trial.rate_rps:.4g} requests/s: {lanes}{' (invalid)' if trial.invalid else ''}", markup=False
            )
        if failure is not None:
            raise failure

    found = search_rates(measure, search, limits=options.limits(), on_trial=on_trial)
    if found is None:
        say(f"interrupted; the records so far: {folder}")
        return EXIT_INTERRUPTED
    with printing():
        console.print(sweep_table(found))
    write_file(folder / "sweep.json", sweep_to_json(found))
    write_file(folder / "report.html", sweep_report(found).encode())
    with printing():
        click.echo(f"\nresults: {folder}")
    if found.reason == "interrupted":
        return EXIT_INTERRUPTED
    return 0 if found.answer_rps is not None else EXIT_INVALID


@bench.command()
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option("--more-a", multiple=True, type=click.Path(exists=True, path_type=Path), help="Another run of A.")
@click.option("--more-b", multiple=True, type=click.Path(exists=True, path_type=Path), help="Another run of B.")
@click.option("--confidence", type=CONFIDENCE, default=0.95, show_default=True)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the bootstrap.")
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

    def loaded(path: Path) -> Any:
        return load_run(path / RECORDS if path.is_dir() else path, lambda text: say(f"warning: {text}"))

    comparison = compared(
        [loaded(path) for path in (a, *more_a)],
        [loaded(path) for path in (b, *more_b)],
        np.random.default_rng(seed),
        confidence=confidence,
    )
    if not as_json:
        for warning in comparison.warnings:
            say(f"warning: {warning}")
    with printing():
        if as_json:
            click.echo(comparison_to_json(comparison).decode())
        else:
            open_console().print(comparison_table(comparison))
    worse = any(one.beyond_noise and one.better == "A" for one in comparison.statements)
    return EXIT_DIFFERS if check and worse else 0


@bench.command()
@click.argument("records", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the files [RECORDS' folder]."
)
@click.option(
    "--send-lag-limit", "send_lag_limit_ms", type=MILLISECONDS, default=10.0, show_default=True, help="Milliseconds."
)
@click.option("--full", is_flag=True, help="Print every percentile with its interval.")
def report(records: Path, output: Path | None, send_lag_limit_ms: float, full: bool) -> int:
    """Make summary, CSV and HTML again from a run's records (its folder or its records.jsonl).

    Exit status: 0 done; 1 failed; 3 the run is invalid, or was ended before its warm-up was over: it has no figures.
    """
    from headrace.bench.outputs import check_packages, nothing_measured, read_columns, write_outputs
    from headrace.bench.report.text_report import print_summary
    from headrace.bench.results.summary import summarise_columns

    check_packages()
    columns = read_columns(records, lambda warning: say(f"warning: {warning}"))
    if unmeasured := nothing_measured(columns.info):
        with printing():
            click.echo(unmeasured)
        return EXIT_INVALID
    folder = output or (records if records.is_dir() else records.parent)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror or error}", where="--output") from error
    summary = summarise_columns(columns, Limits(send_lag_p99_s=send_lag_limit_ms / 1e3))
    failure: ConfigError | None = None
    try:
        write_outputs(folder, columns, summary)
    except ConfigError as error:
        failure = error
    with printing():
        print_summary(summary, open_console(), full=full)
    if failure is not None:
        raise failure
    return EXIT_INVALID if summary.invalid else 0


@bench.command()
@click.argument("name", required=False)
def workloads(name: str | None) -> None:
    """List the workloads that come with headrace, or print one to copy."""
    from headrace.bench.load.workload_file import load_workload, shipped_workload, shipped_workloads

    with printing():
        if name is not None:
            click.echo(shipped_workload(name).read_text(encoding="utf-8"), nl=False)
            return
        for known in shipped_workloads():
            click.echo(f"{known}: {load_workload(known).workload.description}")


def _salt(given: int | None) -> int:
    return secrets.randbits(31) if given is None else given
