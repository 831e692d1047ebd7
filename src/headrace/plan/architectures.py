"""Architectures by name: data files that come with headrace, each with its origin and the date of that.

A file holds the facts of a model's ``config.json`` that its KV memory and its arithmetic depend on, and is read as one.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from msgspec import Struct

from headrace.errors import ModelError
from headrace.plan.catalogue import find_named, read_catalogue
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
    return read_catalogue(folder, Architecture)


def architecture_named(name: str) -> Architecture:
    """The architecture of this name or alias, capitals aside. Raises ModelError with the nearest names."""
    found = find_named(architectures(), name)
    if isinstance(found, str):
        raise ModelError(f"{name[:64]!r} is neither a file nor a known architecture; {found}")
    return found


def describe_named(name: str) -> DescribedModel:
    """The description of ``architecture_named``. Raises ModelError."""
    found = architecture_named(name)
    source = f"{found.source}, {found.date}"
    return describe_fields(found.config, name=found.name, source=source, parameters=found.parameters)
