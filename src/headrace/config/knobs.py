"""Live knobs: keys of the configuration that may change while serving, and the rules of changing them. Pure.

A knob is a key of ``engine.scheduling`` under its own name, or ``band_caps.N`` (``engine.bands[N].max_running``),
``lane_caps.LANE`` (``lanes.LANE.max_running``), ``lane_weights.LANE`` (``lanes.LANE.weight``). A change is checked
as the configuration is: same types, same ranges, same things that must fit together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from msgspec import Struct, inspect

from headrace.config.fields import Note, notes
from headrace.config.problems import ConfigProblems, Path, Problem, dotted
from headrace.config.schema import BandConfig, Config, SchedulingConfig
from headrace.config.shape import INVALID, nearest, shape
from headrace.config.validate import scheduling_problems
from headrace.lanes.lane import Lane

KnobValue = str | int | float | None

_SHOWN_NAME_CHARS: Final = 64
_UNITS: Final = {
    "max_num_seqs": "sequences",
    "max_prefill_tokens": "tokens",
    "step_tokens": "tokens",
    "band_margin_tokens": "tokens",
    "merge_window_s": "s",
    "merge_max": "requests",
    "min_prefill_tokens": "tokens",
    "linger_s": "s",
    "urgent_step_s": "s",
    "idle_step_s": "s",
    "ageing_s": "s",
    "kv_long_tokens": "tokens",
    "band_caps": "sequences",
    "lane_caps": "sequences",
}
"""By a knob's name up to its dot; the others have none."""


@dataclass(frozen=True)
class Knob:
    """One knob: the key that it stands for, what values it takes and what they mean. ``unit`` is empty for a word
    or a ratio; ``default`` is what headrace has when nobody says anything."""

    name: str
    path: Path
    kind: inspect.Type
    note: Note
    default: KnobValue

    @property
    def unit(self) -> str:
        return _UNITS.get(self.name.partition(".")[0], "")

    @property
    def range_text(self) -> str:
        """The values that it takes, for a person."""
        kinds = self.kind.types if isinstance(self.kind, inspect.UnionType) else (self.kind,)
        words = [str(word) for kind in kinds if isinstance(kind, inspect.LiteralType) for word in kind.values]
        text = ", ".join(words) or self.note.range_text
        return f"{text}, or null" if any(isinstance(kind, inspect.NoneType) for kind in kinds) else text

    def of(self, config: Config) -> KnobValue:
        """Its value in a configuration."""
        value: Any = config
        for part in self.path:
            value = getattr(value, str(part)) if isinstance(value, Struct) else value[part]
        return value  # type: ignore[no-any-return]

    def checked(self, value: object) -> tuple[KnobValue, list[Problem]]:
        """The value as the configuration holds it, and what is wrong with it."""
        said: list[str] = []
        shaped = shape(value, self.kind, (self.name,), lambda _, message: said.append(message))
        if shaped is INVALID:
            return None, [Problem(self.name, message) for message in said]
        if isinstance(shaped, int | float) and not self.note.holds(shaped):
            return None, [Problem(self.name, f"{shaped:g} is out of range ({self.note.range_text})")]
        return shaped, []


@dataclass(frozen=True)
class KnobChange:
    """A knob that has another value than before."""

    name: str
    old: KnobValue
    new: KnobValue


def knobs_of(config: Config, *, step_tokens_limit: int) -> dict[str, Knob]:
    """Every knob that a configuration has, by name. ``step_tokens_limit`` is what memory was laid out for at
    start: no step can hold more tokens than that."""
    limits = {"step_tokens": step_tokens_limit}
    default = Config()
    found = [
        _knob(key, ("engine", "scheduling", key), SchedulingConfig, limits.get(key), default)
        for key in SchedulingConfig.__struct_fields__
    ]
    for index, band in enumerate(config.engine.bands):
        path: Path = ("engine", "bands", index, "max_running")
        found.append(_knob(f"band_caps.{index}", path, BandConfig, band.max_sequences, default))
    for group, key in (("lane_caps", "max_running"), ("lane_weights", "weight")):
        found += [_knob(f"{group}.{lane}", ("lanes", lane, key), Lane, None, default) for lane in config.lanes]
    return {knob.name: knob for knob in found}


def checked_changes(given: Mapping[str, object], knobs: Mapping[str, Knob]) -> dict[str, KnobValue]:
    """Values to set, by knob, each of its knob's type and in its range. Raises ConfigProblems with every problem."""
    changes: dict[str, KnobValue] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        knob = knobs.get(name)
        if knob is None:
            problems.append(unknown_knob(name, knobs))
            continue
        changes[name], wrong = knob.checked(value)
        problems += wrong
    if problems:
        raise ConfigProblems(problems)
    return changes


def unknown_knob(name: str, knobs: Mapping[str, Knob]) -> Problem:
    """That there is no knob of that name, with the nearest one that there is."""
    hint = nearest(name, knobs) or "; `headrace knobs get` lists them"
    return Problem(name[:_SHOWN_NAME_CHARS], f"there is no such knob{hint}")


def with_changes(config: Config, changes: Mapping[str, KnobValue], knobs: Mapping[str, Knob]) -> Config:
    """The configuration with some knobs at other values. Raises ConfigProblems, which name the knobs, when the
    values do not fit together."""
    for name, value in changes.items():
        config = _replaced(config, knobs[name].path, value)
    by_key = {dotted(knob.path): name for name, knob in knobs.items()}
    problems = [Problem(by_key[problem.where], problem.message) for problem in scheduling_problems(config)]
    if problems:
        raise ConfigProblems(problems)
    return config


def differences(before: Config, after: Config, knobs: Mapping[str, Knob]) -> tuple[KnobChange, ...]:
    """Knobs with other values after than before; a knob of a lane that only one of them has is none of them."""
    return tuple(_differences(before, after, knobs))


def _differences(before: Config, after: Config, knobs: Mapping[str, Knob]) -> Iterator[KnobChange]:
    for name, knob in knobs.items():
        if knob.path[0] == "lanes" and not (knob.path[1] in before.lanes and knob.path[1] in after.lanes):
            continue
        old, new = knob.of(before), knob.of(after)
        if old != new:
            yield KnobChange(name, old, new)


def _knob(name: str, path: Path, struct: type[Struct], limit: int | None, default: Config) -> Knob:
    key = str(path[-1])
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    (field,) = (field for field in kind.fields if field.encode_name == key)
    note = notes()[struct][key]
    if limit is not None:
        note = Note(note.text, note.minimum, limit, note.above_minimum)
    knob = Knob(name, path, field.type, note, field.default)
    # A lane that headrace comes with may have values of its own.
    known = path[0] == "lanes" and path[1] in default.lanes
    return replace(knob, default=knob.of(default)) if known else knob


def _replaced(value: Any, path: Path, new: KnobValue) -> Any:
    """``value`` with what is at ``path`` in it replaced; everything on the way there is a new object."""
    if not path:
        return new
    part, rest = path[0], path[1:]
    if isinstance(value, Struct):
        return msgspec.structs.replace(value, **{str(part): _replaced(getattr(value, str(part)), rest, new)})
    if isinstance(value, dict):
        return {**value, part: _replaced(value[part], rest, new)}
    return tuple(_replaced(item, rest, new) if index == part else item for index, item in enumerate(value))
