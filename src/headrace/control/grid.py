"""The bounded set of values that the tuner may give a knob: a few steps around what the operator configured. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.config.knobs import Knob, KnobValue, knobs_of
from headrace.config.schema import Config
from headrace.scheduling.knobs import Strategy

Setting = Mapping[str, int]
"""Knob -> place on its grid."""

TUNED: Final = {
    "urgent_step_s": 1.4,
    "idle_step_s": 1.4,
    "min_prefill_tokens": 2.0,
    "max_prefill_tokens": 1.4,
    "knee_gain": 2.0,
    "max_num_seqs": 1.4,
}
"""From one place of a grid to the next: steps that should show, and none that is a leap."""
_OF_EVERY_STRATEGY: Final = ("max_prefill_tokens", "max_num_seqs")


@dataclass(frozen=True, slots=True)
class Grid:
    """Values of one knob in ascending order (None, no cap, is the highest). ``home`` is the configured one's place."""

    knob: str
    values: tuple[KnobValue, ...]
    home: int

    def holds(self, place: int) -> bool:
        """Whether there is such a place."""
        return 0 <= place < len(self.values)


def grid_of(knob: Knob, configured: KnobValue, *, factor: float, steps: int, most: int | None = None) -> Grid:
    """At most ``steps`` values on each side of ``configured``, each ``factor`` times the one below, all in the knob's
    range and at most ``most``. A knob without a value (None) is capped from ``most`` downwards."""
    top = most if configured is None else configured
    assert isinstance(top, int | float)
    whole = isinstance(top, int)
    found: set[float] = set()
    for step in range(-steps, steps + 1):
        value: float = top * factor**step
        value = max(1, round(value)) if whole else float(f"{value:.4g}")
        if step and knob.note.holds(value) and (most is None or value <= most):
            found.add(value)
    if configured is None:
        values: list[KnobValue] = [value for value in sorted(found) if value < top]
        return Grid(knob.name, (*values, None), len(values))
    ordered = sorted(found | {top})
    return Grid(knob.name, tuple(ordered), ordered.index(top))


def grids_of(config: Config, *, steps: int, hands_off: frozenset[str] = frozenset()) -> dict[str, Grid]:
    """The grids of the knobs that matter to the configured strategy, without those of ``hands_off``. ``config`` is
    the operator's, nothing set live in it."""
    scheduling = config.engine.scheduling
    knobs = knobs_of(config, step_tokens_limit=scheduling.step_tokens)
    most = {
        "max_num_seqs": sum(band.max_sequences for band in config.engine.bands),
        "max_prefill_tokens": max(scheduling.step_tokens, scheduling.max_prefill_tokens),
    }
    return {
        name: grid_of(knobs[name], knobs[name].of(config), factor=factor, steps=steps, most=most.get(name))
        for name, factor in TUNED.items()
        if name not in hands_off and _matters(name, scheduling.strategy)
    }


def _matters(name: str, strategy: Strategy) -> bool:
    return name in _OF_EVERY_STRATEGY or strategy in ("hybrid", "auto")


def home_of(grids: Mapping[str, Grid]) -> dict[str, int]:
    """The operator's setting."""
    return {name: grid.home for name, grid in grids.items()}


def values_of(grids: Mapping[str, Grid], setting: Setting) -> dict[str, KnobValue]:
    """The knobs' values in a setting."""
    return {name: grid.values[setting[name]] for name, grid in grids.items()}


def fits(values: Mapping[str, KnobValue], fixed: Mapping[str, KnobValue]) -> bool:
    """Whether values go together, where a knob that has no grid has its value in ``fixed``."""
    both = {**fixed, **values}
    least, most = both.get("min_prefill_tokens"), both.get("max_prefill_tokens")
    return not (isinstance(least, int) and isinstance(most, int)) or least <= most
