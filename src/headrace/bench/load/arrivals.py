"""When requests are sent, from texts such as ``poisson(200)`` or ``ramp(1, 50, over=1m)``.

Rates are requests per second. The times of a run are computed before it from one random generator and are never
rescaled to hit a count or a rate: what a process draws is what is sent. ``ARRIVAL_FORMS`` lists the forms;
``inf`` as a rate, with ``count``, sends everything at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.bench.load.arrival_processes import MAX_ARRIVALS, Burst, Constant, Gamma, Poisson, Ramp
from headrace.bench.load.distribution_forms import Arguments, Form, Param, read_arguments
from headrace.bench.load.distribution_text import call_text
from headrace.bench.load.traces import TRACE_FORMATS, TraceFile, TraceFormat, TraceOptions
from headrace.bench.load.traces.row import DEFAULT_OPTIONS, MAX_SPEED, MAX_TRACE_S, MIN_SPEED

MAX_RATE_PER_S = 1e6
_LEAST_PERIOD_S = 0.001
_MAX_TIME_S = 1e7

_COUNT = Param("count", "whole", named=True, least=1, most=MAX_ARRIVALS)


def _rate(name: str = "rate", *, infinite: bool = False, above: bool = True) -> Param:
    return Param(name, "number", required=True, most=MAX_RATE_PER_S, above=above, infinite=infinite)


def _seconds(name: str, *, required: bool = False, least: float = _LEAST_PERIOD_S) -> Param:
    return Param(name, "duration", required=required, named=True, least=least, most=_MAX_TIME_S)


ARRIVAL_FORMS = (
    Form(
        "poisson",
        (_rate(infinite=True), _COUNT),
        "independent users: exponential gaps with this mean rate",
        "poisson(200)",
    ),
    Form(
        "constant",
        (_rate(infinite=True), _COUNT),
        "equal gaps, the first request at once",
        "constant(200)",
    ),
    Form(
        "gamma",
        (_rate(infinite=True), Param("shape", "number", required=True, least=0.01, most=1000), _COUNT),
        "gamma-distributed gaps; shape 1 is Poisson, below it burstier, above it more regular "
        "(the gaps' coefficient of variation is 1/sqrt(shape))",
        "gamma(10, shape=0.5)",
    ),
    Form(
        "ramp",
        (_rate("from", above=False), _rate("to", above=False), _seconds("over"), _COUNT),
        "Poisson whose rate goes linearly from one to the other over that time (the whole run when it is not "
        "given), and stays there",
        "ramp(1, 50, over=60)",
    ),
    Form(
        "burst",
        (
            _rate("base", above=False),
            _rate("peak"),
            _seconds("at", required=True, least=0),
            _seconds("length", required=True),
            _seconds("every"),
            _COUNT,
        ),
        "Poisson at the base rate, and at the peak rate from second 'at' on for 'length'; again every 'every'",
        "burst(10, 100, at=20, length=5)",
    ),
    Form(
        "closed",
        (
            Param("users", "whole", required=True, least=1, most=1_000_000),
            _seconds("think", least=0),
        ),
        "closed loop: so many users, each sending its next request 'think' seconds after the last one ended",
        "closed(32, think=1)",
    ),
    Form(
        "trace",
        (
            Param("file", "text", required=True),
            Param("format", "text", named=True, choices=TRACE_FORMATS),
            Param("speed", "number", named=True, least=MIN_SPEED, most=MAX_SPEED),
            Param("start", "duration", named=True, most=MAX_TRACE_S),
            Param("duration", "duration", named=True, most=MAX_TRACE_S, above=True),
            Param("limit", "whole", named=True, least=1, most=MAX_ARRIVALS),
            Param("max_input", "whole", named=True, least=1, most=1e8),
            Param("max_output", "whole", named=True, least=1, most=1e8),
            Param("empty", "text", named=True, choices=("skip", "keep")),
        ),
        "replay a trace (format by content): speed=2 halves the gaps, start and duration cut a window out of the "
        "trace's own time, longer lengths are cut to max_input and max_output, rows without tokens are skipped",
        "trace(conversation_trace.jsonl, speed=2)",
    ),
)
"""What ``parse_arrivals`` accepts; ``signature`` and ``summary`` are for ``--help`` and the docs."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``users`` users, each with one request at a time: the next one ``think_s`` after the last one ended."""

    users: int
    think_s: float = 0.0

    def describe(self) -> str:
        return call_text("closed", self.users, think=self.think_s or None)


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """The arrivals (and, with ``rows``, the lengths, prefixes and conversations) of a trace."""

    path: Path
    options: TraceOptions = DEFAULT_OPTIONS

    def rows(self) -> TraceFile:
        """The trace, to iterate over; every iteration reads the file anew."""
        return TraceFile(self.path, self.options)

    def times_ns(self, rng: np.random.Generator, duration_s: float) -> NDArray[np.int64]:
        """The rows' times that lie in the run. ``rng`` is not used: a trace is what happened."""
        end_ns = round(duration_s * 1e9)
        times: list[int] = []
        for row in self.rows():
            if row.at_ns >= end_ns:
                break
            times.append(row.at_ns)
        return np.array(times, dtype=np.int64)

    def rows_without_tokens(self, duration_s: float) -> int:
        """How many rows without input or output tokens the trace has in the run (``TraceOptions.keep_empty``)."""
        end_ns = round(duration_s * 1e9)
        rows = self.rows()
        empty = 0
        for row in rows:
            if row.at_ns >= end_ns:
                break
            empty = rows.empty_rows
        else:
            empty = rows.empty_rows
        return empty

    def describe(self) -> str:
        options = self.options
        return call_text(
            "trace",
            str(self.path),
            format=options.format,
            speed=None if options.speed == 1 else options.speed,
            start=options.start_s or None,
            duration=options.duration_s,
            limit=options.limit,
            max_input=options.max_input_tokens,
            max_output=options.max_output_tokens,
            empty="keep" if options.keep_empty else None,
        )


