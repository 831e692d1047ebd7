"""A run's records as columns of numbers, so that a million of them are summarised at array speed.

Every record is looked at once (``latencies`` and ``judge`` decide what it says); afterwards a figure of a lane
is a mask and a few array operations. Chunks of all requests lie in one flat array, request after request.
Illegal requests are only counted: they have no latency and no SLO.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.bench.planned import SloTarget
from headrace.bench.records import GENERATOR_FAULT, Outcome, RequestRecord, RunInfo
from headrace.bench.results.judge import LATE_REASONS, RefusalVerdict, drained_from_ns, judge, judge_refusal
from headrace.bench.results.latencies import latencies
from headrace.bench.statistics.quantiles import FloatArray
from headrace.errors import ConfigError

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

OUTCOMES: tuple[str, ...] = get_args(Outcome)
REASONS: tuple[str, ...] = LATE_REASONS + tuple(name for name in OUTCOMES if name != "ok")
_OUTCOME_IDS = {name: position for position, name in enumerate(OUTCOMES)}
_REASON_BITS = {name: 1 << position for position, name in enumerate(REASONS)}
_NO_NUMBER = float("nan")
_ERROR_CHARS = 200
"""How much of a server's error text is kept."""

FLOAT_COLUMNS = (
    "due_s",
    "sent_s",
    "first_s",
    "end_s",
    "send_lag_s",
    "ttft_s",
    "ttft_from_due_s",
    "tpot_s",
    "ntpot_s",
    "e2e_s",
    "e2e_from_due_s",
)


@dataclass(frozen=True)
class Columns:
    """The legal requests of a run in order of due time, and the count of what became of the illegal ones.

    ``times[name]`` is one of ``FLOAT_COLUMNS``, in seconds, NaN where a request has no such figure.
    ``info`` is that of the run, but of a run that did not end ``duration_s`` is how far its records reach.
    ``reasons`` has one bit per entry of ``REASONS``. ``input_tokens`` is the server's count, else the plan's.
    ``chunk_ns[chunk_starts[i]:chunk_starts[i + 1]]`` are the times of request i's content chunks,
    ``chunk_tokens`` the tokens in them; None: one each, because no server answer said otherwise.
    """

    info: RunInfo
    lanes: tuple[str, ...]
    classes: tuple[str, ...]
    lane_ids: IntArray
    class_ids: IntArray
    index: IntArray
    outcome_ids: IntArray
    times: dict[str, FloatArray]
    offered: BoolArray
    good: BoolArray
    good_from_due: BoolArray
    reasons: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    usage_seen: BoolArray
    served_elsewhere: BoolArray
    chunk_ns: IntArray
    chunk_starts: IntArray
    chunk_tokens: IntArray | None
    refusals: dict[tuple[str, RefusalVerdict, int | None], int] = field(default_factory=dict)
    """Illegal requests by kind, verdict and status."""
    illegal_due_s: FloatArray = field(default_factory=lambda: np.empty(0))
    illegal_send_lag_s: FloatArray = field(default_factory=lambda: np.empty(0))
    """Of the illegal requests that were sent: what the generator did is its doing with them too."""
    own_failures: tuple[int, str] = (0, "")
    """Requests that failed because of the generator's machine, and what one of them said."""
    failures: dict[tuple[str, int | None, str], int] = field(default_factory=dict)
    """Legal requests that were not answered whole, by outcome, status and the beginning of the error's text."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def measured(self) -> BoolArray:
        """Requests due in the measured window: after the warm-up, not after the load's end."""
        due_s = self.times["due_s"]
        inside: BoolArray = (due_s >= self.info.warmup_s) & (due_s <= self.info.duration_s)
        return inside

    @property
    def send_lags_s(self) -> FloatArray:
        """The send lags of all requests due in the measured window that were sent, legal or not."""
        lags_s = self.times["send_lag_s"][self.measured]
        illegal = (self.illegal_due_s >= self.info.warmup_s) & (self.illegal_due_s <= self.info.duration_s)
        return np.concatenate((lags_s[~np.isnan(lags_s)], self.illegal_send_lag_s[illegal]))

    @property
    def answered(self) -> BoolArray:
        """Requests that were answered whole, with something in the answer."""
        whole: BoolArray = self.outcome("ok") & ~np.isnan(self.times["first_s"])
        return whole

    def outcome(self, name: str) -> BoolArray:
        """Requests with this outcome."""
        having: BoolArray = self.outcome_ids == _OUTCOME_IDS[name]
        return having

    def lane(self, name: str) -> BoolArray:
        """Requests of this lane."""
        members: BoolArray = self.lane_ids == self.lanes.index(name)
        return members


