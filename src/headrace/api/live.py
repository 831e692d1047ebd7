"""The configuration in force: frozen, swapped whole on reload, with knobs that were set live over it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from headrace.api.admin_access import AdminKeys
from headrace.config.knobs import (
    Knob,
    KnobChange,
    KnobValue,
    checked_changes,
    differences,
    knobs_of,
    unknown_knob,
    with_changes,
)
from headrace.config.problems import ConfigProblems
from headrace.config.scheduling import scheduling_knobs
from headrace.config.schema import Config
from headrace.errors import ConfigError
from headrace.lanes.tenants import TenantDirectory
from headrace.scheduling.knobs import SchedulingKnobs

_logger = logging.getLogger(__name__)

BY_TUNER: Final = "tuner"
"""Who changes knobs when the tuner does (``control.loop``)."""

Watcher = Callable[[SchedulingKnobs, Sequence[KnobChange]], None]
"""Told the new live values of scheduling, and which knobs have others than before."""


class LiveConfig:
    """Holds the current configuration. Readers take ``config`` once per request and keep that one.

    Knobs set live stay over whatever configuration is loaded, until they are reset or the process ends.
    """

    def __init__(self, config: Config) -> None:
        self._step_tokens_limit = config.engine.scheduling.step_tokens
        self._watchers: list[Watcher] = []
        self._touched_by: dict[str, str] = {}
        self._config = config
        self._scheduling = scheduling_knobs(config)
        self._put(config, {}, by="start")

    @property
    def config(self) -> Config:
        """What holds: the configuration that was loaded, with the knobs that were set live over it."""
        return self._config

    @property
    def loaded(self) -> Config:
        """The configuration without what was set live."""
        return self._loaded

    @property
    def knobs(self) -> dict[str, Knob]:
        """Every knob that there is, by name."""
        return self._knobs

    @property
    def changes(self) -> Mapping[str, KnobValue]:
        """The knobs that were set live, and to what."""
        return self._changes

    @property
    def touched_by(self) -> Mapping[str, str]:
        """Who last set or reset a knob live, by knob; empty again for knobs that a reload put back."""
        return self._touched_by

    @property
    def tenants(self) -> TenantDirectory:
        """Who may send requests, built once per configuration."""
        return self._tenants

    @property
    def admin_keys(self) -> AdminKeys:
        """Who may use the admin API, built once per configuration."""
        return self._admin_keys

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` of every change of scheduling from now on."""
        self._watchers.append(watcher)

    def swap(self, config: Config) -> None:
        """Put a new configuration in force for requests that come from now on; knobs set live stay, those of
        lanes that it has no more are dropped, and so is what the tuner set: that was found beside the old one.
        Raises ConfigError, with the old one still in force, when its API keys cannot be read or a knob set live does
        not fit to it."""
        known = self._knobs_of(config)
        gone = [name for name in self._changes if name not in known]
        kept = {name: value for name, value in self._by_people().items() if name in known}
        try:
            self._put(config, kept, by="the configuration")
        except ConfigProblems as error:
            live = ", ".join(kept)
            raise ConfigError(f"{error}; set live: {live} (`headrace knobs reset` takes that back)") from error
        self._touched_by = {name: who for name, who in self._touched_by.items() if name in kept}
        for name in gone:
            _logger.warning("knob %s, which was set live, is gone with its lane", name)

    def set_knobs(self, given: Mapping[str, object], *, by: str) -> tuple[KnobChange, ...]:
        """Set knobs live, all or none; ``by`` says who, for the log. Returns those that have another value now.
        Raises ConfigProblems with everything that is wrong."""
        changed = checked_changes(given, self._knobs)
        try:
            moved = self._put(self._loaded, {**self._changes, **changed}, by=by)
        except ConfigProblems:
            by_people = self._by_people()
            if by == BY_TUNER or len(by_people) == len(self._changes):
                raise
            # A person's value goes before what the tuner set.
            moved = self._put(self._loaded, {**by_people, **changed}, by=by)
        self._touched_by.update(dict.fromkeys(changed, by))
        return moved

    def reset_knobs(self, names: Iterable[str] = (), *, by: str) -> tuple[KnobChange, ...]:
        """Let some knobs, or all when none is named, have the configuration's values again. Returns and raises as
        ``set_knobs`` does."""
        named = list(names)
        unknown = [unknown_knob(name, self._knobs) for name in named if name not in self._knobs]
        if unknown:
            raise ConfigProblems(unknown)
        kept = {name: value for name, value in self._changes.items() if named and name not in named}
        reset = named or list(self._changes)
        moved = self._put(self._loaded, kept, by=by)
        self._touched_by.update(dict.fromkeys(reset, by))
        return moved

    def _by_people(self) -> dict[str, KnobValue]:
        """What was set live, without what the tuner set."""
        return {name: value for name, value in self._changes.items() if self._touched_by.get(name) != BY_TUNER}

    def _put(self, loaded: Config, changes: Mapping[str, KnobValue], *, by: str) -> tuple[KnobChange, ...]:
        """Everything is made before anything is put in force: what raises changes nothing."""
        knobs = self._knobs_of(loaded)
        config = with_changes(loaded, changes, knobs)
        scheduling = scheduling_knobs(config)
        tenants, admin_keys = TenantDirectory.build(config), AdminKeys.build(config.server.admin_keys)
        moved = differences(self._config, config, knobs)
        told = scheduling != self._scheduling or bool(moved)
        self._loaded, self._changes, self._knobs = loaded, dict(changes), knobs
        self._config, self._scheduling = config, scheduling
        self._tenants, self._admin_keys = tenants, admin_keys
        for change in moved:
            _logger.info("knob %s: %s -> %s, by %s", change.name, change.old, change.new, by)
        for watcher in self._watchers if told else ():
            watcher(scheduling, moved)
        return moved

    def _knobs_of(self, config: Config) -> dict[str, Knob]:
        return knobs_of(config, step_tokens_limit=self._step_tokens_limit)


def without_alias(config: Config, alias: str) -> Config:
    """The configuration without one model alias."""
    aliases = tuple(kept for kept in config.model.aliases if kept != alias)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, aliases=aliases))