OpenArrivals = Constant | Poisson | Gamma | Ramp | Burst | TraceReplay
"""Requests are sent when their time comes, whatever became of earlier ones."""
Arrivals = OpenArrivals | ClosedLoop


def parse_arrivals(text: str, *, folder: Path | None = None, where: str = "") -> Arrivals:
    """The arrivals that ``text`` names (``ARRIVAL_FORMS``).

    ``folder`` is what a relative trace file is relative to (the working directory when it is None); a trace is
    opened when its times or rows are asked for, not here. ``where`` says in an error where the text stood.
    Raises ConfigError.
    """
    arguments = read_arguments(text, ARRIVAL_FORMS, where=where)
    match arguments.form.name:
        case "closed":
            return ClosedLoop(arguments.whole("users"), arguments.optional_number("think") or 0.0)
        case "trace":
            return _trace(arguments, folder)
        case "ramp":
            return _ramp(arguments)
        case "burst":
            return _burst(arguments)
        case name:
            return _steady(name, arguments)


def _steady(name: str, arguments: Arguments) -> Constant | Poisson | Gamma:
    rate, count = arguments.number("rate"), arguments.optional_whole("count")
    if rate == inf and count is None:
        raise arguments.error("an infinite rate needs a count, such as count=1000")
    if name == "constant":
        return Constant(rate, count)
    if name == "poisson":
        return Poisson(rate, count)
    return Gamma(rate, arguments.number("shape"), count)


def _ramp(arguments: Arguments) -> Ramp:
    first, last = arguments.number("from"), arguments.number("to")
    if first == last == 0:
        raise arguments.error("from and to are both 0, so nothing is ever sent")
    return Ramp(first, last, arguments.optional_number("over"), arguments.optional_whole("count"))


def _burst(arguments: Arguments) -> Burst:
    length_s, every_s = arguments.number("length"), arguments.optional_number("every")
    if every_s is not None and every_s < length_s:
        raise arguments.error(f"every={every_s:g} is shorter than length={length_s:g}, so bursts would overlap")
    return Burst(
        arguments.number("base"),
        arguments.number("peak"),
        arguments.number("at"),
        length_s,
        every_s,
        arguments.optional_whole("count"),
    )


def _trace(arguments: Arguments, folder: Path | None) -> TraceReplay:
    path = Path(arguments.text("file"))
    speed, file_format = arguments.optional_number("speed"), arguments.optional_text("format")
    formats: dict[str, TraceFormat] = {name: name for name in TRACE_FORMATS}
    options = TraceOptions(
        format=None if file_format is None else formats[file_format],
        speed=1.0 if speed is None else speed,
        start_s=arguments.optional_number("start") or 0.0,
        duration_s=arguments.optional_number("duration"),
        limit=arguments.optional_whole("limit"),
        max_input_tokens=arguments.optional_whole("max_input"),
        max_output_tokens=arguments.optional_whole("max_output"),
        keep_empty=arguments.optional_text("empty") == "keep",
    )
    return TraceReplay(path if folder is None else folder / path, options)