def lane_of(record: RequestRecord) -> str:
    """The lane that a request counts for: the one it asked for, else its class, which then is its own lane.

    Never the lane that the server says it was served in: a request that got no answer has none, and would
    leave its lane's misses.
    """
    return record.class_name if record.lane is None else record.lane


def build_columns(info: RunInfo, records: Iterable[RequestRecord]) -> Columns:
    """Read every record once. They may come in any order.

    Raises ConfigError for a record that contradicts itself, and for SLOs that have unknown fields.
    """
    drained_ns = drained_from_ns(info)
    slos = {name: _slo(name, bounds) for name, bounds in info.slos.items()}
    lanes: dict[str, int] = {}
    classes: dict[str, int] = {}
    integers = {name: array("q") for name in ("lane", "class", "index", "outcome", "reasons", "in", "out", "chunks")}
    floats = {name: array("d") for name in FLOAT_COLUMNS}
    flags = {name: bytearray() for name in ("offered", "good", "good_from_due", "usage", "elsewhere")}
    chunk_ns, chunk_tokens = array("q"), _ChunkTokens()
    refusals: Counter[tuple[str, RefusalVerdict, int | None]] = Counter()
    failures: Counter[tuple[str, int | None, str]] = Counter()
    illegal_due_s, illegal_lag_s = array("d"), array("d")
    own_failures, example = 0, ""
    last_ns = 0
    for record in records:
        last_ns = max(last_ns, record.due_ns, record.sent_ns or 0, record.end_ns or 0)
        if record.error is not None and record.error.startswith(GENERATOR_FAULT):
            own_failures += 1
            example = example or record.error.removeprefix(GENERATOR_FAULT)
        if record.malformed is not None:
            refusals[record.malformed, judge_refusal(record), record.status] += 1
            if record.sent_ns is not None:
                illegal_due_s.append(record.due_ns / 1e9)
                illegal_lag_s.append((record.sent_ns - record.ready_ns) / 1e9)
            continue
        slo = slos.get(record.class_name)
        judgement = judge(record, slo, drained_ns=drained_ns)
        lane = lane_of(record)
        integers["lane"].append(lanes.setdefault(lane, len(lanes)))
        integers["class"].append(classes.setdefault(record.class_name, len(classes)))
        integers["index"].append(record.index)
        integers["outcome"].append(_OUTCOME_IDS[record.outcome])
        integers["reasons"].append(sum([_REASON_BITS[reason] for reason in judgement.reasons]))
        integers["in"].append(record.input_tokens if record.prompt_tokens is None else record.prompt_tokens)
        integers["out"].append(record.output_tokens)
        integers["chunks"].append(len(record.chunk_ns))
        times = latencies(record)
        floats["due_s"].append(record.due_ns / 1e9)
        floats["sent_s"].append(_seconds(record.sent_ns))
        floats["first_s"].append(_seconds(record.first_ns))
        floats["end_s"].append(_seconds(record.end_ns))
        for name, value in zip(times._fields, times, strict=True):
            floats[name].append(_NO_NUMBER if value is None else value)
        flags["offered"].append(judgement.verdict != "not_offered")
        flags["good"].append(judgement.verdict == "good")
        flags["good_from_due"].append(judge(record, slo, "due", drained_ns=drained_ns).verdict == "good")
        flags["usage"].append(record.usage_seen)
        flags["elsewhere"].append(record.served_lane not in (None, lane) and record.lane is not None)
        chunk_ns.extend(record.chunk_ns)
        chunk_tokens.extend(record)
        if record.outcome != "ok":
            failures[record.outcome, record.status, (record.error or "")[:_ERROR_CHARS]] += 1
    return _in_due_order(
        Columns(
            info=_as_far_as_it_went(info, last_ns),
            lanes=tuple(lanes),
            classes=tuple(classes),
            lane_ids=_integers(integers["lane"]),
            class_ids=_integers(integers["class"]),
            index=_integers(integers["index"]),
            outcome_ids=_integers(integers["outcome"]),
            times={name: np.frombuffer(values, dtype=np.float64) for name, values in floats.items()},
            offered=_flags(flags["offered"]),
            good=_flags(flags["good"]),
            good_from_due=_flags(flags["good_from_due"]),
            reasons=_integers(integers["reasons"]),
            input_tokens=_integers(integers["in"]),
            output_tokens=_integers(integers["out"]),
            usage_seen=_flags(flags["usage"]),
            served_elsewhere=_flags(flags["elsewhere"]),
            chunk_ns=_integers(chunk_ns),
            chunk_starts=np.concatenate(([0], np.cumsum(_integers(integers["chunks"])))).astype(np.int64),
            chunk_tokens=chunk_tokens.column(),
            refusals=dict(refusals),
            illegal_due_s=np.frombuffer(illegal_due_s, dtype=np.float64),
            illegal_send_lag_s=np.frombuffer(illegal_lag_s, dtype=np.float64),
            own_failures=(own_failures, example),
            failures=dict(failures),
        )
    )


