"""Hardware by name: data files that come with headrace, each with its origin and the date of that."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec import Struct

from headrace.errors import ConfigError
from headrace.plan.catalogue import find_named, read_catalogue


class Hardware(Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator, as its publisher states it.

    ``flops_per_s``: dense multiply-adds count as two; by the precision of the arithmetic (``f16`` is bf16's too).
    ``host_bytes_per_s`` is one way to the host's memory, ``link_bytes_per_s`` one way to the other accelerators of
    its node (``per_node`` of them in all). ``memory_bytes`` is all of its memory.
    """

    name: str
    label: str
    source: str
    date: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]
    host_bytes_per_s: float
    link: str
    link_bytes_per_s: float
    per_node: int
    aliases: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@cache
def hardware() -> dict[str, Hardware]:
    """All profiles, by name, in order of name."""
    folder = files("headrace.simulate.hardware") / "hardware_data"
    return read_catalogue(folder, Hardware)


def hardware_named(name: str) -> Hardware:
    """The profile of this name or alias, capitals aside, or the one in the file of this name (ending in ``.json``).
    Raises ConfigError with the nearest names."""
    if name.endswith(".json"):
        return hardware_from(Path(name))
    found = find_named(hardware(), name)
    if isinstance(found, str):
        raise ConfigError(f"{name[:64]!r} is no known hardware; {found}")
    return found


def hardware_from(path: Path) -> Hardware:
    """A profile from a file of the same form. Raises ConfigError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Hardware)
    except OSError as error:
        raise ConfigError(f"the hardware profile {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"{path} is no hardware profile: {error}") from error
    rates = (*found.flops_per_s.values(), found.memory_bytes_per_s, found.host_bytes_per_s, found.link_bytes_per_s)
    if "f16" not in found.flops_per_s or min(rates) <= 0 or found.memory_bytes <= 0:
        raise ConfigError(f"{path}: rates and sizes must be above 0, and flops_per_s needs f16")
    return found
