"""Reading a trace: from a file to the rows to replay, one by one.

A file is read once, from front to back, and never held whole; what is kept is one entry per conversation turn
(Bailian) or conversation (BurstGPT with sessions, our own) to find each turn's parent.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from headrace.bench.load.request_fields import header_problem, header_text_problem
from headrace.bench.load.traces.conversations import Conversations
from headrace.bench.load.traces.formats import READERS, TraceLine, detect
from headrace.bench.load.traces.lines import line_error, numbered_lines
from headrace.bench.load.traces.row import DEFAULT_OPTIONS, TraceFormat, TraceOptions, TraceRow
from headrace.errors import ConfigError


class TraceFile:
    """A trace to replay: iterating reads the file once and gives its rows in order of time.

    Raises ConfigError, naming file and line, when the file cannot be read, its format is not recognised, a line is
    malformed, or time goes back from one line to the next.
    """

    def __init__(self, path: Path, options: TraceOptions = DEFAULT_OPTIONS) -> None:
        self.path = path
        self.options = options
        self.format: TraceFormat | None = options.format
        """The format, known once reading has begun."""
        self.empty_rows = 0
        """Rows of the last reading that had no input or no output tokens: passed over, or kept as 1 token."""

    def __iter__(self) -> Iterator[TraceRow]:
        name = str(self.path)
        self.empty_rows = 0
        try:
            with _open(self.path) as file:
                lines = numbered_lines(file, name)
                first = next(lines, None)
                if first is None:
                    raise ConfigError("is empty; a trace has a request a line", where=name)
                self.format = self.options.format or detect(first, name)
                yield from self._rows(READERS[self.format](chain([first], lines), name))
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror or error}", where=name) from error

    def _rows(self, lines: Iterator[TraceLine]) -> Iterator[TraceRow]:
        """The rows of the window, with their conversations and with the options applied."""
        options = self.options
        start_ns = round(options.start_s * 1e9)
        end_ns = None if options.duration_s is None else start_ns + round(options.duration_s * 1e9)
        conversations = Conversations()
        latest_ns = 0
        count = 0
        for line in lines:
            if line.time_ns < latest_ns:
                back_s = (latest_ns - line.time_ns) / 1e9
                raise line_error(
                    str(self.path), line.number, f"goes back in time by {back_s:g} s; sort the file by time"
                )
            latest_ns = line.time_ns
            if end_ns is not None and line.time_ns >= end_ns:
                return
            replayed = line.time_ns >= start_ns and self._has_tokens(line)
            before = conversations.before(line.ties)
            place = conversations.add(line.ties, count if replayed else None)
            if not replayed:
                continue
            _check_headers(line, None if place is None else place.session, str(self.path))
            count += 1
            inputs = _capped(line.input_tokens, options.max_input_tokens)
            yield TraceRow(
                at_ns=_scaled(line.time_ns - start_ns, options.speed),
                input_tokens=inputs,
                output_tokens=_capped(line.output_tokens, options.max_output_tokens),
                # Ids of blocks that lie wholly behind the prompt's end are nothing that it begins with.
                hash_ids=line.hash_ids[: -(-inputs // line.block_tokens)] if line.hash_ids else (),
                block_tokens=line.block_tokens if line.hash_ids else 0,
                session=None if place is None else place.session,
                turn=0 if place is None else place.turn,
                parent=None if before is None else before.row,
                lane=line.lane,
                class_name=line.class_name,
                headers=line.headers,
            )
            if count == options.limit:
                return

    def _has_tokens(self, line: TraceLine) -> bool:
        """Whether the row is replayed as far as its token counts go; counts those that are empty."""
        if line.input_tokens and line.output_tokens:
            return True
        self.empty_rows += 1
        return self.options.keep_empty


def _check_headers(line: TraceLine, session: str | None, name: str) -> None:
    """What a request's headers will hold: its lane, its conversation's name, the line's own headers."""
    for what, text in (("lane", line.lane), ("session", session)):
        if text is not None and (problem := header_text_problem(text)):
            raise line_error(name, line.number, f"the {what} {text[:60]!a} is {problem}")
    for header, text in line.headers.items():
        if problem := header_problem(header, text):
            raise line_error(name, line.number, f"headers: {problem}")


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise ConfigError(f"is no file name: {error}", where=repr(str(path))) from error


def _capped(tokens: int, most: int | None) -> int:
    return max(tokens if most is None else min(tokens, most), 1)


def _scaled(time_ns: int, speed: float) -> int:
    return time_ns if speed == 1 else round(time_ns / speed)
