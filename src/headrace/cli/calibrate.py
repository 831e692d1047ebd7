"""``headrace calibrate``: measure step times, for the simulator.

Exit codes: 0 done, 1 it could not be measured or written (one line on stderr), 2 the command line is wrong,
130 interrupted.
"""

from __future__ import annotations

import os
import platform
import secrets
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.cli.bench_streams import StreamGroup, open_console, printing, say
from headrace.cli.bench_values import POSITIVE_S, TEXT
from headrace.cli.plan_values import SEQUENCES, TOKENS
from headrace.simulate.hardware.times_forms import TIMES_FORMS

if TYPE_CHECKING:
    from headrace.simulate.calibrate.fit import Fitted
    from headrace.simulate.calibrated import Calibration


_SHOWN_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SHOWN_PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_FORMS = "\b\nStep times:\n{forms}".format(
    forms="\n".join(f"  {form.signature}\n      {form.meaning}\n      {form.example}" for form in TIMES_FORMS)
)


@click.group(cls=StreamGroup)
def calibrate() -> None:
    """Measure how long steps take, for the simulator.

    The result is a profile file: time of a pass by its rows, what context and prompts add, what passes beside it.
    Stop other work on the machine first: what disturbs the measurement is in its result.
    """


@calibrate.command()
@click.option("--config", "config_path", metavar="FILE", help="Configuration file (default: ./headrace.yaml if there).")
@click.option(
    "--model", metavar="NAME|PATH.gguf", help="Model to measure: a name from 'headrace model list' or a GGUF."
)
@click.option(
    "--most-time", "most_s", type=POSITIVE_S, default=120.0, show_default=True, metavar="S", help="Stop measuring then."
)
@click.option("--repeats", type=click.IntRange(3, 100), default=9, show_default=True, help="Passes of each kind.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("calibration.json"), show_default=True, metavar="FILE"
)
def engine(config_path: str | None, model: str | None, most_s: float, repeats: int, output: Path) -> None:
    """Measure the embedded engine with the bands, threads and model of a configuration.

    The engine runs in this process, as in 'headrace serve', and computes chosen work: decodes in batches of every
    size over short and long contexts, prompt chunks of every size. No server is started.
    """
    import msgspec

    from headrace.cli.serve import ServeOptions, start_message
    from headrace.engines.llama.build import build
    from headrace.models import store
    from headrace.simulate.calibrate.engine import measure_engine
    from headrace.simulate.calibrate.fit import fit

    options = ServeOptions(config_path, model, None, None, None)
    config = options.load().config
    path = store.resolve(config.model.source)
    start = msgspec.structs.replace(
        start_message(config, path, config.model.source), prefix_cache=False, spill_dir=None
    )
    say(f"loading {path.name}")
    built = build(start)
    try:
        measured = measure_engine(
            built.core, vocab_size=built.ready.model.vocab_size, most_s=most_s, repeats=repeats, progress=say
        )
    finally:
        built.core.abort_all()
        built.core.close()
    decodes, prompts = fit(measured.decodes), fit(measured.prompts)
    threads = built.core.threads
    calibration = _calibration(
        decodes,
        prompts,
        source=f"headrace calibrate engine, {threads} {'thread' if threads == 1 else 'threads'}",
        model=built.ready.model.name,
        machine=_machine(built.ready.processor),
        layout="libllama",
        overhead_s=measured.overhead_s,
        copy_s_per_token=measured.copy_s_per_token,
        bands=[(band.max_context_tokens, band.max_sequences) for band in built.core.residents.bands],
    )
    _finish(output, calibration)


