"""Forms such as ``gamma(rate, shape)``: which arguments each takes, and the checked values of a text in one.

A form is a table row: the parser, the error messages, ``--help`` and the docs all read the same one.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from headrace.bench.load.distribution_text import Call, number_text, parse_call, parse_duration_s, parse_number, shown
from headrace.errors import ConfigError

Kind = Literal["number", "whole", "duration", "text"]
"""``whole``: an integer. ``duration``: seconds."""


@dataclass(frozen=True, slots=True)
class Param:
    """One argument. A number lies between ``least`` and ``most``, both included unless ``above``, which leaves
    out ``least`` itself. ``named``: only accepted as ``name=value``. ``choices``: the texts that are accepted."""

    name: str
    kind: Kind
    required: bool = False
    named: bool = False
    least: float = 0.0
    most: float = inf
    above: bool = False
    infinite: bool = False
    choices: tuple[str, ...] = ()

    @property
    def wanted(self) -> str:
        """What the argument has to be, as words: ``a whole number from 1 to 100000000``."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        noun = {
            "number": "a number",
            "whole": "a whole number",
            "duration": "a duration in seconds",
            "text": "a text",
        }[self.kind]
        if self.kind == "text":
            return noun
        low = f"above {number_text(self.least)}" if self.above else f"from {number_text(self.least)}"
        high = "" if self.most == inf else f" up to {number_text(self.most)}"
        return f"{noun} {low}{high}" + (", or inf" if self.infinite else "")


@dataclass(frozen=True, slots=True)
class Form:
    """One form: its name, arguments in positional order, one line that says what it is, and an example."""

    name: str
    params: tuple[Param, ...]
    summary: str
    example: str

    @property
    def signature(self) -> str:
        """``ramp(from, to[, over=][, count=])``: what ``--help`` prints."""
        parts = ""
        for param in self.params:
            shown_name = f"{param.name}=" if param.named else param.name
            separator = ", " if parts else ""
            parts += f"{separator}{shown_name}" if param.required else f"[{separator}{shown_name}]"
        return f"{self.name}({parts})"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The checked arguments of a text in ``form``. An argument that was not given is None."""

    form: Form
    values: dict[str, float | str]
    where: str

    def number(self, name: str) -> float:
        """A number or duration that the form requires."""
        value = self.optional_number(name)
        assert value is not None, name
        return value

    def optional_number(self, name: str) -> float | None:
        value = self.values.get(name)
        assert not isinstance(value, str), name
        return None if value is None else float(value)

    def whole(self, name: str) -> int:
        """An integer that the form requires."""
        value = self.optional_whole(name)
        assert value is not None, name
        return value

    def optional_whole(self, name: str) -> int | None:
        value = self.values.get(name)
        assert value is None or isinstance(value, int), name
        return value

    def text(self, name: str) -> str:
        """A text that the form requires."""
        value = self.optional_text(name)
        assert value is not None, name
        return value

    def optional_text(self, name: str) -> str | None:
        value = self.values.get(name)
        assert value is None or isinstance(value, str), name
        return value

    def error(self, problem: str) -> ConfigError:
        """An error about arguments that do not fit together."""
        return ConfigError(f"{self.form.name}: {problem}; for example {self.form.example}", where=self.where)


def read_arguments(text: str, forms: Sequence[Form], *, bare_form: str | None = None, where: str = "") -> Arguments:
    """The form that ``text`` is in, with its arguments checked one by one.

    ``bare_form`` names the form that a value alone stands for (``512`` is ``fixed(512)``).
    Raises ConfigError naming the form or argument, the nearest right name, what is accepted, and an example.
    """
    call = parse_call(text, example=forms[0].example, where=where)
    name = bare_form if call.name is None else call.name
    form = next((form for form in forms if form.name == name), None)
    if form is None:
        raise _unknown_form(text, call.name, forms, where)
    values: dict[str, float | str] = {}
    for param, raw in _matched(call, form, where):
        values[param.name] = _checked(param, raw, form, where)
    missing = [repr(param.name) for param in form.params if param.required and param.name not in values]
    if missing:
        problem = f"{form.name} needs {' and '.join(missing)}: {form.signature}"
        raise ConfigError(f"{problem}; for example {form.example}", where=where)
    return Arguments(form, values, where)


def _matched(call: Call, form: Form, where: str) -> list[tuple[Param, str]]:
    """Each argument of the call with the parameter it is for."""
    open_params = [param for param in form.params if not param.named]
    if len(call.positional) > len(open_params):
        extra = shown(call.positional[len(open_params)])
        raise ConfigError(
            f"{form.name}: nothing takes {extra} without a name: {form.signature}; for example {form.example}",
            where=where,
        )
    matched = list(zip(open_params, call.positional, strict=False))
    taken = {param.name for param, _ in matched}
    by_name = {param.name: param for param in form.params}
    for name, raw in call.keywords.items():
        if name not in by_name:
            raise ConfigError(
                f"{form.name} has no argument {shown(name)}{_nearest(name, by_name)}: {form.signature}; "
                f"for example {form.example}",
                where=where,
            )
        if name in taken:
            raise ConfigError(f"{form.name}: {name} is given twice, by position and by name", where=where)
        matched.append((by_name[name], raw))
    return matched


def _checked(param: Param, raw: str, form: Form, where: str) -> float | str:
    if param.kind == "text":
        if param.choices and raw not in param.choices:
            hint = _nearest(raw, param.choices)
            raise ConfigError(f"{form.name}: {param.name} is {shown(raw)}{hint}: {param.wanted}", where=where)
        return raw
    value = parse_duration_s(raw) if param.kind == "duration" else parse_number(raw)
    allowed = value is not None and _in_range(param, value) and (param.kind != "whole" or value.is_integer())
    if value is None or not allowed:
        raise ConfigError(
            f"{form.name}: {param.name} is {shown(raw)}; it must be {param.wanted}, for example {form.example}",
            where=where,
        )
    return int(value) if param.kind == "whole" else value


def _in_range(param: Param, value: float) -> bool:
    if value == inf:
        return param.infinite
    return (value > param.least if param.above else value >= param.least) and value <= param.most


def _unknown_form(text: str, name: str | None, forms: Sequence[Form], where: str) -> ConfigError:
    names = ", ".join(form.name for form in forms)
    example = f"for example {forms[0].example}"
    if name is None:
        return ConfigError(f"{shown(text)} is not of the form name(arguments): {names}; {example}", where=where)
    hint = _nearest(name, [form.name for form in forms])
    return ConfigError(f"{shown(name)} is none of {names}{hint}; {example}", where=where)


def _nearest(name: str, names: Sequence[str] | dict[str, Param]) -> str:
    """``; did you mean 'gamma'?``, or nothing when no name is near."""
    near = difflib.get_close_matches(name.lower()[:64], list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
