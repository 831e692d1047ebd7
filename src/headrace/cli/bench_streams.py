"""What ``headrace bench`` prints, on streams that may be full, closed or of few characters.

A run is not lost with its output: files are written before anything is printed, and a stream that fails ends the
command with one line.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import click
from rich.console import Console

from headrace.errors import ConfigError


class StreamGroup(click.Group):
    """A group whose commands print what their streams can show: other characters become question marks."""

    def invoke(self, ctx: click.Context) -> Any:
        """As click's."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        return super().invoke(ctx)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Around what is printed on standard output.

    Raises ConfigError when it cannot be written. A reader that has gone (``| head -1``) wants no more, and is none.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _silence(sys.stdout)
    except OSError as error:
        _silence(sys.stdout)
        raise ConfigError(f"cannot be written: {error.strerror or error}", where="standard output") from error


class _Terminal(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to ``printing``; rich itself would end the process."""
        raise BrokenPipeError


def open_console() -> Console:
    """Standard output, for tables."""
    return _Terminal()


def say(text: str) -> None:
    """A line on standard error, if anybody listens."""
    try:
        click.echo(text, err=True)
    except OSError:
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Python flushes its streams once more at its end: that must not fail again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
