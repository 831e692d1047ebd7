"""``headrace kv gate``: is a coarser KV cache good enough for a model.

Exit codes: 0 every precision asked for passes, 1 one fails or cannot be measured, 2 the command line is wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.table import Table

from headrace.cli.model import shown_progress
from headrace.kv.precision import KV_DTYPES, KvDtype
from headrace.models import store

if TYPE_CHECKING:
    from headrace.evaluate.kv_gate.measure import Progress
    from headrace.evaluate.kv_gate.results import GateResult

_FIRST_WORD = 3
_PLAIN_WIDTH = 160
_COARSER = KV_DTYPES[1:]


@click.group()
def kv() -> None:
    """Judge how precisely KV memory must be kept."""


@kv.command()
@click.option("--model", default="smollm2", show_default=True, metavar="NAME|PATH.gguf", help="The model to judge.")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(_COARSER),
    multiple=True,
    help="A precision to judge; may be given several times [all].",
)
@click.option(
    "--prompts",
    "many_prompts",
    type=click.IntRange(min=1),
    metavar="N",
    help="Only the first N prompts: a quick look whose result is not kept and does not count [all].",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Compute threads [as many as cores].")
@click.option("--gpu-layers", type=click.IntRange(0, 10_000), default=0, show_default=True, help="Layers on the GPU.")
@click.option("--show", is_flag=True, help="Show the results that are there; measure nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def gate(
    model: str,
    dtypes: Sequence[KvDtype],
    many_prompts: int | None,
    threads: int | None,
    gpu_layers: int,
    show: bool,
    as_json: bool,
) -> None:
    """Compare KV precisions with F16 on a model, and keep the result beside it.

    The prompt set that headrace ships is answered with KV at F16 and at each precision. A precision passes when the
    likeliest tokens, the distributions and the exact answers stay what they are at F16. `headrace serve` refuses a
    kv_dtype that has not passed for its model. The whole set takes minutes; what is left is told meanwhile.
    """
    from headrace.evaluate.kv_gate.admit import gate_key, missing
    from headrace.evaluate.kv_gate.prompts import first_prompts, shipped_prompts
    from headrace.evaluate.kv_gate.results import read_results, result_path
    from headrace.evaluate.kv_gate.run import run_gate

    if show and many_prompts is not None:
        raise click.UsageError("--prompts measures, --show does not: give one of them")
    wanted = list(dtypes) or list(_COARSER)
    with shown_progress() as progress:
        path = store.resolve(model, progress)
    if show:
        key = gate_key(path)
        stored = read_results(result_path(path))
        results = [result for result in stored if result.key == key and result.dtype in wanted]
        absent = missing(wanted, stored, key)
    else:
        prompts = None if many_prompts is None else first_prompts(shipped_prompts(), many_prompts)
        say = _Teller(time.monotonic)
        results = list(run_gate(path, wanted, threads=threads, gpu_layers=gpu_layers, on_prompt=say, prompts=prompts))
        absent = []
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode([_described(result) for result in results])).decode())
    elif results:
        _print(results)
    for dtype in absent:
        click.echo(f"no result for {dtype}: headrace kv gate --model {model} --dtype {dtype}", err=True)
    if not show and not as_json:
        kept = f"kept in {result_path(path)}" if many_prompts is None else "not kept: not the whole prompt set"
        click.echo(kept)
    if absent or any(result.scores.shortcomings() for result in results):
        raise SystemExit(1)


def run_for_serve(path: Path, dtypes: Sequence[KvDtype], *, threads: int | None, gpu_layers: int) -> None:
    """The gate as ``serve`` runs it when asked to: results are kept, nothing is printed but progress. Raises
    GateError."""
    from headrace.evaluate.kv_gate.run import run_gate

    run_gate(path, dtypes, threads=threads, gpu_layers=gpu_layers, on_prompt=_Teller(time.monotonic))


class _Teller:
    """Says on stderr how far the gate is and about how long it will take yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = clock()

    def __call__(self, progress: Progress) -> None:
        done, last = progress.done, progress.done == progress.total
        if not (sys.stderr.isatty() or done == _FIRST_WORD or done % 10 == 0 or last):
            return
        left_s = (self._clock() - self._started_s) * (1 - progress.share) / progress.share
        end = "\n" if last or not sys.stderr.isatty() else "\r"
        line = f"prompt {done} of {progress.total}: {progress.name:<20} about {left_s:.0f} s left"
        print(f"{line:<70}", file=sys.stderr, end=end, flush=True)


def _described(result: GateResult) -> dict[str, object]:
    problems = result.scores.shortcomings()
    figures = {
        "drop_points": result.scores.drop_points,
        "drop_bound_points": result.scores.drop_bound_points,
        "passed": not problems,
        "problems": problems,
    }
    return {**msgspec.to_builtins(result), **figures}


def _print(results: Sequence[GateResult]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("dtype", "agreement", "mean KL", "p99 KL", "answers right", "drop (95 %)", "same text", "verdict"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("dtype", "verdict") else "right")
    for result in results:
        scores = result.scores
        right = scores.reference_right - scores.lost + scores.won
        table.add_row(
            result.dtype,
            f"{scores.agreement:.2%}",
            f"{scores.mean_kl:.5f}",
            f"{scores.p99_kl:.4f}",
            f"{right} of {scores.answers} (lost {scores.lost}, won {scores.won})",
            f"{scores.drop_points:+.2f} (< {scores.drop_bound_points:.2f})",
            f"{scores.greedy_same} of {scores.greedy_total}",
            "fails" if scores.shortcomings() else "passes",
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(table)
    first = results[0]
    console.print(f"{first.scores.positions} positions; measured {first.measured_at}, {first.took_s:.0f} s together")
    for result in results:
        for problem in result.scores.shortcomings():
            console.print(f"{result.dtype}: {problem}")
