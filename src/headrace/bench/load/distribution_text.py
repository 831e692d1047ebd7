"""The grammar of ``poisson(200)``, ``uniform(512, 16k)``, ``ramp(1, 50, over=1m)``: texts to parts and back.

::

    text  := NAME [ "(" [ arg { "," arg } ] ")" ]  |  value
    arg   := [ NAME "=" ] value
    value := bare text without  , ( ) = ' "   |  quoted text, the quote doubled inside it

Blanks are free between the parts. A value stays text here, what it means is its argument's business:

- a number may end in ``k`` (1,000), ``m`` (1,000,000), ``ki`` (1,024) or ``mi`` (1,048,576), in either case:
  ``16k`` is 16,000 and ``16ki`` 16,384. ``inf`` is infinite.
- a duration is in seconds and may end in ``ms``, ``s``, ``m`` or ``min`` (minutes), or ``h``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from math import inf

from headrace.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_BARE = re.compile(r"[^,()='\"]+")
_NUMBER = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)[ ]?([A-Za-z]*)")
_FACTORS = {"": 1, "k": 1000, "m": 1_000_000, "ki": 1024, "mi": 1024 * 1024}
_SECONDS = {"": Decimal(1), "ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "min": Decimal(60)}
_SECONDS["h"] = Decimal(3600)
_SHOWN_CHARS = 80
"""How much of a text an error message repeats."""


@dataclass(frozen=True, slots=True)
class Call:
    """A text in parts. ``name`` is None for a bare value such as ``512``, which is then the only positional."""

    name: str | None
    positional: tuple[str, ...] = ()
    keywords: dict[str, str] = field(default_factory=dict)


def parse_call(text: str, *, example: str, where: str = "") -> Call:
    """The parts of ``text``.

    Raises ConfigError when it is not in the grammar; the message says what was expected at which character and
    repeats ``example``.
    """
    return _Scanner(text, example, where).call()


def parse_number(text: str) -> float | None:
    """The number in ``text`` (see the module), or None when there is none. Never NaN; infinite only for ``inf``."""
    if text == "inf":
        return inf
    match = _NUMBER.fullmatch(text)
    if match is None or match.group(2).lower() not in _FACTORS:
        return None
    value = float(Decimal(match.group(1)) * _FACTORS[match.group(2).lower()])
    return value if abs(value) != inf else None


def parse_duration_s(text: str) -> float | None:
    """Seconds in ``text`` (see the module), or None when it is no finite duration."""
    match = _NUMBER.fullmatch(text)
    if match is None or match.group(2) not in _SECONDS:
        return None
    value = float(Decimal(match.group(1)) * _SECONDS[match.group(2)])
    return value if abs(value) != inf else None


def shown(text: str) -> str:
    """``text`` as an error message repeats it: quoted, and cut when it is long."""
    return repr(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…")


def call_text(name: str, *positional: float | str, **keywords: float | str | None) -> str:
    """The text of a call, such that ``parse_call`` gives its parts back. A keyword that is None is left out."""
    parts = [_value_text(value) for value in positional]
    parts += [f"{key}={_value_text(value)}" for key, value in keywords.items() if value is not None]
    return f"{name}({', '.join(parts)})"


def number_text(value: float) -> str:
    """The shortest text that ``parse_number`` reads as ``value``."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return str(int(value))
    return repr(value)


def _value_text(value: float | str) -> str:
    if not isinstance(value, str):
        return number_text(value)
    if _BARE.fullmatch(value) and value == value.strip():
        return value
    doubled = value.replace('"', '""')
    return f'"{doubled}"'


class _Scanner:
    """Reads one text from left to right."""

    def __init__(self, text: str, example: str, where: str) -> None:
        self._text = text
        self._example = example
        self._where = where
        self._at = 0

    def call(self) -> Call:
        self._skip_blanks()
        if self._at == len(self._text):
            raise self._error("is empty")
        name = _NAME.match(self._text, self._at)
        if name is None or not self._is_alone(name.end()):
            return self._bare_value()
        self._at = name.end()
        self._skip_blanks()
        positional: list[str] = []
        keywords: dict[str, str] = {}
        if self._next() == "(":
            self._at += 1
            self._arguments(positional, keywords)
            self._skip_blanks()
        if self._at < len(self._text):
            raise self._error(f"ends with {shown(self._text[self._at :])}, which belongs to nothing")
        return Call(name.group(), tuple(positional), keywords)

    def _is_alone(self, end: int) -> bool:
        """Whether the name that ends at ``end`` is followed by a parenthesis or by nothing."""
        rest = self._text[end:].lstrip()
        return not rest or rest[0] == "("

    def _bare_value(self) -> Call:
        value = self._value()
        if self._at < len(self._text):
            raise self._error(f"has {shown(self._text[self._at])} at character {self._at + 1}, outside parentheses")
        return Call(None, (value,))

    def _arguments(self, positional: list[str], keywords: dict[str, str]) -> None:
        self._skip_blanks()
        if self._next() == ")":
            self._at += 1
            return
        while True:
            keyword = self._keyword()
            value = self._value()
            if keyword is None:
                if keywords:
                    raise self._error(f"has {shown(value)} without a name after arguments with one")
                positional.append(value)
            elif keyword in keywords:
                raise self._error(f"says {keyword} twice")
            else:
                keywords[keyword] = value
            separator = self._next()
            if separator not in {",", ")"}:
                got = "the end" if not separator else shown(separator)
                raise self._error(f"needs ',' or ')' at character {self._at + 1}, and has {got}")
            self._at += 1
            if separator == ")":
                return

    def _keyword(self) -> str | None:
        """The name before an ``=``, if one comes next."""
        self._skip_blanks()
        name = _NAME.match(self._text, self._at)
        if name is None:
            return None
        start, self._at = self._at, name.end()
        self._skip_blanks()
        if self._next() != "=":
            self._at = start
            return None
        self._at += 1
        return name.group()

    def _value(self) -> str:
        self._skip_blanks()
        quote = self._next()
        if quote in {"'", '"'}:
            return self._quoted(quote)
        bare = _BARE.match(self._text, self._at)
        if bare is None or not bare.group().strip():
            got = "the end" if not quote else shown(quote)
            raise self._error(f"needs a value at character {self._at + 1}, and has {got}")
        self._at = bare.end()
        return bare.group().strip()

    def _quoted(self, quote: str) -> str:
        parts: list[str] = []
        while True:
            end = self._text.find(quote, self._at + 1)
            if end < 0:
                raise self._error(f"has an opening {quote} without a closing one")
            parts.append(self._text[self._at + 1 : end])
            self._at = end + 1
            if self._next() != quote:
                self._skip_blanks()
                return quote.join(parts)

    def _skip_blanks(self) -> None:
        while self._next().isspace():
            self._at += 1

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{shown(self._text)} {problem}; write for example {self._example}", where=self._where)
