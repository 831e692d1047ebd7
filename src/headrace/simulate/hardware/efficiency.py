"""How much of a data sheet an engine gets: the calibration of a roofline."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec import Struct

from headrace.errors import ConfigError

_FRACTIONS = ("compute", "compute_fp8", "compute_fp4", "memory", "link", "large_link")
_TIMES = ("step_s", "sequence_s", "kernel_s", "link_latency_s", "eager_s")


class Efficiency(Struct, frozen=True, forbid_unknown_fields=True):
    """Fractions of the stated rates, and what passes beside them.

    ``compute``, ``memory``, ``link``: of the arithmetic (16-bit; ``compute_fp8`` and ``compute_fp4`` apart), of the
    memory's and of the links' bandwidth. ``step_s`` passes with every pass (scheduling, launching, sampling),
    ``sequence_s`` with every sequence in it, ``kernel_s`` with every matrix and every attention of a layer, as its
    launch. ``link_latency_s`` is a message's, whatever its size; ``ring``: collectives go round a ring instead of
    straight to all. Messages over ``large_message_bytes`` go at ``large_link`` (None: all alike).
    A pass with prompt tokens takes at least ``eager_s``: what launching its kernels one by one takes, which goes on
    beside them. ``expert_imbalance``: how much more than the mean the busiest rank's experts get.

    The defaults are those of no particular engine. Arithmetic and links: medians of aiconfigurator's (095f58a)
    measurements of vLLM 0.24 on H200, matrices of 1,024 rows and more (0.78 of the 16-bit rate, 0.45 of FP8's) and
    all-reduces (0.4 to 0.52 of the link, 4.4 to 5.2 us for the smallest). Memory and kernels: what it takes for all
    of its systems (0.8, 3 us); the kernels of a captured graph follow one another in a third of that. A step of 2 ms
    is an assumption.
    """

    compute: float = 0.75
    compute_fp8: float = 0.45
    compute_fp4: float = 0.45
    memory: float = 0.8
    link: float = 0.5
    step_s: float = 0.002
    sequence_s: float = 0.0
    kernel_s: float = 1e-6
    link_latency_s: float = 5e-6
    ring: bool = False
    large_message_bytes: float | None = None
    large_link: float = 0.5
    eager_s: float = 0.0
    expert_imbalance: float = 1.0
    source: str = "headrace's defaults"

    def of_arithmetic(self, kind: str) -> float:
        """The fraction of the rate that arithmetic of this kind reaches."""
        return {"f16": self.compute, "fp8": self.compute_fp8, "fp4": self.compute_fp4}[kind]

    def checked(self, where: str = "") -> Efficiency:
        """Itself. Raises ConfigError for a fraction outside (0, 1] or a negative time."""
        for name in _FRACTIONS:
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a fraction above 0 and up to 1, not {getattr(self, name)}", where=where)
        for name in _TIMES:
            if not 0 <= getattr(self, name) < 1e6:
                raise ConfigError(f"{name} is a time in seconds, 0 or more, not {getattr(self, name)}", where=where)
        if not 1 <= self.expert_imbalance < 1e6:
            raise ConfigError(f"expert_imbalance is 1 or more, not {self.expert_imbalance}", where=where)
        return self


@cache
def efficiencies() -> dict[str, Efficiency]:
    """The calibrations that come with headrace, by name."""
    folder = files("headrace.simulate.hardware") / "efficiency_data"
    return {
        entry.name.removesuffix(".json"): msgspec.json.decode(entry.read_bytes(), type=Efficiency).checked(entry.name)
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".json")
    }


def efficiency_named(name: str) -> Efficiency:
    """``default``, a calibration that comes with headrace, or the one in a file (ending in ``.json``). Raises
    ConfigError."""
    if name == "default":
        return Efficiency()
    if name.endswith(".json"):
        return efficiency_from(Path(name))
    known = efficiencies()
    if name not in known:
        raise ConfigError(f"{name[:64]!r} is no known calibration; known: default, {', '.join(known)}")
    return known[name]


def efficiency_from(path: Path) -> Efficiency:
    """From a JSON file with any of the fields. Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Efficiency).checked(str(path))
    except OSError as error:
        raise ConfigError(f"the calibration {path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"{path} is no calibration: {error}") from error
