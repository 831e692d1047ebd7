"""The names that clients may use for the served model."""

from __future__ import annotations

from pathlib import PurePath

from headrace.config.schema import Config


def served_model_names(config: Config) -> tuple[str, ...]:
    """Names that clients may use for the model: its own first, then its aliases, then those that lanes are
    recognised by."""
    source = config.model.source
    name = config.model.name or (PurePath(source).stem if source.lower().endswith(".gguf") else source)
    by_lane = (alias for lane in config.lanes.values() for alias in lane.match.model_aliases)
    return tuple(dict.fromkeys((name, *config.model.aliases, *by_lane)))
