"""Our summary as JSON: ``{"format": "headrace-bench-summary", "version": 1, ...}``, the fields of ``figures``.

A reader checks ``format`` and ``version`` first. The version changes when a field changes its meaning or goes;
new fields may come without one.
"""

from __future__ import annotations

import msgspec

from headrace.bench.results.figures import FORMAT, VERSION, Summary
from headrace.errors import ConfigError


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def to_json(summary: Summary) -> bytes:
    """Indented JSON, for people and programs."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2)


def from_json(text: bytes, *, where: str = "") -> Summary:
    """The summary again. Raises ConfigError when ``text`` (from the file ``where``) is none, or one of a version
    that this headrace does not know."""
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.format != FORMAT:
            raise ConfigError(f"is no summary of headrace bench (format {head.format!r}, not {FORMAT!r})", where=where)
        if head.version != VERSION:
            raise ConfigError(
                f"is a summary of version {head.version}; this headrace reads version {VERSION}: "
                "summarise its records file again",
                where=where,
            )
        return msgspec.json.decode(text, type=Summary)
    except msgspec.DecodeError as error:
        raise ConfigError(f"is no summary of headrace bench: {error}", where=where) from error
