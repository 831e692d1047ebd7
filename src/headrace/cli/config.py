"""``headrace init`` and ``headrace config check|show``.

Exit codes: 0 all is well, 1 the configuration is wrong (one line per problem on stderr) or a file cannot be
written, 2 the command line is wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec
import yaml

from headrace.config.load import FILE_NAME, LoadedConfig, load_with_origins
from headrace.config.schema import Config
from headrace.config.template import template
from headrace.errors import ConfigError

_MASK = "********"


@click.command("init")
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path), default=FILE_NAME)
@click.option("--force", is_flag=True, help="Replace a file that is already there.")
def init(path: Path, force: bool) -> None:
    """Write a commented configuration to PATH (default: headrace.yaml).

    It holds every key at its default.
    """
    try:
        with path.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(template())
    except FileExistsError:
        _fail(f"{path} is already there; --force replaces it")
    except OSError as error:
        _fail(f"{path}: cannot be written: {error.strerror or type(error).__name__}")
    click.echo(f"wrote {path}; `headrace serve` in this folder reads {FILE_NAME}")


@click.group("config")
def config() -> None:
    """Check and show the configuration."""


@config.command("check")
@click.argument("path", type=click.Path(path_type=Path), required=False)
def check(path: Path | None) -> None:
    """Check PATH (default: the file that `serve` would read) and the environment.

    Every problem is a line on stderr.
    """
    loaded = _load(path)
    read = "no configuration file" if loaded.file is None else str(loaded.file)
    click.echo(f"{read}: ok ({len(loaded.config.lanes)} lanes, {len(loaded.config.tenants)} tenants)")


@config.command("show")
@click.argument("path", type=click.Path(path_type=Path), required=False)
@click.option("--json", "form", flag_value="json", help="As JSON.")
@click.option("--yaml", "form", flag_value="yaml", default="yaml", help="As YAML (the default).")
@click.option("--origin", "with_origin", is_flag=True, help="A line per key, with where its value came from.")
def show(path: Path | None, form: str, with_origin: bool) -> None:
    """Show the configuration that holds: defaults, PATH (default: the file that `serve` would read) and
    environment together. API keys are masked."""
    loaded = _load(path)
    tree = masked_tree(loaded.config)
    if not with_origin:
        click.echo(_render(tree, form), nl=False)
        return
    rows = [(key, value, str(loaded.origin(key))) for key, value in leaves(tree)]
    if form == "json":
        listed = {key: {"value": value, "origin": origin} for key, value, origin in rows}
        click.echo(json.dumps(listed, indent=2, ensure_ascii=False))
        return
    left = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value, _ in rows]
    width = min(max(map(len, left)), 72)
    for text, (_, _, origin) in zip(left, rows, strict=True):
        click.echo(f"{text:<{width}}  # {origin}")


def masked_tree(config: Config) -> dict[str, Any]:
    """Every key of the configuration with its value as plain data, API keys and admin keys masked."""
    tree = _plain(config)
    assert isinstance(tree, dict)
    tree["server"]["admin_keys"] = [_MASK for _ in tree["server"]["admin_keys"]]
    for tenant in tree["tenants"].values():
        tenant["api_keys"] = [_MASK for _ in tenant["api_keys"]]
    return tree


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of everything that is not a mapping; a list is one value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else key)
    else:
        yield path, value


def _plain(value: Any) -> Any:
    # Not to_builtins: a lane's structs leave their defaults out there, and here every key is wanted.
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _render(tree: dict[str, Any], form: str) -> str:
    if form == "json":
        return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def _load(path: Path | None) -> LoadedConfig:
    try:
        return load_with_origins(path, os.environ)
    except ConfigError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    click.echo(message, err=True)
    raise SystemExit(1)
