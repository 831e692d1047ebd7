"""The types of ``headrace bench``'s option values: what is out of range is one line, before anything is sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import click

from headrace.errors import ConfigError

if TYPE_CHECKING:
    _NumberType = click.ParamType[float]
    _TextType = click.ParamType[str]
else:  # older versions of click do not have it as a generic type
    _NumberType = _TextType = click.ParamType


class Number(_NumberType):
    """A finite number from ``least`` (or above ``above``) to ``most`` (or below ``below``).

    Not click's FloatRange, which lets NaN through: no comparison with it holds.
    """

    name = "float"

    def __init__(
        self, *, least: float = -math.inf, above: float = -math.inf, most: float = math.inf, below: float = math.inf
    ) -> None:
        self._least, self._above, self._most, self._below = least, above, most, below

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Raises ConfigError, as every wrong value in a workload file does."""
        where = param.opts[0] if param is not None else ""
        try:
            number = float(str(value))
        except ValueError as error:
            raise ConfigError(f"{str(value)[:60]!a} is not a number", where=where) from error
        in_range = self._least <= number <= self._most and self._above < number < self._below
        if not (math.isfinite(number) and in_range):
            raise ConfigError(f"{number:g} is out of range ({self._range()})", where=where)
        return number

    def _range(self) -> str:
        bounds = (
            ("{:g} or more", self._least),
            ("more than {:g}", self._above),
            ("{:g} at most", self._most),
            ("less than {:g}", self._below),
        )
        return ", ".join([words.format(bound) for words, bound in bounds if math.isfinite(bound)])


class PlainText(_TextType):
    """Text that can be written as UTF-8: bytes that are none come from a shell as halves of surrogate pairs."""

    name = "text"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raises ConfigError."""
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = param.opts[0] if param is not None else ""
            raise ConfigError(f"{text[:60]!a} is not UTF-8 text", where=where) from error
        return text


_LONGEST_S: Final = 30 * 24 * 3600.0

TEXT: Final = PlainText()
SECONDS: Final = Number(least=0, most=_LONGEST_S)
POSITIVE_S: Final = Number(above=0, most=_LONGEST_S)
MILLISECONDS: Final = Number(above=0, most=_LONGEST_S * 1e3)
SHARE: Final = Number(above=0, below=1)
CONFIDENCE: Final = Number(least=0.01, most=0.9999)
TOLERANCE: Final = Number(above=0, most=10)
RATE: Final = Number(above=0, most=1e6)
SEED: Final = click.IntRange(min=0, max=2**62)
"""Leaves room for what a sweep adds, and fits in 64 bits."""
