"""``headrace simulate``: what would happen, on hardware that is described and not owned."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.bench.load.arrivals import ARRIVAL_FORMS
from headrace.bench.load.lengths import LENGTH_FORMS
from headrace.cli.bench_streams import StreamGroup, open_console, printing, say
from headrace.cli.bench_values import RATE
from headrace.cli.simulate_options import SimulateOptions, key_values, load_options
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.results.columns import Columns
    from headrace.simulate.fleet.run import SimulatedRun
    from headrace.simulate.sweep import SweepPoint

_FORMS = "\b\nArrivals:\n{arrivals}\n\n\b\nLengths (tokens):\n{lengths}".format(
    arrivals="\n".join(f"  {form.signature:<44} {form.example}" for form in ARRIVAL_FORMS),
    lengths="\n".join(f"  {form.signature:<44} {form.example}" for form in LENGTH_FORMS),
)


@click.group(cls=StreamGroup)
def simulate() -> None:
    """Run the same lanes, admission, routing and scheduling on a virtual clock, against described hardware.

    SCENARIO is a YAML file, or the name of one that comes with headrace (`headrace simulate scenarios` lists them).
    """


@simulate.command(epilog=_FORMS)
@click.argument("scenario")
@load_options
@click.option("--arrivals", metavar="FORM", help="When requests come: poisson(2), closed(32), trace(FILE)...")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the results [simulated-TIME]."
)
@click.option("--full", is_flag=True, help="Print every percentile with its interval.")
@click.option("--check", is_flag=True, help="Compare all accounts now and then; an error for any difference.")
def run(scenario: str, arrivals: str | None, output: Path | None, full: bool, check: bool, **given: Any) -> int:
    """Simulate one run and report it as `headrace bench run` does.

    The load is the same as bench sends: a workload file (--workload), or --arrivals with --input-length and
    --output-length. The folder of results holds the same files, marked as simulated; `headrace bench compare` takes
    it beside a measured one. The same scenario, workload and seed give the same bytes.

    Exit status: 0 done; 1 failed; 3 there is nothing to report.
    """
    from dataclasses import replace

    from headrace.bench.outputs import RECORDS, check_packages, new_folder, read_columns
    from headrace.bench.record_file import RecordWriter
    from headrace.simulate.fleet.run import SimulatedLoad, quiet_collector

    check_packages()
    options = SimulateOptions(**given)
    load = SimulatedLoad(
        options.scenario(scenario), options.workload_with(arrivals), replace(options.run_options(), checked=check)
    )
    folder = new_folder(output or Path(f"simulated-{datetime.now():%Y%m%d-%H%M%S}"))
    records = folder / RECORDS
    with RecordWriter(records, load.first_info()) as writer, quiet_collector():
        done = load.run(writer.write, _progress(load.stream.duration_s))
        writer.finish(done.info)
    columns = read_columns(records, lambda warning: say(f"warning: {warning}"))
    return _report(folder, done, columns, full=full)


def _report(folder: Path, done: SimulatedRun, columns: Columns, *, full: bool) -> int:
    import msgspec

    from headrace.bench.outputs import write_file, write_outputs
    from headrace.bench.report.grid import print_grid
    from headrace.bench.report.text_report import print_summary
    from headrace.bench.results.summary import summarise_columns
    from headrace.simulate.fleet.report import groups_grid

    summary = summarise_columns(columns)
    write_outputs(folder, columns, summary)
    write_file(folder / "fleet.json", msgspec.json.format(msgspec.json.encode(done.groups), indent=1))
    with printing():
        console = open_console()
        print_summary(summary, console, full=full)
        console.print()
        print_grid(groups_grid(done.groups), console)
        click.echo(f"\nresults: {folder}")
    return 3 if summary.invalid else 0


def _progress(duration_s: float) -> Any:
    """Says how far the run is, where somebody looks."""
    if not sys.stderr.isatty():
        return None

    def show(now_s: float) -> None:
        print(f"\r{now_s:,.0f} of {duration_s:,.0f} s simulated ", end="", file=sys.stderr, flush=True)

    return show


@simulate.command(epilog=_FORMS)
@click.argument("scenario")
@load_options
@click.option("--rate", "rates", multiple=True, type=RATE, metavar="R", help="Requests/s; may be given several times.")
@click.option(
    "--arrivals",
    default=None,
    metavar="FORM",
    help="Arrivals with RATE in it, where --rate is given [poisson(RATE)]; else as of `simulate run`.",
)
@click.option("--knob", "knobs", multiple=True, metavar="KEY=V,V", help="Values of the scenario to try.")
@click.option(
    "--processes", type=click.IntRange(min=1, max=1024), metavar="N", help="Runs at a time [as many as cores]."
)
@click.option("--output", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the results [sweep-TIME].")
def sweep(
    scenario: str,
    rates: tuple[float, ...],
    arrivals: str | None,
    knobs: tuple[str, ...],
    processes: int | None,
    output: Path | None,
    **given: Any,
) -> int:
    """Simulate every combination of rates and of values of the scenario.

    A knob is a key of the scenario: `groups.main.replicas=4,8`, `gateway.routing=random,power-of-two`,
    `groups.*.engine.policy=vllm,hybrid`. The folder of results holds sweep.json, sweep.csv and sweep.svg.

    Exit status: 0 done; 1 failed.
    """
    from headrace.bench.outputs import check_packages, write_file
    from headrace.bench.report.grid import Grid, print_grid
    from headrace.simulate import sweep as sweeping
    from headrace.simulate.sweep_plot import sweep_plot

    check_packages()
    options = SimulateOptions(**given)
    form = arrivals or ("poisson(RATE)" if rates else None)
    if rates and form is not None and "RATE" not in form:
        raise ConfigError("needs the word RATE where the rate belongs, e.g. poisson(RATE)", where="--arrivals")
    first = form.replace("RATE", f"{rates[0]:.6g}") if rates and form is not None else form
    workload = options.workload_with(first)
    varied = dict([key_values(text, "--knob") for text in knobs])
    if not rates and not varied:
        raise ConfigError("say what to vary: --rate 100 --rate 200, or --knob groups.main.replicas=4,8", where="sweep")
    wanted = sweeping.combinations(
        options.scenario(scenario),
        workload,
        options.run_options(),
        rates_rps=rates,
        arrivals=form or "",
        knobs=varied,
    )
    folder = _fresh(output or Path(f"sweep-{datetime.now():%Y%m%d-%H%M%S}"))

    def on_point(number: int, point: SweepPoint) -> None:
        rate = "" if point.rate_rps is None else f"{point.rate_rps:g} requests/s "
        values = " ".join([f"{key}={value}" for key, value in point.knobs.items()])
        say(f"{number + 1} of {len(wanted)}: {rate}{values}: {point.good:,} of {point.offered:,} good")

    points = list(sweeping.run_all(wanted, processes or os.cpu_count() or 1, on_point))
    first_run = wanted[0].workload.workload
    result = sweeping.SimulatedSweep(
        scenario=wanted[0].scenario.name,
        workload=workload.name,
        seed=options.seed,
        duration_s=first_run.duration_s or 0.0,
        points=points,
    )
    write_file(folder / "sweep.json", _json(result))
    write_file(folder / "sweep.csv", sweeping.to_csv(points).encode())
    plot = sweep_plot(points, f"{result.scenario}, {result.workload}")
    if plot is not None:
        write_file(folder / "sweep.svg", plot)
    with printing():
        console = open_console()
        console.print("SIMULATED: these times are those of a model, not of a server", style="bold magenta")
        print_grid(Grid(sweeping.headings(points), sweeping.rows(points)), console)
        click.echo(f"\nresults: {folder}")
    return 0


def _fresh(path: Path) -> Path:
    """Create a folder for a sweep. Raises ConfigError when it cannot be, or holds one already."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be created: {error.strerror or error}", where="--output") from error
    if (path / "sweep.json").exists():
        raise ConfigError(f"{path} holds a sweep already; name another folder", where="--output")
    return path


def _json(result: Any) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(result), indent=1)


@simulate.command()
@click.argument("name", required=False)
def scenarios(name: str | None) -> None:
    """List the scenarios that come with headrace, or print one to copy."""
    from headrace.simulate.fleet.scenario_file import load_scenario, shipped_scenario, shipped_scenarios

    with printing():
        if name is not None:
            click.echo(shipped_scenario(name).read_text(encoding="utf-8"), nl=False)
            return
        for known in shipped_scenarios():
            click.echo(f"{known}: {load_scenario(known).scenario.description}")
