"""Traces of real traffic, read for replay: ``TraceFile`` gives ``TraceRow`` after ``TraceRow``."""

from headrace.bench.load.traces.reading import TraceFile as TraceFile
from headrace.bench.load.traces.row import TRACE_FORMATS as TRACE_FORMATS
from headrace.bench.load.traces.row import TraceFormat as TraceFormat
from headrace.bench.load.traces.row import TraceOptions as TraceOptions
from headrace.bench.load.traces.row import TraceRow as TraceRow
