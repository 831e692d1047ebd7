"""``headrace``: the command line's root. Subcommands are imported only when they run, so help is instant."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from headrace import __version__
from headrace.errors import HeadraceError

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells say it

# Name -> (module, attribute, one line of help). In the order in which a new user meets them.
_COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("headrace.cli.serve", "serve", "Serve a model over HTTP, each request in its lane."),
    "model": ("headrace.cli.model", "model", "Fetch, list and remove models."),
    "bench": ("headrace.cli.bench", "bench", "Load a server and report what it was like."),
    "simulate": ("headrace.cli.simulate", "simulate", "Say what would happen, on hardware you do not own."),
    "plan": ("headrace.cli.plan", "plan", "Size KV memory: bytes of a model, sequences that fit."),
    "calibrate": ("headrace.cli.calibrate", "calibrate", "Measure step times, for the simulator."),
    "init": ("headrace.cli.config", "init", "Write a commented configuration file."),
    "config": ("headrace.cli.config", "config", "Check a configuration, or show it with all defaults."),
    "kv": ("headrace.cli.kv", "kv", "Judge how precisely KV memory must be kept."),
    "drill": ("headrace.cli.drill", "drill", "Rehearse that a lane's engines get slow."),
    "knobs": ("headrace.cli.knobs", "knobs", "Read and change how a running server schedules."),
}


class LazyGroup(click.Group):
    """A group whose subcommands are named in ``_COMMANDS`` and imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, _, help_line) in _COMMANDS.items()])

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs a command and exits: 0 done, 1 failed (one line on stderr), 2 wrong usage, 130 interrupted."""
        extra["standalone_mode"] = False
        try:
            status = super().main(*args, **extra)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:  # click's name for Ctrl-C
            sys.exit(EXIT_INTERRUPTED)
        except HeadraceError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(EXIT_FAILURE)
        sys.exit(status if isinstance(status, int) else 0)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="headrace")
def main() -> None:
    """SLO-first LLM serving: every class of traffic keeps its P99."""


if __name__ == "__main__":
    main()
