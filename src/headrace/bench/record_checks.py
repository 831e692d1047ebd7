"""What a records file may say: its figures are made of it, and someone may have changed it by hand.

The file that a run wrote holds all of this; what does not is named before anything is computed from it.
"""

from __future__ import annotations

import math
from itertools import pairwise

from headrace.bench.planned import RIGHT_STATUSES, SloTarget
from headrace.bench.records import MOST_TOKENS, RequestRecord, RunInfo
from headrace.errors import ConfigError

MOST_INDEX = 100_000_000
"""The highest number of a request."""

_MOST_S = 366 * 86_400.0
_MOST_NS = round(_MOST_S * 1e9)
_MOST_REPORTED = 1_000_000_000  # of a count of anything but tokens
_TOKEN_FIELDS = ("input_tokens", "prompt_tokens", "cached_tokens", "wanted_output_tokens", "output_tokens")
_TIME_FIELDS = ("due_ns", "ready_ns", "sent_ns", "connected_ns", "headers_ns", "first_ns", "end_ns")
_SLO_NAMES = SloTarget.__struct_fields__


class IndexSet:
    """The requests' numbers that have been seen, a bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, index: int) -> bool:
        """Whether it is new. ``index`` is one that ``check_record`` let pass."""
        place, bit = index >> 3, 1 << (index & 7)
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1, 2 * len(self._bits)) - len(self._bits)))
        if self._bits[place] & bit:
            return False
        self._bits[place] |= bit
        return True


def check_info(info: RunInfo, where: str) -> None:
    """Raises ConfigError for facts that no run has."""
    for name in ("duration_s", "wall_s", "warmup_s"):
        _between(name, getattr(info, name), 0, _MOST_S, where)
    if info.concurrency is not None:
        _between("concurrency", info.concurrency, 1, _MOST_REPORTED, where)
    for name in ("cpu_share", "loop_lag_p99_s"):
        _between(f"health.{name}", getattr(info.health, name), 0, _MOST_S, where)
    _between("health.peak_in_flight", info.health.peak_in_flight, 0, _MOST_REPORTED, where)
    for class_name, bounds in info.slos.items():
        for name, bound_s in bounds.items():
            place = f"slos.{class_name[:60]}.{name[:60]}"
            if name not in _SLO_NAMES:
                raise ConfigError(f"{place!a}: unknown bound (there are {', '.join(_SLO_NAMES)})", where=where)
            if not 0 < bound_s <= _MOST_S:
                raise ConfigError(f"{place!a} is {bound_s:.6g}, not more than 0 s", where=where)


def check_record(record: RequestRecord, where: str) -> None:
    """Raises ConfigError for a record that contradicts itself or holds a number that no request has."""
    _between("index", record.index, 0, MOST_INDEX, where)
    for name in _TOKEN_FIELDS:
        if (tokens := getattr(record, name)) is not None:
            _between(name, tokens, 0, MOST_TOKENS, where)
    for name in _TIME_FIELDS:
        if (moment := getattr(record, name)) is not None:
            _between(name, moment, 0, _MOST_NS, where)
    _between("turn", record.turn, 0, _MOST_REPORTED, where)
    if record.user is not None:
        _between("user", record.user, 0, _MOST_REPORTED, where)
    if record.status is not None:
        _between("status", record.status, 100, 999, where)
    if record.retry_after_s is not None:
        _between("retry_after_s", record.retry_after_s, 0, math.inf, where)
    if record.malformed is not None and record.malformed not in RIGHT_STATUSES:
        message = f"malformed is {record.malformed[:60]!a}; the kinds are {', '.join(RIGHT_STATUSES)}"
        raise ConfigError(message, where=where)
    _check_order(record, where)
    _check_chunks(record, where)


def _check_order(record: RequestRecord, where: str) -> None:
    """Every moment that came lies after the ones before it."""
    if record.sent_ns is None:
        # Never sent: nothing came, and the end is only when that was clear.
        for name in ("connected_ns", "headers_ns", "first_ns"):
            if getattr(record, name) is not None:
                raise ConfigError(f"has {name} and no sent_ns", where=where)
        if record.chunk_ns:
            raise ConfigError("has chunk_ns and no sent_ns", where=where)
    moments = [("due_ns", record.due_ns), ("ready_ns", record.ready_ns)]
    if record.sent_ns is not None:
        later = [(name, getattr(record, name)) for name in ("sent_ns", "connected_ns", "headers_ns", "first_ns")]
        moments += [(name, moment) for name, moment in later if moment is not None]
        moments += [("chunk_ns", record.chunk_ns[-1])] if record.chunk_ns else []
        moments += [("end_ns", record.end_ns)] if record.end_ns is not None else []
    for (before, earlier), (after, moment) in pairwise(moments):
        if moment < earlier:
            raise ConfigError(f"{after} ({moment}) is before {before} ({earlier})", where=where)


def _check_chunks(record: RequestRecord, where: str) -> None:
    chunk_ns, chunk_tokens = record.chunk_ns, record.chunk_tokens
    if chunk_ns:
        if record.first_ns != chunk_ns[0]:
            raise ConfigError(f"first_ns is {record.first_ns}, the first of chunk_ns {chunk_ns[0]}", where=where)
        if any(later < earlier for earlier, later in pairwise(chunk_ns)):
            raise ConfigError("chunk_ns is not in ascending order", where=where)
        _between("chunk_ns", chunk_ns[-1], 0, _MOST_NS, where)
    if chunk_tokens:
        if len(chunk_tokens) != len(chunk_ns):
            message = f"has {len(chunk_ns)} chunks and chunk_tokens for {len(chunk_tokens)}"
            raise ConfigError(message, where=where)
        if min(chunk_tokens) < 0:
            raise ConfigError(f"chunk_tokens holds {min(chunk_tokens)}, less than 0", where=where)
        if sum(chunk_tokens) > record.output_tokens:
            message = f"chunk_tokens add up to {sum(chunk_tokens)}, output_tokens is {record.output_tokens}"
            raise ConfigError(message, where=where)


def _between(name: str, value: float, low: float, high: float, where: str) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {_shown(value)}, not from {low:g} to {high:g}", where=where)


def _shown(value: float) -> str:
    """Whole numbers of any size (a float would overflow), at most 30 characters of them."""
    text = hex(value) if isinstance(value, int) and abs(value) > 2**64 else str(value)
    return text if len(text) <= 30 else f"{text[:30]}..."