def _as_far_as_it_went(info: RunInfo, last_ns: int) -> RunInfo:
    """A run that did not end (its process was killed) offered load until its last record and not for the time that
    was planned: rates over the whole of that would be too low."""
    if info.wall_s != 0 or not 0 < last_ns / 1e9 < info.duration_s:
        return info
    return msgspec.structs.replace(info, duration_s=last_ns / 1e9)


def gaps_s(columns: Columns, chosen: BoolArray) -> tuple[FloatArray, IntArray]:
    """The pooled gaps between tokens (ITL) of the chosen requests, and the first position of each one's gaps.

    A chunk of k tokens is k tokens at one time: the gap before it belongs to the first of them, the others
    have gaps of 0. A chunk that the server counts 0 tokens for is none, and the gap goes on past it.
    Requests without a gap have no entry in the second array.
    """
    sizes = np.diff(columns.chunk_starts)
    in_chosen = np.repeat(chosen, sizes)
    times_ns = columns.chunk_ns[in_chosen]
    tokens = sizes[chosen]
    if columns.chunk_tokens is not None:
        per_chunk = columns.chunk_tokens[in_chosen]
        owner = np.repeat(np.arange(len(tokens)), tokens)
        tokens = np.bincount(owner, weights=per_chunk, minlength=len(tokens)).astype(np.int64)
        times_ns = np.repeat(times_ns, per_chunk)
    tokens = tokens[tokens > 0]
    if not len(tokens):
        return np.empty(0), np.empty(0, dtype=np.int64)
    gaps = np.diff(times_ns)
    within = np.ones(len(gaps), dtype=np.bool_)
    within[np.cumsum(tokens)[:-1] - 1] = False  # from one request's last token to the next one's first
    counts = tokens[tokens > 1] - 1
    starts = np.cumsum(counts) - counts
    return gaps[within] / 1e9, starts


