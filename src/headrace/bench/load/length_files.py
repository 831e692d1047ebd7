"""Files of lengths: what a file of numbers, a CSV, a JSON list or a cumulative distribution says.

Recognised by content:

- one number a line (blank lines and lines that begin with ``#`` are passed over)
- CSV whose first line names the columns
- JSON: a list of numbers
- JSON: a cumulative distribution ``[[tokens, fraction of lengths up to tokens], ...]``, or an object that has it
  under ``cdf``
"""

from __future__ import annotations

import csv
import difflib
from array import array
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.bench.load.length_model import MAX_LENGTH_TOKENS
from headrace.errors import ConfigError

CdfPoints = tuple[tuple[int, float], ...]
"""(tokens, fraction of lengths up to tokens): tokens rise, fractions do not fall, the last one is 1."""


def read_length_file(path: Path, column: str | None, *, zeros: bool) -> NDArray[np.int64] | CdfPoints:
    """The lengths in ``path`` in file order, or the points of its cumulative distribution.

    ``column`` picks a CSV column by name; it may be left out when there is one. ``zeros``: whether 0 is taken.
    Raises ConfigError with file and line when the file cannot be read or a length is none.
    """
    try:
        with _open(path) as file:
            return _read(file, path, column, zeros)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _open(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():  # before open, which would wait for a pipe's writer
            raise ConfigError("is not a regular file", where=str(path))
        return path.open("rb")
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise ConfigError(f"is no file name: {error}", where=repr(str(path))) from error


def _read(file: BinaryIO, path: Path, column: str | None, zeros: bool) -> NDArray[np.int64] | CdfPoints:
    lines = _content_lines(file, path)
    first = next(lines, None)
    if first is None:
        raise ConfigError("holds no lengths: it is empty", where=str(path))
    is_json = first[1][0] in "[{"
    is_list = not is_json and _is_number(first[1])
    if column is not None and (is_json or is_list):
        raise ConfigError(f"has no columns, so column {column!r} is not in it; leave column out", where=str(path))
    if is_json:
        return _from_json(first[1].encode() + file.read(), path, zeros)
    if is_list:
        lengths = array("q", (_length(text, zeros, f"{path}, line {line}") for line, text in chain([first], lines)))
    else:
        lengths = _from_csv(chain([first], lines), path, column, zeros)
    return _frozen(lengths)


def _content_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are neither blank nor comments, stripped, with their numbers."""
    for number, raw in enumerate(iter(file.readline, b""), start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"is not UTF-8 text ({error.reason})", where=f"{path}, line {number}") from error
        if text and not text.startswith("#"):
            yield number, text


def _from_csv(lines: Iterator[tuple[int, str]], path: Path, column: str | None, zeros: bool) -> array[int]:
    lengths = array("q")
    place = -1
    header: list[str] = []
    for number, text in lines:
        where = f"{path}, line {number}"
        try:
            cells = next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise ConfigError(f"is not a line of CSV: {error}", where=where) from error
        if place < 0:
            header = [cell.strip() for cell in cells]
            place = _column(header, column, where)
        elif len(cells) != len(header):
            raise ConfigError(f"has {len(cells)} cells, the header has {len(header)}", where=where)
        else:
            lengths.append(_length(cells[place], zeros, f"{where}, column {header[place]!r}"))
    if not lengths:
        raise ConfigError("holds no lengths below its header", where=str(path))
    return lengths


def _column(header: list[str], column: str | None, where: str) -> int:
    names = ", ".join(repr(name) for name in header)
    if all(_is_number(name) for name in header):
        raise ConfigError("holds numbers where a CSV names its columns; add a header line", where=where)
    if column is None and len(header) == 1:
        return 0
    if column is None:
        raise ConfigError(f"has several columns ({names}); say which, for example column={header[0]}", where=where)
    if header.count(column) == 1:
        return header.index(column)
    near = difflib.get_close_matches(column, header, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    problem = f"has two columns {column!r}" if column in header else f"has no column {column!r}{hint}"
    raise ConfigError(f"{problem} (columns: {names})", where=where)


def _from_json(text: bytes, path: Path, zeros: bool) -> NDArray[np.int64] | CdfPoints:
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=str(path)) from error
    if isinstance(document, dict) and "cdf" in document:
        document = document["cdf"]
    if not isinstance(document, list) or not document:
        raise ConfigError(
            "must be a list of lengths, a list of [tokens, cumulative fraction], or an object with that under 'cdf'",
            where=str(path),
        )
    if isinstance(document[0], list):
        return _cdf_points(document, path)
    return _frozen(array("q", (_length(item, zeros, f"{path}, item {at}") for at, item in enumerate(document))))


def _cdf_points(document: list[object], path: Path) -> CdfPoints:
    points: list[tuple[int, float]] = []
    for at, item in enumerate(document):
        where = f"{path}, point {at}"
        if not isinstance(item, list) or len(item) != 2:
            raise ConfigError(f"must be [tokens, cumulative fraction], and is {_brief(item)}", where=where)
        tokens = _length(item[0], False, where)
        fraction = item[1]
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
            raise ConfigError(f"has the fraction {_brief(fraction)}; it must be from 0 to 1", where=where)
        points.append((tokens, float(fraction)))
    for at, (before, after) in enumerate(pairwise(points), start=1):
        if after[0] <= before[0] or after[1] < before[1]:
            raise ConfigError(
                f"goes back from {list(before)} to {list(after)}; tokens must rise and fractions must not fall",
                where=f"{path}, point {at}",
            )
    if points[-1][1] != 1:
        raise ConfigError(f"ends at the fraction {points[-1][1]}; the last one must be 1", where=str(path))
    return tuple(points)


def _length(value: object, zeros: bool, where: str) -> int:
    """A length from a CSV cell, a line or a JSON value; ``12.0`` counts as 12."""
    number: object = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"{_brief(value)} is no number of tokens", where=where) from None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(f"{_brief(value)} is no number of tokens", where=where)
    if not 0 <= number <= MAX_LENGTH_TOKENS or number != int(number):
        problem = f"must be a whole number of tokens from 1 to {MAX_LENGTH_TOKENS}, and is {_brief(value)}"
        raise ConfigError(problem, where=where)
    if number == 0 and not zeros:
        raise ConfigError("is 0 tokens; a length is at least 1: say min=1 to raise it", where=where)
    return int(number)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _frozen(lengths: array[int]) -> NDArray[np.int64]:
    values = np.array(lengths, dtype=np.int64)
    values.setflags(write=False)
    return values
