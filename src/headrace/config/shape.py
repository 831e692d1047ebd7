"""Checks plain values against the schema's shape: known keys, right types. Every problem is reported.

The result is the same tree with what people may write in other forms put right: whole numbers for seconds
become floats, ``2GiB`` becomes bytes, an empty section becomes no section.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any, Final

from msgspec import inspect

from headrace.config.problems import Path
from headrace.config.schema import Config
from headrace.config.units import parse_bytes

Report = Callable[[Path, str], None]
"""Takes a problem: where and what."""

_BYTES_SUFFIX: Final = "_bytes"
_SECRET_KEYS: Final = frozenset({"api_keys", "admin_keys"})
_SHOWN_CHARS: Final = 40
_LARGEST: Final = 2**63 - 1

INVALID: Final = object()
"""What ``shape`` returns for a value that has been reported."""


def schema_type() -> inspect.StructType:
    """The whole configuration's type, as msgspec describes it."""
    kind = inspect.type_info(Config)
    assert isinstance(kind, inspect.StructType)
    return kind


def shape(value: Any, kind: inspect.Type, path: Path, report: Report) -> Any:
    """``value`` as ``kind`` takes it, or INVALID after ``report`` was told. A section may be partial: only keys
    without a default are missed."""
    match kind:
        case inspect.UnionType(types=types):
            if value is None:
                return None
            (inner,) = (option for option in types if not isinstance(option, inspect.NoneType))
            return shape(value, inner, path, report)
        case inspect.StructType():
            return _section(value, kind, path, report)
        case inspect.DictType(value_type=value_type):
            return _named(value, value_type, path, report)
        case inspect.VarTupleType(item_type=item_type):
            return _items(value, item_type, path, report)
        case _:
            return _leaf(value, kind, path, report)


def describe(value: Any) -> str:
    """A value in a message: short, and recognisable as what was written."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case str():
            shown = value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "..."
            return f'"{shown}"'
        case int() if abs(value) > _LARGEST:
            return "one beyond every range"
        case _:
            return f"{value}"[:_SHOWN_CHARS]


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean NAME?`` with the nearest of ``known``, or nothing when none is near."""
    near = difflib.get_close_matches(name[:_SHOWN_CHARS].lower(), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _section(value: Any, kind: inspect.StructType, path: Path, report: Report) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict):
        report(path, f"expected a mapping, got {_shown(path, value)}")
        return INVALID
    fields = {item.encode_name: item for item in kind.fields}
    result: dict[str, Any] = {}
    for key, item in value.items():
        if key not in fields:
            report((*path, key), f"unknown key{nearest(key, fields) or _known(fields)}")
            continue
        shaped = shape(item, fields[key].type, (*path, key), report)
        if shaped is not INVALID:
            result[key] = shaped
    missing = [name for name, item in fields.items() if item.required and name not in value]
    for name in missing:
        report(path, f"{name} is missing")
    # Without a value that it needs, and none below it to merge with, a section cannot be used.
    return INVALID if any(fields[name].required and name not in result for name in fields) else result


def _known(fields: Iterable[str]) -> str:
    return f" (known: {', '.join(fields)})"


def _named(value: Any, value_type: inspect.Type, path: Path, report: Report) -> Any:
    if value is None:
        return {}
    if not isinstance(value, dict):
        report(path, f"expected a mapping of names, got {_shown(path, value)}")
        return INVALID
    result: dict[str, Any] = {}
    for name, item in value.items():
        # A lane set to null is removed; the merge sees the None.
        if item is None and path == ("lanes",):
            result[name] = None
            continue
        shaped = shape(item, value_type, (*path, name), report)
        if shaped is not INVALID:
            result[name] = shaped
    return result


def _items(value: Any, item_type: inspect.Type, path: Path, report: Report) -> Any:
    if not isinstance(value, list | tuple):
        report(path, f"expected a list, got {_shown(path, value)}")
        return INVALID
    shaped = [shape(item, item_type, (*path, index), report) for index, item in enumerate(value)]
    return INVALID if INVALID in shaped else shaped


def _leaf(value: Any, kind: inspect.Type, path: Path, report: Report) -> Any:
    expected = "a value"
    match kind:
        case inspect.StrType():
            if isinstance(value, str):
                return value
            expected = "text (quote it)" if isinstance(value, bool | int | float) else "text"
        case inspect.BoolType():
            if isinstance(value, bool):
                return value
            expected = "true or false"
        case inspect.IntType():
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST:
                return value
            expected = "a whole number"
            if isinstance(path[-1], str) and path[-1].endswith(_BYTES_SUFFIX):
                size = parse_bytes(value) if isinstance(value, str) else None
                if size is not None:
                    return size
                expected = "bytes (a whole number, or a size such as 2GiB)"
        case inspect.FloatType():
            # NaN and infinity pass here; they are outside every range.
            if isinstance(value, float) or (
                isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST
            ):
                return float(value)
            expected = "a number"
        case inspect.LiteralType(values=values):
            words = [str(word) for word in values]
            if isinstance(value, str) and value in words:
                return value
            hint = nearest(value, words) if isinstance(value, str) else ""
            report(path, f"expected one of {', '.join(words)}, got {_shown(path, value)}{hint}")
            return INVALID
    report(path, f"expected {expected}, got {_shown(path, value)}")
    return INVALID


def _shown(path: Path, value: Any) -> str:
    # A key in the wrong place must not reach a terminal or a log.
    return "something else" if _SECRET_KEYS.intersection(map(str, path)) else describe(value)