@calibrate.command()
@click.option("--target", required=True, metavar="URL", help="Server, e.g. http://127.0.0.1:8000.")
@click.option("--model", required=True, type=TEXT, metavar="NAME", help="Model name that requests carry.")
@click.option("--context", type=TOKENS, default=4096, show_default=True, metavar="TOKENS", help="Longest sequence.")
@click.option("--together", type=SEQUENCES, default=16, show_default=True, help="Most requests at once.")
@click.option(
    "--point-time",
    "point_s",
    type=POSITIVE_S,
    default=3.0,
    show_default=True,
    metavar="S",
    help="For each combination.",
)
@click.option("--api-key-env", metavar="VARIABLE", help="Variable with the API key [OPENAI_API_KEY if set].")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("calibration.json"), show_default=True, metavar="FILE"
)
def server(
    target: str, model: str, context: int, together: int, point_s: float, api_key_env: str | None, output: Path
) -> None:
    """Measure an OpenAI-compatible server from outside, with requests.

    Prompts of growing length one at a time, then answers at 1, 2, 4... requests at once. The server should have
    nothing else to do. Needs the packages of headrace[bench].
    """
    from headrace.bench.drive.runner import RunSettings
    from headrace.bench.outputs import check_packages
    from headrace.simulate.calibrate.server import measure_server, plan_for
    from headrace.simulate.calibrated import Calibration

    check_packages()
    settings = RunSettings(target=target, model=model, api_key_env=api_key_env)
    plan = plan_for(context, together, point_s)
    measured = measure_server(settings, plan, os.environ, seed=secrets.randbelow(1 << 31), progress=say)
    errors = sorted([abs(error) for error in (*measured.errors, *measured.decodes.errors)])
    _finish(
        output,
        Calibration(
            format="headrace-step-times-1",
            source=f"headrace calibrate server, {measured.requests} requests to {target}",
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            model=model,
            machine="not known: measured from outside",
            decode_ms=[(rows, round(taken * 1e3, 6)) for rows, taken in measured.decodes.curve],
            prompt_ms=[(rows, round(taken, 6)) for rows, taken in measured.prompt_ms],
            context_s=measured.decodes.reach_s,
            pair_s=measured.pair_s,
            layout="fused",
            edge_s=measured.edge_s,
            passes=len(errors),
            error_median=_at(errors, 0.5),
            error_p90=_at(errors, 0.9),
        ),
    )


@calibrate.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--target", required=True, metavar="URL", help="The idle server that runs the calibrated engine.")
@click.option("--model", required=True, type=TEXT, metavar="NAME", help="Model name that requests carry.")
@click.option("--point-time", "point_s", type=POSITIVE_S, default=5.0, show_default=True, metavar="S", help="How long.")
@click.option("--api-key-env", metavar="VARIABLE", help="Variable with the API key [OPENAI_API_KEY if set].")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("in-service.json"), show_default=True, metavar="FILE"
)
def service(file: Path, target: str, model: str, point_s: float, api_key_env: str | None, output: Path) -> None:
    """Add to the profile FILE of an engine what serving adds.

    Sends single requests to the idle server: how much longer steps are beside the gateway and this client, and what
    passes beside every request. Needs the packages of headrace[bench].
    """
    from headrace.bench.drive.runner import RunSettings
    from headrace.bench.outputs import check_packages
    from headrace.simulate.calibrate.server import measure_in_service
    from headrace.simulate.calibrated import CalibratedTimes, at_pace, read_calibration

    check_packages()
    alone = read_calibration(file)
    seen = measure_in_service(
        RunSettings(target=target, model=model, api_key_env=api_key_env),
        os.environ,
        CalibratedTimes(alone),
        alone.overhead_s,
        seed=secrets.randbelow(1 << 31),
        point_s=point_s,
    )
    say(f"in service steps are {seen.pace:.3f} times as long; beside each request pass {seen.edge_s * 1e3:.2f} ms")
    _finish(output, at_pace(alone, seen.pace, seen.edge_s))


