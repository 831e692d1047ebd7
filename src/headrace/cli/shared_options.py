"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def add_options(command: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Add options (made by ``click.option``) to a command; its help lists them in this order."""
    for option in reversed(options):
        command = option(command)
    return command
