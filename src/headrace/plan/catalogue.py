"""Facts that ship as data files, one item a file, found by name or alias."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from typing import Protocol, TypeVar

import msgspec


class Named(Protocol):
    """What a data file holds, among other things."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]: ...


Item = TypeVar("Item", bound=Named)


def read_catalogue(folder: Traversable, kind: type[Item]) -> dict[str, Item]:
    """Every item of a folder's JSON files by name, in order of name."""
    found = [
        msgspec.json.decode(entry.read_bytes(), type=kind) for entry in folder.iterdir() if entry.name.endswith(".json")
    ]
    return {item.name: item for item in sorted(found, key=lambda item: item.name)}


def find_named(items: Mapping[str, Item], name: str) -> Item | str:
    """The item of this name or alias, capitals aside; else a hint: the nearest names, or all."""
    known = {label.lower(): item for item in items.values() for label in (item.name, *item.aliases)}
    found = known.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower()[:64], known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(items)}"