@calibrate.command(epilog=_FORMS)
@click.argument("times")
@click.option("--context", type=TOKENS, default=1024, show_default=True, metavar="TOKENS", help="Of each decode.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def show(times: str, context: int, as_json: bool) -> None:
    """Show step times: of a profile file, of a roofline, of a table of measurements.

    TIMES is a file that 'headrace calibrate' wrote, or one of the forms below. Decodes are shown by batch, prompts by
    length.
    """
    import msgspec

    from headrace.simulate.hardware.open_times import open_times
    from headrace.simulate.hardware.work import Chunk, Work

    opened = open_times(times)
    decodes = [(count, opened.pass_s(Work(count, count * context))) for count in _SHOWN_DECODES]
    prompts = [(tokens, opened.pass_s(Work(chunks=(Chunk(0, tokens),)))) for tokens in _SHOWN_PROMPTS]
    with printing():
        if as_json:
            document = {"source": opened.source, "context_tokens": context, "decode_s": decodes, "prompt_s": prompts}
            click.echo(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
            return
        click.echo(opened.source)
        _print_table(f"decodes, {context} tokens of context each", "sequences", decodes)
        _print_table("prompts", "tokens", prompts)


@calibrate.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def hardware(as_json: bool) -> None:
    """Hardware that is known by name, with the origin of its figures."""
    import msgspec
    from rich.table import Table

    from headrace.simulate.hardware.efficiency import efficiencies
    from headrace.simulate.hardware.profiles import hardware as profiles

    with printing():
        if as_json:
            click.echo(msgspec.json.format(msgspec.json.encode(list(profiles().values())), indent=1).decode())
            return
        table = Table(box=None, pad_edge=False)
        for heading in ("name", "TFLOP/s f16", "fp8", "fp4", "GB/s", "GiB", "link GB/s", "source"):
            table.add_column(heading)
        for item in profiles().values():
            rates = [item.flops_per_s.get(kind) for kind in ("f16", "fp8", "fp4")]
            table.add_row(
                item.name,
                *[f"{rate / 1e12:.0f}" if rate else "-" for rate in rates],
                f"{item.memory_bytes_per_s / 1e9:.0f}",
                f"{item.memory_bytes / (1 << 30):.0f}",
                f"{item.link_bytes_per_s / 1e9:.0f}",
                f"{item.source}, {item.date}",
            )
        open_console().print(table)
        click.echo(f"\ncalibrations: default, {', '.join(efficiencies())}")


def _print_table(title: str, unit: str, points: list[tuple[int, float]]) -> None:
    from rich.table import Table

    table = Table(unit, "ms", "tokens/s", title=title, box=None, pad_edge=False)
    for count, taken_s in points:
        table.add_row(str(count), f"{taken_s * 1e3:.3f}", f"{count / taken_s:,.0f}" if taken_s else "")
    open_console().print(table)


def _calibration(
    decodes: Fitted,
    prompts: Fitted,
    *,
    source: str,
    model: str,
    machine: str,
    layout: str,
    overhead_s: float,
    copy_s_per_token: float,
    bands: list[tuple[int, int]],
) -> Calibration:
    from headrace.simulate.calibrate.fit import spread
    from headrace.simulate.calibrated import Calibration

    errors = sorted([abs(error) for error in (*decodes.errors, *prompts.errors)])
    return Calibration(
        format="headrace-step-times-1",
        source=source,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        model=model,
        machine=machine,
        decode_ms=[(rows, round(taken * 1e3, 6)) for rows, taken in decodes.curve],
        prompt_ms=[(rows, round(taken * 1e3, 6)) for rows, taken in prompts.curve],
        context_s=decodes.reach_s,
        pair_s=prompts.reach_s,
        layout="libllama" if layout == "libllama" else "fused",
        copy_s_per_token=copy_s_per_token,
        overhead_s=overhead_s,
        noise=statistics.mean([spread(decodes.errors), spread(prompts.errors)]),
        passes=len(errors),
        error_median=_at(errors, 0.5),
        error_p90=_at(errors, 0.9),
        bands=bands,
    )


def _finish(output: Path, calibration: Calibration) -> None:
    from headrace.simulate.calibrated import write_calibration

    write_calibration(output, calibration)
    with printing():
        _print(calibration)
        click.echo(f"\nwritten: {output}")


def _print(calibration: Calibration) -> None:
    from rich.table import Table

    console = open_console()
    click.echo(f"{calibration.model}: {calibration.source}, {calibration.date}")
    click.echo(f"machine: {calibration.machine}")
    for title, points in (("decodes", calibration.decode_ms), ("prompts", calibration.prompt_ms)):
        table = Table("rows", "ms", "rows/s", title=title, box=None, pad_edge=False)
        for rows, taken in points:
            table.add_row(str(rows), f"{taken:.3f}", f"{rows / taken * 1e3:,.0f}" if taken else "")
        console.print(table)
    click.echo(
        f"each token of context {calibration.context_s * 1e6:.4f} us, each pair {calibration.pair_s * 1e9:.4f} ns, "
        f"beside each step {calibration.overhead_s * 1e3:.3f} ms, beside each request {calibration.edge_s * 1e3:.3f} ms"
    )
    click.echo(
        f"{calibration.passes} passes measured; off by {calibration.error_median:.1%} (median), "
        f"{calibration.error_p90:.1%} (p90)"
    )


def _machine(processor: str) -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, {processor}"


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
