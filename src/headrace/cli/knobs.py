"""``headrace knobs get|set|reset``: the live values of a running server.

Exit codes: 0 done, 1 the server is not there or refuses (one line on stderr), 2 the command line is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.cli.admin_client import AdminClient, checked_url
from headrace.config.environment import ADMIN_KEY_VARIABLE
from headrace.config.shape import nearest
from headrace.errors import AdminRequestFailed

_PATH = "/admin/knobs"
_PLAIN_WIDTH = 200  # a file or a pipe has no edge

Command = TypeVar("Command", bound=Callable[..., Any])
Described = Mapping[str, Any]
"""One knob as the server describes it."""


def _url(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        return checked_url(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def server_options(command: Command) -> Command:
    """``--url``, ``--key`` and ``--json``, the same for every subcommand."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON."),
        click.option("--key", metavar="KEY", envvar=ADMIN_KEY_VARIABLE, help=f"An admin key [{ADMIN_KEY_VARIABLE}]."),
        click.option(
            "--url", metavar="URL", default="http://127.0.0.1:8000", callback=_url, help="The server [its default]."
        ),
    ):
        command = option(command)
    return command


@click.group("knobs")
def knobs() -> None:
    """Read and change how a running server schedules.

    A change holds from the next step on: nothing restarts, no request is lost. It lasts until the server ends
    or `reset`; the configuration file is the place for what shall stay.
    """


@knobs.command("get")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@server_options
def get(names: Sequence[str], url: str, key: str | None, as_json: bool) -> None:
    """Show every knob, or those named, with what they mean.

    lane_caps stands for lane_caps.NAME of every lane, lane_weights and band_caps likewise.
    """
    shown = _named(AdminClient(url, key).ask("GET", _PATH)["knobs"], names)
    if as_json:
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    _print(_table(shown, meanings=bool(names)))


@knobs.command("set")
@click.argument("settings", nargs=-1, required=True, metavar="NAME=VALUE...")
@server_options
def set_knobs(settings: Sequence[str], url: str, key: str | None, as_json: bool) -> None:
    """Change knobs, all or none: max_prefill_tokens=256 lane_caps.long=2

    null takes a cap away: lane_caps.long=null
    """
    _report(AdminClient(url, key).ask("PATCH", _PATH, _parsed(settings)), as_json)


@knobs.command("reset")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@server_options
def reset(names: Sequence[str], url: str, key: str | None, as_json: bool) -> None:
    """Go back to the configuration's values: of every knob, or of those named."""
    query = f"?{urlencode([('name', name) for name in names])}" if names else ""
    _report(AdminClient(url, key).ask("DELETE", _PATH + query), as_json)


def _parsed(settings: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` words as the API takes them: a value is a JSON number or null, else a text."""
    parsed: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise click.BadParameter(f"{setting!r} must look like NAME=VALUE", param_hint="NAME=VALUE")
        if name in parsed:
            raise click.BadParameter(f"{name} is given twice", param_hint="NAME=VALUE")
        parsed[name] = _value(text)
    return parsed


def _value(text: str) -> Any:
    def no_number(word: str) -> Any:
        raise ValueError(word)

    try:
        value = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str | list | dict) else value


def _named(described: Mapping[str, Described], names: Sequence[str]) -> dict[str, Described]:
    """The knobs that ``names`` stand for, all when there are none. Raises AdminRequestFailed for an unknown one."""
    if not names:
        return dict(described)
    wanted: dict[str, Described] = {}
    for name in names:
        found = {knob: facts for knob, facts in described.items() if name in (knob, knob.partition(".")[0])}
        if not found:
            raise AdminRequestFailed(f"there is no knob {name!r}{nearest(name, described)}")
        wanted |= found
    return wanted


def _report(answer: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
        return
    for name, change in answer["changed"].items():
        click.echo(f"{name}: {_shown(change['old'])} -> {_shown(change['new'])}")
    if not answer["changed"]:
        click.echo("nothing changed")


def _table(described: Mapping[str, Described], *, meanings: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("knob", "value", "unit", "default", "from"):
        table.add_column(column, no_wrap=True)
    table.add_column("range", overflow="fold")
    if meanings:
        table.add_column("meaning", overflow="fold")
    for name, facts in described.items():
        live = facts["layer"] != "config"
        row = [name, _shown(facts["value"]), facts["unit"], _shown(facts["default"]), facts["layer"], facts["range"]]
        cells = [Text(str(cell), style="bold" if live else "") for cell in row]
        table.add_row(*cells, *([Text(str(facts["meaning"]))] if meanings else []))
    return table


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _print(table: Table) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(table)
