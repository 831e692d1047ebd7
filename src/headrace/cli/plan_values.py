"""The types of ``headrace plan``'s option values: what is out of range is one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from headrace.bench.load.distribution_text import parse_number
from headrace.config.units import parse_bytes
from headrace.errors import ConfigError

if TYPE_CHECKING:
    _CountType = click.ParamType[int]
else:  # older versions of click do not have it as a generic type
    _CountType = click.ParamType


class Count(_CountType):
    """A whole number such as ``4096``, ``128k`` (thousands) or ``128ki`` (1,024s)."""

    name = "count"

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Raises ConfigError."""
        where = param.opts[0] if param is not None else ""
        number = float(value) if isinstance(value, int) else parse_number(str(value).strip())
        if number is None or not number.is_integer():
            raise ConfigError(f"{str(value)[:60]!a} is not a whole number such as 4096 or 128ki", where=where)
        if not self._least <= number <= self._most:
            raise ConfigError(f"{str(value)[:60]} is out of range ({self._least} to {self._most})", where=where)
        return int(number)


class Size(_CountType):
    """Bytes such as ``80GiB`` or ``24 GB``."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Raises ConfigError."""
        where = param.opts[0] if param is not None else ""
        size = value if isinstance(value, int) else parse_bytes(str(value))
        if size is None:
            raise ConfigError(f"{str(value)[:60]!a} is not a size such as 80GiB or 24 GB", where=where)
        if size > _MOST_BYTES:
            raise ConfigError(f"{str(value)[:60]} is more than 2^60 bytes", where=where)
        return size


_MOST_BYTES: Final = 1 << 60
TOKENS: Final = Count(1, 1 << 32)
SEQUENCES: Final = Count(1, 1 << 20)
PARAMETERS: Final = Count(1, 1 << 60)
SIZE: Final = Size()
