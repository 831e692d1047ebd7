"""The names that clients may use for the served model."""

from __future__ import annotations

from pathlib import PurePath

from headrace.config.schema import Config


def served_model_names(config: Config) -> tuple[str, ...]:
    """Names that clients may use for the model: its own first, then its aliases, then those that lanes are
    recognised by. Where there are groups, the groups' models are its own names."""
    by_lane = (alias for lane in config.lanes.values() for alias in lane.match.model_aliases)
    if config.groups:
        own = (config.model.name,) if config.model.name else ()
        groups = (group.model for group in config.groups.values() if group.model)
        embedded = (_source_name(config),) if config.embeds_engine else ()
        return tuple(dict.fromkeys((*own, *groups, *embedded, *config.model.aliases, *by_lane)))
    return tuple(dict.fromkeys((_source_name(config), *config.model.aliases, *by_lane)))


def _source_name(config: Config) -> str:
    source = config.model.source
    return config.model.name or (PurePath(source).stem if source.lower().endswith(".gguf") else source)
