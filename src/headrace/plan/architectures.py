"""Architectures by name: data files that come with headrace, each with its origin and the date of that.

A file holds the facts of a model's ``config.json`` that its KV memory and its arithmetic depend on, and is read as one.
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib.resources import files

import msgspec
from msgspec import Struct

from headrace.errors import ModelError
from headrace.plan.config_layout import describe_fields
from headrace.plan.described import DescribedModel


class Architecture(Struct, frozen=True, forbid_unknown_fields=True):
    """One data file. ``source`` says where the facts were read, ``date`` the date of that source (ISO);
    ``parameters`` is rounded as the model's publisher does."""

    name: str
    source: str
    date: str
    config: dict[str, object]
    parameters: int | None = None
    aliases: tuple[str, ...] = ()


@cache
def architectures() -> dict[str, Architecture]:
    """All of them, by name, in order of name."""
    folder = files("headrace.plan") / "architecture_data"
    found = [
        msgspec.json.decode(entry.read_bytes(), type=Architecture)
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    ]
    return {item.name: item for item in sorted(found, key=lambda item: item.name)}


def architecture_named(name: str) -> Architecture:
    """The architecture of this name or alias, capitals aside. Raises ModelError with the nearest names."""
    known = {label.lower(): item for item in architectures().values() for label in (item.name, *item.aliases)}
    found = known.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower()[:64], known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(architectures())}"
        raise ModelError(f"{name[:64]!r} is neither a file nor a known architecture; {hint}")
    return found


def describe_named(name: str) -> DescribedModel:
    """The description of ``architecture_named``. Raises ModelError."""
    found = architecture_named(name)
    source = f"{found.source}, {found.date}"
    return describe_fields(found.config, name=found.name, source=source, parameters=found.parameters)
