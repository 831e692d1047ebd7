"""Environment variables as configuration: ``HEADRACE_SERVER_PORT=9000`` is ``server.port: 9000``.

``HEADRACE_`` + section + ``_`` + key in capitals, for the sections ``model``, ``server``, ``engine``,
``engine.scheduling`` (``HEADRACE_ENGINE_SCHEDULING_STRATEGY``), ``control.tuner`` and ``fleet``, and
``HEADRACE_DEFAULT_LANE``, ``HEADRACE_DEFAULT_GROUP`` and ``HEADRACE_LOG_LEVEL``. Lanes, groups and tenants have names
of the operator's and are written in the file only. A list is written as YAML (``[a, b]``) or with commas; ``null`` is
no value where that is possible; an empty variable counts as not set.

``HEADRACE_CONFIG``, ``HEADRACE_CACHE_DIR`` and ``HEADRACE_ADMIN_KEY`` are not keys. Any other ``HEADRACE_``
name is somebody else's and is left alone, unless it begins like a section or is nearly a known name: then it is
a mistake. Names that Kubernetes sets for a service called ``headrace...`` (``..._SERVICE_HOST``) are left alone
too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import inspect

from headrace.config.problems import ConfigProblems, Origin, Path, Problem, dotted
from headrace.config.shape import INVALID, schema_type, shape
from headrace.config.yaml_tree import parse_yaml

PREFIX: Final = "HEADRACE_"
CONFIG_VARIABLE: Final = "HEADRACE_CONFIG"
CACHE_VARIABLE: Final = "HEADRACE_CACHE_DIR"
ADMIN_KEY_VARIABLE: Final = "HEADRACE_ADMIN_KEY"
_RESERVED: Final = frozenset({CONFIG_VARIABLE, CACHE_VARIABLE, ADMIN_KEY_VARIABLE})
_KUBERNETES: Final = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
_NEARLY: Final = 0.9
"""From this similarity on (0 to 1) an unknown name is taken for a mistyped one."""


def variables() -> dict[str, Path]:
    """Every variable that sets a key, and the key's path."""
    return {name: path for name, (path, _) in _variable_types().items()}


def read_environment(env: Mapping[str, str], report: list[Problem]) -> tuple[dict[str, Any], dict[Path, Origin]]:
    """The values that ``env`` sets, as a partial tree, and where each came from. Adds to ``report``."""
    known = _variable_types()
    tree: dict[str, Any] = {}
    origins: dict[Path, Origin] = {}
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in _RESERVED or env[name] == "":
            continue
        if name not in known:
            message = _unknown(name, known)
            if message is not None:
                report.append(Problem("", message, Origin(name)))
            continue
        path, kind = known[name]
        origin = Origin(name)

        def add(where: Path, message: str, origin: Origin = origin) -> None:
            report.append(Problem(dotted(where), message, origin))

        value = shape(_value(env[name], kind, name), kind, path, add)
        if value is not INVALID:
            target = tree
            for part in path[:-1]:
                target = target.setdefault(str(part), {})
            target[str(path[-1])] = value
            origins[path] = origin
    return tree, origins


def _variable_types() -> dict[str, tuple[Path, inspect.Type]]:
    return {PREFIX + "_".join(map(str, path)).upper(): (path, kind) for path, kind in _keys(schema_type(), ())}


def _keys(section: inspect.StructType, path: Path) -> Iterator[tuple[Path, inspect.Type]]:
    """The keys of a section and of the sections in it, without what has names of the operator's."""
    for item in section.fields:
        here = (*path, item.encode_name)
        if isinstance(item.type, inspect.StructType):
            yield from _keys(item.type, here)
        elif not isinstance(item.type, inspect.DictType):
            yield here, item.type


def _unknown(name: str, known: Mapping[str, object]) -> str | None:
    if _KUBERNETES.fullmatch(name):
        return None
    sections = [top.encode_name.upper() for top in schema_type().fields]
    rest = name.removeprefix(PREFIX)
    if rest in sections or any(rest.startswith(f"{section}_") for section in sections):
        if rest.split("_")[0] in ("LANES", "TENANTS", "GROUPS"):
            return "lanes, groups and tenants are set in the configuration file, not in the environment"
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    else:
        near = difflib.get_close_matches(name, known, n=1, cutoff=_NEARLY)
        if not near:
            return None
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown variable{hint}"


def _value(text: str, kind: inspect.Type, name: str) -> Any:
    if isinstance(kind, inspect.UnionType):
        if text.strip().lower() in ("null", "~"):
            return None
        (kind,) = (option for option in kind.types if not isinstance(option, inspect.NoneType))
    if isinstance(kind, inspect.StrType | inspect.LiteralType):
        return text
    if isinstance(kind, inspect.VarTupleType) and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return parse_yaml(text, name).value
    except ConfigProblems:
        # Not YAML, so not a number either: the text itself makes the clearer message.
        return text
