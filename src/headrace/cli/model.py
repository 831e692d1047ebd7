"""``headrace model``: list, pull, path, rm."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from headrace.models import store
from headrace.models.progress import OnProgress, PullProgress, Stage

_PLAIN_INTERVAL_S = 5.0


@click.group()
def model() -> None:
    """Fetch, list and remove models.

    Models are kept in the user's cache folder (or in $HEADRACE_CACHE_DIR). A GGUF file of your own needs no
    installation: headrace serve --model PATH.gguf
    """


@model.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_(as_json: bool) -> None:
    """Show the models that can be pulled, and which are installed."""
    statuses = store.list_models()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(statuses)).decode())
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "model", "license", "format"):
        table.add_column(heading, no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("installed", no_wrap=True)
    for status in statuses:
        size = f"{status.bytes / 1e6:.0f} MB"
        installed = "yes" if status.path else "no"
        table.add_row(status.name, status.title, status.license, status.quantisation, size, installed)
    Console().print(table)


@model.command()
@click.argument("name")
def pull(name: str) -> None:
    """Install the model NAME; does nothing when it is installed."""
    spec = store.find_spec(name)
    with shown_progress() as progress:
        path = store.pull(spec, progress)
    click.echo(path)


@model.command()
@click.argument("name")
def path(name: str) -> None:
    """Print where the installed model NAME lies."""
    click.echo(store.path_of(name))


@model.command()
@click.argument("name")
def rm(name: str) -> None:
    """Remove the installed model NAME."""
    freed = store.remove(name)
    click.echo(f"removed {name}: {freed / 1e6:.0f} MB freed")


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """A callback that shows a pull on stderr: a live bar on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _PlainProgress()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), _BytesColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        yield _BarProgress(bars)


class _BytesColumn(DownloadColumn):
    """Bytes done and to do; empty for a stage that does not count bytes."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


class _BarProgress:
    """One bar a stage."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[Stage, TaskID] = {}

    def __call__(self, progress: PullProgress) -> None:
        if progress.stage not in self._tasks:
            for task in self._tasks.values():
                self._bars.stop_task(task)
            text = _text(progress)
            self._tasks[progress.stage] = self._bars.add_task(text, total=progress.total or None)
        self._bars.update(
            self._tasks[progress.stage], completed=progress.done, total=progress.total or None, refresh=False
        )


class _PlainProgress:
    """A line when a stage begins, and every few seconds while it goes on."""

    def __init__(self) -> None:
        self._stage: Stage | None = None
        self._shown_at = 0.0

    def __call__(self, progress: PullProgress) -> None:
        now = time.monotonic()
        if progress.stage == self._stage and now - self._shown_at < _PLAIN_INTERVAL_S:
            return
        self._stage, self._shown_at = progress.stage, now
        share = f" {progress.done / progress.total:.0%} of {progress.total / 1e6:.0f} MB" if progress.total else ""
        print(f"{_text(progress)}{share}", file=sys.stderr, flush=True)


def _text(progress: PullProgress) -> str:
    if progress.stage == "waiting":
        return f"{progress.model}: waiting for another pull"
    return f"{progress.model}: {progress.stage}"
