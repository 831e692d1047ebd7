"""Reads the configuration: flags over environment over file over defaults, strictly.

A value given in one place replaces the same key's value from a weaker place; mappings merge key by key
(lanes too, over the default lanes), lists are replaced whole. A lane set to null is removed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Final

import msgspec
import platformdirs

from headrace.config.environment import CONFIG_VARIABLE, read_environment
from headrace.config.key_files import with_key_files
from headrace.config.problems import DEFAULT_ORIGIN, ConfigProblems, Origin, Path, Problem, dotted
from headrace.config.schema import Config
from headrace.config.shape import INVALID, schema_type, shape
from headrace.config.validate import range_problems, validate
from headrace.config.yaml_tree import MAX_TEXT_BYTES, parse_yaml
from headrace.lanes.tenants import DIGEST_PREFIX, configured_digest

FILE_NAME: Final = "headrace.yaml"
COMMAND_LINE: Final = Origin("command line")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration, the file it was read from (None: no file), and where each value came from.

    ``origins`` maps a leaf's dotted path to its origin; what is not in it is a default.
    """

    config: Config
    file: FilePath | None
    origins: dict[str, Origin]

    def origin(self, path: str) -> Origin:
        return self.origins.get(path, DEFAULT_ORIGIN)


def find_config_file(explicit: str | os.PathLike[str] | None, env: Mapping[str, str]) -> FilePath | None:
    """The file to read: ``explicit``, else ``HEADRACE_CONFIG``, else ``headrace.yaml`` in the working folder,
    else in the user's configuration folder, else None. An empty ``HEADRACE_CONFIG`` means no file."""
    if explicit is not None:
        return FilePath(explicit)
    named = env.get(CONFIG_VARIABLE)
    if named is not None:
        return FilePath(named) if named else None
    for folder in (FilePath(), platformdirs.user_config_path("headrace", appauthor=False)):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
    return None


def load(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Config:
    """The configuration. ``path`` None searches as ``find_config_file`` does. ``env`` None is the process's
    environment. ``overrides`` are flags by dotted key (``{"server.port": 9000}``); None values are flags
    that were not given.

    Raises ConfigProblems (a ConfigError), which lists every problem found.
    """
    return load_with_origins(path, env, overrides).config


def load_with_origins(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> LoadedConfig:
    """As ``load``, and says where each value came from."""
    environment = os.environ if env is None else env
    file = find_config_file(path, environment)
    data = b"" if file is None else _read(file)
    name = "" if file is None else str(file)
    config, origins = build(data, name=name, env=environment, overrides=overrides or {})
    return LoadedConfig(config=config, file=file, origins=origins)


def build(
    data: bytes | str, *, name: str, env: Mapping[str, str], overrides: Mapping[str, object]
) -> tuple[Config, dict[str, Origin]]:
    """The configuration from a file's content; touches no file and no process environment."""
    problems: list[Problem] = []
    layers = [
        _file_layer(data, name, problems),
        read_environment(env, problems),
        _override_layer(overrides, problems),
    ]
    tree: dict[str, Any] = msgspec.to_builtins(Config())
    origins: dict[Path, Origin] = {}
    for values, layer_origins in layers:
        tree = _merge(tree, values)
        # A list is replaced whole: no origin of an item in the weaker one may remain.
        for replaced in [old for old in origins if any(old[: len(new)] == new for new in layer_origins)]:
            del origins[replaced]
        origins.update(layer_origins)
    tree["lanes"] = {lane: value for lane, value in tree["lanes"].items() if value is not None}
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigProblems([Problem("", str(error), Origin(name) if name else None)]) from error
    config, unread = with_key_files(config)
    problems += [_located(problem, origins) for problem in unread]
    # A value that was refused is missing from the tree: checks across values would complain of its default.
    found = range_problems(config) if problems else validate(config, env)
    problems += [_located(problem, origins) for problem in found]
    if problems:
        raise ConfigProblems(problems)
    return _without_plain_keys(config, env), {dotted(path): origin for path, origin in origins.items()}


def _read(file: FilePath) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigProblems([Problem("", f"cannot be read: {reason}", Origin(str(file)))]) from error


_Layer = tuple[dict[str, Any], dict[Path, Origin]]
"""A partial tree of values and where each leaf came from."""


def _file_layer(data: bytes | str, name: str, problems: list[Problem]) -> _Layer:
    try:
        tree = parse_yaml(data, name)
    except ConfigProblems as error:
        problems.extend(error.problems)
        return {}, {}

    def origin(path: Path) -> Origin:
        while path and path not in tree.lines:
            path = path[:-1]
        return Origin(name, tree.lines.get(path))

    def report(path: Path, message: str) -> None:
        problems.append(Problem(dotted(path), message, origin(path)))

    values = shape(tree.value, schema_type(), (), report)
    if values is INVALID:
        return {}, {}
    return values, {path: origin(path) for path in _leaves(values)}


def _override_layer(overrides: Mapping[str, object], problems: list[Problem]) -> _Layer:
    given: dict[str, Any] = {}
    for key, value in overrides.items():
        if value is None:
            continue
        *sections, last = key.split(".")
        nested: dict[str, Any] = {last: value}
        for section in reversed(sections):
            nested = {section: nested}
        given = _merge(given, nested)
    values = shape(
        given,
        schema_type(),
        (),
        lambda path, message: problems.append(Problem(dotted(path), message, COMMAND_LINE)),
    )
    return values, {path: COMMAND_LINE for path in _leaves(values)}


def _leaves(value: Any, path: Path = ()) -> list[Path]:
    """Paths of what is not a mapping (lists count as one value)."""
    if not isinstance(value, dict):
        return [path]
    return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]


def _merge(weaker: dict[str, Any], stronger: dict[str, Any]) -> dict[str, Any]:
    merged = dict(weaker)
    for key, value in stronger.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _located(problem: Problem, origins: Mapping[Path, Origin]) -> Problem:
    """The problem with the origin of the value it is about: the value's own, that of the list or of the first
    value in the section that it is in, or none for a default."""
    by_name = {dotted(path): origin for path, origin in origins.items()}
    where = problem.where
    origin = by_name.get(where) or by_name.get(where.partition("[")[0])
    if origin is None:
        inside = (item for path, item in by_name.items() if path.startswith(where + "."))
        origin = next(inside, None)
    return Problem(problem.where, problem.message, origin)


def _without_plain_keys(config: Config, env: Mapping[str, str]) -> Config:
    """The configuration with every key replaced by its digest: nothing later can print a key."""
    replace = msgspec.structs.replace
    tenants = {name: replace(tenant, api_keys=_sealed(tenant.api_keys, env)) for name, tenant in config.tenants.items()}
    server = replace(config.server, admin_keys=_sealed(config.server.admin_keys, env))
    return replace(config, tenants=tenants, server=server)


def _sealed(keys: tuple[str, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(DIGEST_PREFIX + configured_digest(entry, env).hex() for entry in keys)
