"""Reading tables of measurements, each error with its file and line."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.errors import ConfigError


def csv_rows(path: Path, numbers: Sequence[str], texts: Sequence[str] = ()) -> Iterator[tuple[list[float], list[str]]]:
    """Each line's ``numbers`` and ``texts``, by the names of its columns. Raises ConfigError."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in (*numbers, *texts) if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(f"{path}: the column {missing[0]!r} is missing")
            for row in reader:
                try:
                    values = [float(row[name]) for name in numbers]
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error
                yield values, [row[name] or "" for name in texts]
    except (OSError, UnicodeError, csv.Error) as error:
        raise ConfigError(f"the table {path} cannot be read: {error}") from error
