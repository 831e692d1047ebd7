"""The file formats: each reader turns lines into ``TraceLine``, one by one.

======== ===== ================================================================================================
azure    CSV   ``TIMESTAMP`` (a date with up to 9 decimals), ``ContextTokens``, ``GeneratedTokens``
mooncake JSONL ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (512 tokens a block)
burstgpt CSV   ``Timestamp`` (s), ``Request tokens``, ``Response tokens``; ``Log Type`` and ``Session ID`` if there
bailian  JSONL ``chat_id``, ``parent_chat_id`` (-1: none), ``timestamp`` (s), ``input_length``,
               ``output_length``, ``type``, ``turn`` (from 1), ``hash_ids`` (16 tokens a block)
headrace JSONL ``at_s``, ``input_tokens``, ``output_tokens``; optional ``class``, ``lane``, ``session``,
               ``turn`` (from 0), ``hash_ids``, ``block_tokens`` (512), ``headers``; nothing else
======== ===== ================================================================================================

Fields that a foreign format has beyond these are passed over. Errors name file, line and what was wrong.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from headrace.bench.load.traces.conversations import Ties
from headrace.bench.load.traces.lines import CsvTable, Line, csv_cells, line_error
from headrace.bench.load.traces.row import MAX_TRACE_S, TRACE_FORMATS, TraceFormat

MAX_TOKENS = 100_000_000
_UNTIED = Ties()


class TraceLine(Struct, frozen=True):
    """A row as its file has it: ``time_ns`` counts from the trace's own time 0; tokens may be 0."""

    number: int
    time_ns: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    ties: Ties = _UNTIED
    lane: str | None = None
    class_name: str | None = None
    headers: dict[str, str] = {}


Reader = Callable[[Iterator[Line], str], Iterator[TraceLine]]
"""From a file's lines, from the first one on, and the file's name."""


def detect(first: Line, name: str) -> TraceFormat:
    """The format whose fields the first line has. Raises ConfigError when it is none."""
    if first[1].startswith(b"{"):
        document = _decode(_ANY_OBJECT, first, name)
        fields = set(document)
        if "at_s" in fields:
            return "headrace"
        if {"chat_id", "timestamp"} <= fields:
            return "bailian"
        if {"timestamp", "input_length"} <= fields:
            return "mooncake"
    else:
        fields = {cell.strip() for cell in csv_cells(first, name)}
        if set(_AZURE_COLUMNS) <= fields:
            return "azure"
        if set(_BURSTGPT_COLUMNS) <= fields:
            return "burstgpt"
    shown = ", ".join(sorted(fields))[:200]
    raise line_error(name, first[0], f"has the fields {shown}: no trace format of {', '.join(TRACE_FORMATS)}")


# -- CSV ---------------------------------------------------------------------------------------------------

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def _read_azure(lines: Iterator[Line], name: str) -> Iterator[TraceLine]:
    table = CsvTable(lines, name, _AZURE_COLUMNS)
    at, context, generated = (_place(table, column) for column in _AZURE_COLUMNS)
    zero_ns: int | None = None
    for number, cells in table.rows():
        date_ns = _date_ns(cells[at], name, number)
        zero_ns = date_ns if zero_ns is None else zero_ns
        inputs = _tokens(cells[context], "ContextTokens", name, number)
        outputs = _tokens(cells[generated], "GeneratedTokens", name, number)
        yield TraceLine(number, date_ns - zero_ns, inputs, outputs)


def _read_burstgpt(lines: Iterator[Line], name: str) -> Iterator[TraceLine]:
    table = CsvTable(lines, name, _BURSTGPT_COLUMNS)
    at, request, response = (_place(table, column) for column in _BURSTGPT_COLUMNS)
    log_type, session = table.index("Log Type"), table.index("Session ID")
    for number, cells in table.rows():
        inputs = _tokens(cells[request], "Request tokens", name, number)
        outputs = _tokens(cells[response], "Response tokens", name, number)
        conversation = None if session is None else cells[session].strip() or None
        class_name = None if log_type is None else cells[log_type].strip() or None
        yield TraceLine(
            number,
            _seconds_ns(cells[at], name, number),
            inputs,
            outputs,
            ties=_UNTIED if conversation is None else Ties(session=conversation),
            class_name=class_name,
        )


def _place(table: CsvTable, column: str) -> int:
    index = table.index(column)
    assert index is not None, column
    return index


