"""The configuration in force: frozen, swapped whole on reload."""

from __future__ import annotations

from pathlib import PurePath

import msgspec

from headrace.config.schema import Config
from headrace.lanes.tenants import TenantDirectory


class LiveConfig:
    """Holds the current configuration. Readers take ``config`` once per request and keep that one."""

    def __init__(self, config: Config) -> None:
        self.swap(config)

    @property
    def config(self) -> Config:
        return self._config

    @property
    def tenants(self) -> TenantDirectory:
        """Who may send requests, built once per configuration."""
        return self._tenants

    def swap(self, config: Config) -> None:
        """Put a new configuration in force for requests that come from now on. Raises ConfigError, with the
        old one still in force, when its API keys cannot be read."""
        self._tenants = TenantDirectory.build(config)
        self._config = config


def served_model_names(config: Config) -> tuple[str, ...]:
    """Names that clients may use for the model: its own first, then its aliases, then those that lanes are
    recognised by."""
    source = config.model.source
    name = config.model.name or (PurePath(source).stem if source.lower().endswith(".gguf") else source)
    by_lane = (alias for lane in config.lanes.values() for alias in lane.match.model_aliases)
    return tuple(dict.fromkeys((name, *config.model.aliases, *by_lane)))


def without_alias(config: Config, alias: str) -> Config:
    """The configuration without one model alias."""
    aliases = tuple(kept for kept in config.model.aliases if kept != alias)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, aliases=aliases))
