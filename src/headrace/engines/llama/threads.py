"""How many threads a step computes with, following what other processes leave free.

libllama's threads wait for each other at every operation, so one thread that shares its core with a busy
neighbour stalls the rest: on two cores with one busy neighbour two spinning threads were measured at 0.2
to 0.3 of the idle throughput, one thread at 0.55 (``docs/decisions/0003``). ``decide`` is pure; reading the
system is ``CpuReader``'s part.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from headrace.errors import ConfigError

CROWDED_CORES = 0.42
"""Use by others, beyond the cores left to them, at which a thread is given up. A neighbour that wants a
whole core gets about half of one while it competes with a spinning thread; a gateway and its clients were
measured at up to 0.35."""
ROOM_CORES = 0.6
"""Use by others, on the cores left to them, below which a thread is taken back. A neighbour that wants a
whole core shows as 0.9 or more once it has one."""
WINDOW_S = 0.25
FIRST_HOLD_S = 1.0
MAX_HOLD_S = 30.0


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Cores (CPU seconds per second) that processes other than headrace used in the last window."""

    at_s: float
    other_cores: float


@dataclass(frozen=True, slots=True)
class ThreadState:
    """Threads in use and the memory that damps changes. ``hold_s`` doubles each time taking a thread back
    turned out wrong, so that a fickle neighbour costs little."""

    threads: int
    crowded_windows: int = 0
    not_before_s: float = 0.0
    raised_s: float = -1e9
    hold_s: float = FIRST_HOLD_S


def decide(state: ThreadState, reading: CpuReading, *, cores: int, max_threads: int) -> ThreadState:
    """The next state. Gives up a thread after two crowded windows in a row, takes one back when there is
    room and the hold is over; always between 1 and ``max_threads``."""
    excess = reading.other_cores - (cores - state.threads)
    if excess > CROWDED_CORES and state.threads > 1:
        if state.crowded_windows < 1:
            return replace(state, crowded_windows=state.crowded_windows + 1)
        regretted = reading.at_s - state.raised_s < 4 * WINDOW_S + 1.0
        hold_s = min(MAX_HOLD_S, state.hold_s * 2) if regretted else FIRST_HOLD_S
        return ThreadState(state.threads - 1, 0, reading.at_s + hold_s, state.raised_s, hold_s)
    if excess + 1 <= ROOM_CORES and state.threads < max_threads and reading.at_s >= state.not_before_s:
        return ThreadState(state.threads + 1, 0, state.not_before_s, reading.at_s, state.hold_s)
    return replace(state, crowded_windows=0) if state.crowded_windows else state


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut to the control group's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _quota_cores(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores, int(quota + 0.5))) if quota is not None else cores


def _quota_cores(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return None  # no control groups (version 2) here: nothing to respect
    return None if quota == "max" else int(quota) / int(period)


class CpuReader:
    """Reads how much processor time others use on the cores that this process may run on."""

    def __init__(self, gateway_pid: int, now_s: float) -> None:
        self._affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        self._own = psutil.Process()
        try:
            self._gateway: psutil.Process | None = psutil.Process(gateway_pid)
        except psutil.NoSuchProcess:
            self._gateway = None
        self._last = (now_s, self._busy_s(), self._headrace_s())

    def read(self, now_s: float) -> CpuReading | None:
        """A reading for the time since the last one, or None while the window is not over."""
        then_s, busy_s, headrace_s = self._last
        elapsed_s = now_s - then_s
        if elapsed_s < WINDOW_S:
            return None
        self._last = (now_s, self._busy_s(), self._headrace_s())
        other_s = (self._last[1] - busy_s) - (self._last[2] - headrace_s)
        return CpuReading(now_s, max(0.0, other_s / elapsed_s))

    def _busy_s(self) -> float:
        per_core = psutil.cpu_times(percpu=True)
        chosen = per_core if self._affinity is None else [per_core[i] for i in self._affinity if i < len(per_core)]
        return sum(sum(core) - core.idle - getattr(core, "iowait", 0.0) - _guest_s(core) for core in chosen)

    def _headrace_s(self) -> float:
        own = self._own.cpu_times()
        total = own.user + own.system
        if self._gateway is not None:
            try:
                times = self._gateway.cpu_times()
                total += times.user + times.system
            except psutil.Error:
                self._gateway = None  # it is gone; this process ends as soon as it notices
        return total


def _guest_s(core: object) -> float:
    # Linux counts guest time inside user time as well.
    return float(getattr(core, "guest", 0.0)) + float(getattr(core, "guest_nice", 0.0))


def check_threads(threads: int | None) -> int:
    """The most threads to compute with. Raises ConfigError when the wish is not positive."""
    if threads is None:
        return usable_cores()
    if threads < 1:
        raise ConfigError(f"{threads} threads cannot compute; use 1 or more", where="engine.threads")
    return threads
