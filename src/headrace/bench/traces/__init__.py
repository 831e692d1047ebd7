"""Traces of real traffic, read for replay: ``TraceFile`` gives ``TraceRow`` after ``TraceRow``."""

from headrace.bench.traces.reading import TraceFile as TraceFile
from headrace.bench.traces.row import TRACE_FORMATS as TRACE_FORMATS
from headrace.bench.traces.row import TraceFormat as TraceFormat
from headrace.bench.traces.row import TraceOptions as TraceOptions
from headrace.bench.traces.row import TraceRow as TraceRow
