"""What is wrong with a configuration: every problem at once, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import ConfigError


@dataclass(frozen=True)
class Origin:
    """Where a value came from: ``default``, a file and its line, an environment variable, or a flag."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


DEFAULT_ORIGIN = Origin("default")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. ``where`` is a path such as ``lanes.realtime.slo.p99_e2e_s`` (may be empty),
    ``origin`` where the value came from (None: nothing to point at)."""

    where: str
    message: str
    origin: Origin | None = None

    def __str__(self) -> str:
        shown_origin = "" if self.origin is None or self.origin == DEFAULT_ORIGIN else str(self.origin)
        text = ": ".join(part for part in (shown_origin, self.where, self.message) if part)
        # Keys and values are the writer's and may hold anything; a problem is one printable line.
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class ConfigProblems(ConfigError):
    """A configuration that is wrong, with every problem found. ``str`` is one line per problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
        self.where = problems[0].where if problems else ""


Path = tuple[str | int, ...]
"""A place in a configuration: keys and list positions from the top."""


def dotted(path: Path) -> str:
    """``("lanes", "long", "match", "path_prefixes", 0)`` -> ``lanes.long.match.path_prefixes[0]``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text
