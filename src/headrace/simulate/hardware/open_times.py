"""Step times from a text, as an operator writes them in a scenario or on the command line.

``roofline(HARDWARE, MODEL, tensor=8)`` and the like (``TIMES_FORMS``), or the path of a file of ``headrace calibrate``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol, get_args

from headrace.bench.load.distribution_text import Call, parse_call
from headrace.errors import ConfigError
from headrace.plan.architectures import architecture_named
from headrace.simulate.calibrated import CalibratedTimes, read_calibration
from headrace.simulate.hardware.batch_table import BatchTable
from headrace.simulate.hardware.coefficients import FittedLines
from headrace.simulate.hardware.efficiency import efficiency_named
from headrace.simulate.hardware.kernels import ParquetKernels
from headrace.simulate.hardware.layer_profile import LayerProfile
from headrace.simulate.hardware.precision import Precision, WeightType
from headrace.simulate.hardware.profiles import hardware_named
from headrace.simulate.hardware.roofline import Parallel, Roofline
from headrace.simulate.hardware.times_forms import TIMES_FORMS
from headrace.simulate.hardware.work import Work


class PassTimes(Protocol):
    """``scheduling.step.StepTimes`` that also know a pass by all that is in it, and say where they are from."""

    @property
    def source(self) -> str: ...

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """One forward pass, by its sums (see ``scheduling.cost.Call``)."""

    def pass_s(self, work: Work) -> float:
        """One forward pass."""

    def move_s(self, tokens: int, band: int) -> float:
        """Copying the KV of one sequence."""


_EXAMPLE: Final = "roofline(h100, llama-3.1-70b, tensor=4)"


def open_times(text: str, *, where: str = "") -> PassTimes:
    """The step times that ``text`` describes. Raises ConfigError (ModelError for an architecture)."""
    if text.strip().endswith(".json") and "(" not in text:
        return CalibratedTimes(read_calibration(Path(text.strip())))
    call = parse_call(text, example=_EXAMPLE, where=where)
    arguments = _Arguments(call, where)
    match call.name:
        case "roofline":
            times = _roofline(arguments)
        case "layers":
            folder, layers = arguments.positional(2)
            step_s = arguments.number("step_ms", 0.0) / 1e3
            times = LayerProfile(Path(folder), layers=arguments.whole_of(layers), step_s=step_s)
        case "batches":
            file, model, machine = arguments.positional(3)
            times = BatchTable(Path(file), model=model, hardware=machine, tensor=arguments.whole("tensor", 1))
        case "lines":
            file, model = arguments.positional(2)
            times = FittedLines(Path(file), model=model, tensor=arguments.whole("tensor", 1))
        case _:
            known = ", ".join(form.signature.partition("(")[0] for form in TIMES_FORMS)
            raise ConfigError(f"{text[:80]!r} names no step times; there are {known}", where=where)
    arguments.all_read()
    return times


def _roofline(arguments: _Arguments) -> PassTimes:
    machine, model = arguments.positional(2)
    experts = arguments.text("experts", "shared")
    if experts not in ("whole", "shared"):
        raise ConfigError(f"experts is 'whole' or 'shared', not {experts!r}", where=arguments.where)
    kernels = arguments.text("kernels", "")
    expert_weights = arguments.text("expert_weights", "")
    index = arguments.text("index", "")
    return Roofline(
        hardware_named(machine),
        architecture_named(model),
        parallel=Parallel(arguments.whole("tensor", 1), arguments.whole("data", 1), experts == "whole"),
        precision=Precision(
            arguments.weight_type(arguments.text("weights", "f16")),
            arguments.weight_type(expert_weights) if expert_weights else None,
            arguments.text("kv", "bf16"),
            index or None,
        ),
        efficiency=efficiency_named(arguments.text("calibration", "default")),
        kernels=ParquetKernels(Path(kernels)) if kernels else None,
    )


class _Arguments:
    """A call's arguments, each read once."""

    def __init__(self, call: Call, where: str) -> None:
        self._call, self.where = call, where
        self._left = dict(call.keywords)

    def positional(self, count: int) -> tuple[str, ...]:
        if len(self._call.positional) != count:
            raise ConfigError(
                f"{self._call.name} takes {count} values before its named ones, not {len(self._call.positional)}",
                where=self.where,
            )
        return self._call.positional

    def text(self, name: str, default: str) -> str:
        return self._left.pop(name, default)

    def whole(self, name: str, default: int) -> int:
        return self.whole_of(self._left.pop(name, str(default)))

    def whole_of(self, text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= 4096:
            raise ConfigError(f"{text[:40]!r} is no whole number from 1 to 4096", where=self.where)
        return int(text)

    def number(self, name: str, default: float) -> float:
        text = self._left.pop(name, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < 1e6:
            raise ConfigError(f"{name} is a number of 0 and more, not {text[:40]!r}", where=self.where)
        return value

    def weight_type(self, text: str) -> WeightType:
        for kind in get_args(WeightType):
            if kind == text:
                return kind  # type: ignore[no-any-return]
        raise ConfigError(f"weights are {', '.join(get_args(WeightType))}, not {text[:40]!r}", where=self.where)

    def all_read(self) -> None:
        if self._left:
            raise ConfigError(f"{self._call.name} has no {next(iter(self._left))!r}", where=self.where)
