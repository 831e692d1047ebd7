"""The records file: JSON lines, the run's facts first, then a record for each request as it ended.

It is written while the run goes on, by a thread, so that a slow disk does not hold the event loop and a killed run
leaves what it had. The first line is written at the start, padded with blanks, and once more at the end with what
is known only then (``wall_s``, ``health``): in the file of a run that was killed ``wall_s`` is 0.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from headrace.bench.record_checks import IndexSet, check_info, check_record
from headrace.bench.records import RequestRecord, RunInfo
from headrace.errors import ConfigError

_FLUSH_S = 0.5
_PADDING_BYTES = 1024


@dataclass(frozen=True)
class RunResult:
    """A run: its facts, its records, and what should be said about them (sentences)."""

    info: RunInfo
    records: list[RequestRecord]
    warnings: list[str] = field(default_factory=list)


class RecordsNotWritten(ConfigError):
    """A run ended, but its records are not all in their file (a full disk). ``result`` still has them."""

    def __init__(self, error: ConfigError, result: RunResult) -> None:
        super().__init__(str(error))
        self.result = result


class RecordWriter:
    """Writes one file; use as a context manager. An existing file is replaced.

    Raises ConfigError when the file cannot be made; what goes wrong with it later (a full disk) is raised by
    ``finish``, so that the run is not lost with it.
    """

    def __init__(self, path: Path, info: RunInfo) -> None:
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        first = self._encode(info)
        self._first_bytes = len(first) + _PADDING_BYTES
        try:
            self._file: BinaryIO = path.open("wb", buffering=0)
            self._file.write(first.ljust(self._first_bytes) + b"\n")
        except OSError as error:
            raise self._error(error) from error
        self._records: queue.SimpleQueue[RequestRecord | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._failure: OSError | None = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="bench-records", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._file.close()

    def write(self, record: RequestRecord) -> None:
        """Add a record, which does not change any more. Does not wait."""
        self._records.put(record)

    def finish(self, info: RunInfo) -> None:
        """Everything is written; ``info`` replaces the first line. Raises ConfigError for what went wrong."""
        self._stop()
        if self._failure is not None:
            raise self._error(self._failure) from self._failure
        first = self._encode(info)
        try:
            if len(first) <= self._first_bytes:
                self._file.seek(0)
                self._file.write(first.ljust(self._first_bytes) + b"\n")
            else:
                self._rewrite(first)
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._error(error) from error

    def _rewrite(self, first: bytes) -> None:
        """The first line outgrew its room: a new file takes this one's place."""
        new_path = self._path.with_name(self._path.name + ".new")
        with self._path.open("rb") as old, new_path.open("wb") as new:
            old.readline()
            new.write(first + b"\n")
            while piece := old.read(1 << 20):
                new.write(piece)
        new_path.replace(self._path)

    def _stop(self) -> None:
        if self._thread is not None:
            self._records.put(None)
            self._stopping.set()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        """The thread's life: what has come since the last time is one write."""
        ended = False
        while not ended:
            records = [self._records.get()]
            self._stopping.wait(_FLUSH_S)
            while not self._records.empty():
                records.append(self._records.get())
            ended = records[-1] is None
            self._append(b"".join([self._encode(record) + b"\n" for record in records if record is not None]))

    def _append(self, data: bytes) -> None:
        if self._failure is not None:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._failure = error

    def _error(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot be written: {error.strerror or error}", where=str(self._path))


def read_run(path: Path) -> RunResult:
    """A whole records file. A last line that was cut (the writer was killed) is left out with a warning.

    Raises ConfigError, with the line's number, for everything else that is not a records file.
    """
    warnings: list[str] = []
    info = read_info(path)
    if info.wall_s == 0:
        warnings.append(f"{path}: the run that wrote this file did not end: its health is not known")
    return RunResult(info, list(read_records(path, warnings.append)), warnings)


def read_info(path: Path) -> RunInfo:
    """The run's facts, from the first line. Raises ConfigError when the file cannot be read or has none."""
    with _opened(path) as lines:
        first = lines.readline()
    if not first.strip():
        raise ConfigError("is empty; the first line of a records file holds the run's facts", where=str(path))
    try:
        info = msgspec.json.decode(first, type=RunInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"is not the facts of a run ({error}); is this a file that `headrace bench run` wrote?"
        raise ConfigError(message, where=f"{path}:1") from error
    check_info(info, f"{path}:1")
    return info


def read_records(path: Path, warn: Callable[[str], None]) -> Iterator[RequestRecord]:
    """The records one after the other, so that a file larger than memory can be gone through.

    ``warn`` gets a sentence when the last line was cut. Raises ConfigError, with the line's number, for any
    other line that is no record, for a record that cannot be (``record_checks``), and for a request's second one.
    """
    decode = msgspec.json.Decoder(RequestRecord).decode
    seen = IndexSet()
    with _opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1 or not line.strip():
                continue
            try:
                record = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    warn(f"{path}:{number}: the last line was cut and is left out")
                    return
                raise ConfigError(f"is not a request's record: {error}", where=f"{path}:{number}") from error
            check_record(record, f"{path}:{number}")
            if not seen.add(record.index):
                raise ConfigError(f"is a second record of request {record.index}", where=f"{path}:{number}")
            yield record


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as lines:
            yield lines
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
