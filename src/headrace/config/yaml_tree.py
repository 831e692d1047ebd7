"""YAML text to plain values that remember their lines.

Only plain data is accepted: mappings, lists, strings, numbers, booleans, null; anchors, aliases and merge
keys work. A duplicate key, any other tag, a value that contains itself, and text or nesting without measure
are refused with the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import yaml

from headrace.config.problems import ConfigProblems, Origin, Path, Problem, dotted

MAX_TEXT_BYTES: Final = 256 * 1024
MAX_DEPTH: Final = 24
MAX_VALUES: Final = 20_000
"""Aliases repeat what they point at; this bounds what a small text can grow into."""

_TAG: Final = "tag:yaml.org,2002:"
_MAX_NUMBER_CHARS: Final = 40
_EXPONENT: Final = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]


@dataclass
class YamlTree:
    """The values of one document and the line (from 1) of every key and list item in it."""

    value: Value
    lines: dict[Path, int] = field(default_factory=dict)


def parse_yaml(data: bytes | str, name: str) -> YamlTree:
    """Parse one document; ``name`` is the file's name for messages. Empty text has the value None.

    Raises ConfigProblems, never anything else, whatever ``data`` holds.
    """
    text = _decode(data, name)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        said = ", ".join(part for part in (error.context, error.problem) if part)
        message = f"not valid YAML: {said or 'cannot be read'}"
        raise ConfigProblems([Problem("", message, Origin(name, line))]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: the character {error.character!r} is not allowed"
        raise ConfigProblems([Problem("", message, Origin(name, line))]) from error
    except RecursionError as error:
        raise ConfigProblems([Problem("", "nested too deeply", Origin(name))]) from error
    except (yaml.YAMLError, ValueError, OverflowError, TypeError, LookupError, AttributeError) as error:
        # PyYAML lets a few of these out for escapes and directives that it does not check.
        raise ConfigProblems([Problem("", "not valid YAML", Origin(name))]) from error
    builder = _Builder(name)
    tree = YamlTree(value=None if node is None else builder.value(node, ()), lines=builder.lines)
    if builder.problems:
        raise ConfigProblems(builder.problems)
    return tree


def _decode(data: bytes | str, name: str) -> str:
    size = len(data)
    if size > MAX_TEXT_BYTES:
        message = f"{size} bytes are more than a configuration may have ({MAX_TEXT_BYTES})"
        raise ConfigProblems([Problem("", message, Origin(name))])
    if isinstance(data, str):
        return data
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigProblems([Problem("", "not UTF-8 text", Origin(name, line))]) from error


def _has_surrogate(text: str) -> bool:
    # The escape "\\ud800" makes half a character, which no encoder takes.
    return any("\ud800" <= char <= "\udfff" for char in text)


class _Stop(Exception):
    """Building cannot go on: the document is too large or contains itself."""


class _Builder:
    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self._values = 0

    def value(self, node: yaml.Node, path: Path) -> Value:
        try:
            return self._value(node, path, open_nodes=())
        except _Stop:
            return None

    def _problem(self, node: yaml.Node, path: Path, message: str) -> None:
        self.problems.append(Problem(dotted(path), message, Origin(self.name, node.start_mark.line + 1)))

    def _value(self, node: yaml.Node, path: Path, open_nodes: tuple[yaml.Node, ...]) -> Value:
        self._values += 1
        if self._values > MAX_VALUES:
            self._problem(node, (), f"more than {MAX_VALUES} values (are aliases nested?)")
            raise _Stop
        if any(node is outer for outer in open_nodes):
            self._problem(node, path, "contains itself through an alias")
            raise _Stop
        if len(open_nodes) >= MAX_DEPTH:
            self._problem(node, (), "nested too deeply")
            raise _Stop
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        inner = (*open_nodes, node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items: list[Value] = []
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.start_mark.line + 1
                items.append(self._value(item, (*path, index), inner))
            return items
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path, inner)
        self._problem(node, path, f"the tag {node.tag} is not allowed here")
        return None

    def _mapping(self, node: yaml.MappingNode, path: Path, inner: tuple[yaml.Node, ...]) -> dict[str, Value]:
        own: dict[str, Value] = {}
        merged: dict[str, Value] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, path, "a key must be plain text")
                continue
            if key_node.tag == _TAG + "merge":
                self._merge(value_node, path, inner, merged)
                continue
            # The text as written: a lane may be called `on` or `1`.
            key: str = key_node.value
            if _has_surrogate(key):
                self._problem(key_node, path, "a key must be valid Unicode text")
                continue
            here = (*path, key)
            if key in own:
                first = self.lines[here]
                self._problem(key_node, here, f"given twice (first on line {first})")
                continue
            self.lines[here] = key_node.start_mark.line + 1
            own[key] = self._value(value_node, here, inner)
        return {**merged, **own}

    def _merge(self, node: yaml.Node, path: Path, inner: tuple[yaml.Node, ...], merged: dict[str, Value]) -> None:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                self._problem(source, path, "<< needs a mapping, or a list of mappings")
                continue
            # The lines of keys that the mapping sets itself must not move to those of the merged one.
            kept = dict(self.lines)
            value = self._value(source, path, inner)
            self.lines = {**self.lines, **kept}
            if isinstance(value, dict):
                # YAML: an earlier mapping in the list wins over a later one.
                for key, item in value.items():
                    merged.setdefault(key, item)

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Value:
        text: str = node.value
        kind = node.tag.removeprefix(_TAG)
        if _has_surrogate(text):
            self._problem(node, path, "not valid Unicode text")
            return None
        if kind == "str":
            # YAML 1.1 takes 1e3 for text; people mean the number.
            plain_number = node.style is None and len(text) <= _MAX_NUMBER_CHARS and _EXPONENT.fullmatch(text)
            return float(text) if plain_number else text
        if kind == "null":
            return None
        if kind == "timestamp" or (kind in ("int", "float") and ":" in text):
            # 2024-01-01 and 12:30 (base 60 in YAML 1.1) are text to everyone else.
            return text
        if kind in ("bool", "int", "float", "value"):
            return self._core_scalar(node, kind, path)
        self._problem(node, path, f"the tag {node.tag} is not allowed here")
        return None

    def _core_scalar(self, node: yaml.ScalarNode, kind: str, path: Path) -> Value:
        if len(node.value) > _MAX_NUMBER_CHARS:
            self._problem(node, path, f"not a valid {kind}: too long")
            return None
        constructor = yaml.constructor.SafeConstructor()
        try:
            if kind == "bool":
                return bool(constructor.construct_yaml_bool(node))
            if kind == "int":
                return int(constructor.construct_yaml_int(node))
            if kind == "float":
                return float(constructor.construct_yaml_float(node))
        except (ValueError, KeyError, OverflowError, LookupError) as error:
            self._problem(node, path, f"not a valid {kind} ({type(error).__name__})")
            return None
        return str(node.value)
