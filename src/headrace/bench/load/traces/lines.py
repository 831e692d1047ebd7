"""A trace file as numbered lines, read once from front to back, and as CSV cells of named columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import BinaryIO

from headrace.errors import ConfigError

MAX_LINE_BYTES = 16 * 1024 * 1024
"""A longer line is no line of a trace; without a limit a binary file would be read whole to find its end."""

Line = tuple[int, bytes]
"""Number (from 1) and content, without surrounding blanks."""


def numbered_lines(file: BinaryIO, name: str) -> Iterator[Line]:
    """The lines that are not blank, a byte order mark removed. ``name`` is the file's, for errors."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            raise line_error(name, number, f"is longer than {MAX_LINE_BYTES} bytes; this is no trace")
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if content := raw.strip():
            yield number, content


def line_error(name: str, number: int, problem: str) -> ConfigError:
    """``FILE, line N: problem``."""
    return ConfigError(problem, where=f"{name}, line {number}")


def csv_cells(line: Line, name: str) -> list[str]:
    """The cells of one CSV line. A cell cannot hold a line break: no trace has one."""
    number, content = line
    try:
        return next(csv.reader([content.decode("utf-8")], strict=True))
    except UnicodeDecodeError as error:
        raise line_error(name, number, f"is not UTF-8 text ({error.reason})") from error
    except csv.Error as error:
        raise line_error(name, number, f"is not a line of CSV: {error}") from error


class CsvTable:
    """Rows of a CSV by column name; the first line names the columns, others may have more of them."""

    def __init__(self, lines: Iterator[Line], name: str, required: tuple[str, ...]) -> None:
        """Reads the header. Raises ConfigError when a required column is missing."""
        header = next(lines, None)
        if header is None:
            raise ConfigError("is empty", where=name)
        self._lines = lines
        self._name = name
        self._columns = [cell.strip() for cell in csv_cells(header, name)]
        missing = [column for column in required if column not in self._columns]
        if missing:
            raise line_error(name, header[0], f"has no column {missing[0]!r} (columns: {', '.join(self._columns)})")

    def index(self, column: str) -> int | None:
        """Where in a row the column stands; None when the file has none."""
        return self._columns.index(column) if column in self._columns else None

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """Line number and cells of each row. Raises ConfigError for one with too many or too few."""
        for line in self._lines:
            cells = csv_cells(line, self._name)
            if len(cells) != len(self._columns):
                raise line_error(self._name, line[0], f"has {len(cells)} cells; the header has {len(self._columns)}")
            yield line[0], cells