def _tokens(cell: str, column: str, name: str, number: int) -> int:
    text = cell.strip()
    if not text.isdecimal() or len(text) > 9 or int(text) > MAX_TOKENS:
        raise line_error(name, number, f"{column} is {cell[:60]!r}; it must be a whole number from 0 to {MAX_TOKENS}")
    return int(text)


def _seconds_ns(cell: str, name: str, number: int) -> int:
    try:
        seconds = float(cell)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_TRACE_S:
        raise line_error(name, number, f"Timestamp is {cell[:60]!r}; it must be seconds from 0 to {MAX_TRACE_S:g}")
    return round(seconds * 1e9)


_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


def _date_ns(cell: str, name: str, number: int) -> int:
    """Nanoseconds since 1970; a date without a zone counts as UTC."""
    match = _DATE.fullmatch(cell.strip())
    try:
        if match is None:
            raise ValueError("not a date")
        date = datetime.fromisoformat(match.group(1) + (match.group(3) or "+00:00"))
    except ValueError:
        example = "2023-11-16 18:15:46.6805900"
        raise line_error(name, number, f"TIMESTAMP is {cell[:60]!r}; it must be a date such as {example}") from None
    since = date - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + int((match.group(2) or "").ljust(9, "0"))


# -- JSON lines --------------------------------------------------------------------------------------------

_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Seconds = Annotated[float, Meta(ge=0, le=MAX_TRACE_S)]
_Id = int | str
_HashIds = tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...]


class _MooncakeLine(Struct):
    timestamp: Annotated[float, Meta(ge=0, le=MAX_TRACE_S * 1000)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: _HashIds = ()


class _BailianLine(Struct):
    chat_id: _Id
    timestamp: _Seconds
    input_length: _Tokens
    output_length: _Tokens
    parent_chat_id: _Id | None = None
    type: str | None = None
    turn: Annotated[int, Meta(ge=1)] = 1
    hash_ids: _HashIds = ()


class _HeadraceLine(Struct, forbid_unknown_fields=True):
    at_s: _Seconds
    input_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    class_name: str | None = field(default=None, name="class")
    lane: str | None = None
    session: str | None = None
    turn: Annotated[int, Meta(ge=0)] | None = None
    hash_ids: _HashIds = ()
    block_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 512
    headers: dict[str, str] = {}


_ANY_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _read_mooncake(lines: Iterator[Line], name: str) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for line in lines:
        row = _decode(decoder, line, name)
        time_ns = round(row.timestamp * 1e6)
        yield TraceLine(line[0], time_ns, row.input_length, row.output_length, row.hash_ids, 512)


def _read_bailian(lines: Iterator[Line], name: str) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(_BailianLine)
    for line in lines:
        row = _decode(decoder, line, name)
        parent = None if row.parent_chat_id in {None, -1, "-1"} else str(row.parent_chat_id)
        yield TraceLine(
            line[0],
            round(row.timestamp * 1e9),
            row.input_length,
            row.output_length,
            row.hash_ids,
            16,
            Ties(key=str(row.chat_id), parent_key=parent, turn=row.turn - 1),
            class_name=row.type,
        )


def _read_headrace(lines: Iterator[Line], name: str) -> Iterator[TraceLine]:
    decoder = msgspec.json.Decoder(_HeadraceLine)
    for line in lines:
        row = _decode(decoder, line, name)
        if row.turn is not None and row.session is None:
            raise line_error(name, line[0], "has a turn without a session")
        yield TraceLine(
            line[0],
            round(row.at_s * 1e9),
            row.input_tokens,
            row.output_tokens,
            row.hash_ids,
            row.block_tokens,
            _UNTIED if row.session is None else Ties(session=row.session, turn=row.turn),
            row.lane,
            row.class_name,
            row.headers,
        )


_Row = TypeVar("_Row")


def _decode(decoder: msgspec.json.Decoder[_Row], line: Line, name: str) -> _Row:
    try:
        return decoder.decode(line[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise line_error(name, line[0], f"{error}{_hint(str(error))}") from error


def _hint(problem: str) -> str:
    """The nearest right name, when the problem is an unknown field of our own format."""
    match = re.search(r"unknown field `(.*?)`", problem)
    if match is None:
        return ""
    known = list(msgspec.structs.fields(_HeadraceLine))
    names = [item.encode_name for item in known]
    near = difflib.get_close_matches(match.group(1)[:64], names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(names)})"


READERS: dict[TraceFormat, Reader] = {
    "azure": _read_azure,
    "mooncake": _read_mooncake,
    "burstgpt": _read_burstgpt,
    "bailian": _read_bailian,
    "headrace": _read_headrace,
}
