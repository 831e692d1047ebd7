"""A run while it goes on: a panel on a terminal, a plain line every few seconds elsewhere. On standard error.

What is shown is for the eye: over the last few hundred requests, not the run's figures.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from headrace.bench.records import RequestRecord

_RECENT = 500
_PANEL_INTERVAL_S = 1.0
_PLAIN_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    """``planned``: requests of the whole run, None in a closed loop. ``phase``: ``warm-up``, ``load`` or ``drain``.
    ``ttft_s``: of the recent answers, from sending, p50 and p99. ``chunks_per_s``: since the last snapshot."""

    elapsed_s: float
    duration_s: float
    phase: str
    planned: int | None
    sent: int
    in_flight: int
    outcomes: dict[str, int]
    chunks_per_s: float
    ttft_s: tuple[float, float] | None
    send_lag_p99_s: float | None


class Progress(Protocol):
    """Shows snapshots, one every ``interval_s``."""

    interval_s: float

    def show(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class LiveState:
    """What a snapshot is made of; fed with every record."""

    def __init__(self, *, duration_s: float, warmup_s: float, planned: int | None) -> None:
        self._duration_s = duration_s
        self._warmup_s = warmup_s
        self._planned = planned
        self._outcomes: Counter[str] = Counter()
        self._ttfts_ns: deque[int] = deque(maxlen=_RECENT)
        self._lags_ns: deque[int] = deque(maxlen=_RECENT)
        self._chunks = 0
        self._shown_s = 0.0

    def add(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._outcomes[record.outcome] += 1
        if record.sent_ns is not None:
            self._lags_ns.append(record.sent_ns - record.ready_ns)
            if record.first_ns is not None:
                self._ttfts_ns.append(record.first_ns - record.sent_ns)

    def snapshot(self, elapsed_s: float, *, sent: int, in_flight: int, chunks: int) -> Snapshot:
        """The state now. ``chunks``: content chunks received so far."""
        rate = (chunks - self._chunks) / max(1e-9, elapsed_s - self._shown_s)
        self._chunks, self._shown_s = chunks, elapsed_s
        phase = "drain" if elapsed_s >= self._duration_s else "warm-up" if elapsed_s < self._warmup_s else "load"
        lags, ttfts = sorted(self._lags_ns), sorted(self._ttfts_ns)
        return Snapshot(
            elapsed_s=elapsed_s,
            duration_s=self._duration_s,
            phase=phase,
            planned=self._planned,
            sent=sent,
            in_flight=in_flight,
            outcomes=dict(self._outcomes),
            chunks_per_s=rate,
            ttft_s=(_rank(ttfts, 50) / 1e9, _rank(ttfts, 99) / 1e9) if ttfts else None,
            send_lag_p99_s=_rank(lags, 99) / 1e9 if lags else None,
        )


def open_progress(stream: TextIO = sys.stderr) -> Progress:
    """A panel when ``stream`` is a terminal, plain lines otherwise."""
    console = Console(file=stream)
    if console.is_terminal:
        return Panel(console)
    return PlainLines(lambda line: print(line, file=stream, flush=True))


class PlainLines:
    """A line for each snapshot."""

    interval_s = _PLAIN_INTERVAL_S

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def show(self, snapshot: Snapshot) -> None:
        self._write(", ".join(f"{name} {value}" for name, value in _facts(snapshot)))

    def close(self) -> None:
        """Nothing stays open."""


class Panel:
    """A table that is drawn anew. Drawing takes about 1 ms of the event loop's time, so it is done once a
    second."""

    interval_s = _PANEL_INTERVAL_S

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        table = Table.grid(padding=(0, 2))
        for name, value in _facts(snapshot):
            table.add_row(name, value)
        self._live.update(table, refresh=True)

    def close(self) -> None:
        self._live.stop()


def _facts(snapshot: Snapshot) -> list[tuple[str, str]]:
    planned = "" if snapshot.planned is None else f" of {snapshot.planned}"
    facts = [
        (snapshot.phase, f"{snapshot.elapsed_s:.0f} of {snapshot.duration_s:g} s"),
        ("sent", f"{snapshot.sent}{planned}"),
        ("in flight", str(snapshot.in_flight)),
        ("ended", " ".join(f"{name} {count}" for name, count in sorted(snapshot.outcomes.items())) or "0"),
        ("chunks/s", f"{snapshot.chunks_per_s:.0f}"),
    ]
    if snapshot.ttft_s is not None:
        p50_s, p99_s = snapshot.ttft_s
        facts.append(("TTFT", f"p50 {p50_s * 1e3:.0f} ms p99 {p99_s * 1e3:.0f} ms"))
    if snapshot.send_lag_p99_s is not None:
        facts.append(("send lag", f"p99 {snapshot.send_lag_p99_s * 1e3:.1f} ms"))
    return facts


def _rank(ordered: list[int], percent: int) -> int:
    """The nearest-rank percentile of a list that is not empty."""
    return ordered[-(-percent * len(ordered) // 100) - 1]