def chunk_weights(columns: Columns) -> FloatArray:
    """How many output tokens each chunk stands for: a request's tokens, spread over its chunks as far as the
    server said (evenly where it did not), so that the chunks of a request add up to its output tokens."""
    sizes = np.diff(columns.chunk_starts)
    owner = np.repeat(np.arange(len(columns)), sizes)
    raw = np.ones(len(owner)) if columns.chunk_tokens is None else columns.chunk_tokens.astype(np.float64)
    totals = np.bincount(owner, weights=raw, minlength=len(columns))
    scale = np.divide(columns.output_tokens, totals, out=np.zeros(len(columns)), where=totals > 0)
    weights: FloatArray = raw * scale[owner]
    return weights


MOST_TOKENS_APART = 100_000_000
"""Gaps are made for each token, in memory (8 bytes and their copies). Of a run with more tokens than this in its
chunks a chunk counts as one token among the gaps; the counts of the answers stay what they are."""


class _ChunkTokens:
    """Tokens per chunk, kept only once some record says so: most servers send one token a chunk and no count."""

    def __init__(self) -> None:
        self._tokens: array[int] | None = None
        self._chunks = 0
        self._sum = 0

    def extend(self, record: RequestRecord) -> None:
        chunks = len(record.chunk_ns)
        if record.chunk_tokens:
            if len(record.chunk_tokens) != chunks:
                raise ConfigError(
                    f"request {record.index} has {chunks} chunks and token counts for {len(record.chunk_tokens)}",
                    where="chunk_tokens",
                )
            if min(record.chunk_tokens) < 0:
                raise ConfigError(f"request {record.index} has a chunk of less than 0 tokens", where="chunk_tokens")
            if self._tokens is None:
                self._tokens = array("q", [1]) * self._chunks
            self._tokens.extend(record.chunk_tokens)
            self._sum += sum(record.chunk_tokens)
        elif self._tokens is not None:
            self._tokens.extend([1] * chunks)
        self._chunks += chunks

    def column(self) -> IntArray | None:
        return None if self._tokens is None or self._sum > MOST_TOKENS_APART else _integers(self._tokens)


def _in_due_order(columns: Columns) -> Columns:
    """The same requests by due time (ties by index): blocks of neighbours are then blocks of time."""
    order = np.lexsort((columns.index, columns.times["due_s"]))
    if np.array_equal(order, np.arange(len(order))):
        return columns
    sizes = np.diff(columns.chunk_starts)[order]
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    # Position j of the new flat array comes from its request's old start plus its place in the request.
    source = np.repeat(columns.chunk_starts[:-1][order] - starts[:-1], sizes) + np.arange(starts[-1])
    return replace(
        columns,
        lane_ids=columns.lane_ids[order],
        class_ids=columns.class_ids[order],
        index=columns.index[order],
        outcome_ids=columns.outcome_ids[order],
        times={name: values[order] for name, values in columns.times.items()},
        offered=columns.offered[order],
        good=columns.good[order],
        good_from_due=columns.good_from_due[order],
        reasons=columns.reasons[order],
        input_tokens=columns.input_tokens[order],
        output_tokens=columns.output_tokens[order],
        usage_seen=columns.usage_seen[order],
        served_elsewhere=columns.served_elsewhere[order],
        chunk_ns=columns.chunk_ns[source],
        chunk_starts=starts,
        chunk_tokens=None if columns.chunk_tokens is None else columns.chunk_tokens[source],
    )


def _slo(class_name: str, bounds: dict[str, float]) -> SloTarget:
    unknown = sorted(set(bounds) - set(SloTarget.__struct_fields__))
    if unknown:
        known = ", ".join(SloTarget.__struct_fields__)
        raise ConfigError(f"unknown bound {unknown[0]!r} (there are {known})", where=f"slos.{class_name}")
    return SloTarget(**bounds)


def _seconds(moment_ns: int | None) -> float:
    return _NO_NUMBER if moment_ns is None else moment_ns / 1e9


def _integers(values: array[int]) -> IntArray:
    return np.frombuffer(values, dtype=np.int64)


def _flags(values: bytearray) -> BoolArray:
    return np.frombuffer(bytes(values), dtype=np.bool_)
