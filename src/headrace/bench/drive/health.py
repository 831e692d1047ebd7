"""How the generator itself does: its processor time, its event loop's lag, the descriptors it may open, its machine.

A generator that is late or starved makes figures that look like the server's. So it measures itself, in the time
in which it sends, and says what it found.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator

import psutil

from headrace.bench.records import GeneratorHealth

_PROBE_S = 0.02
_TIDY_S = 1.0
_TIDY_ROOM_NS = 3_000_000  # collecting the young objects of a second at 1,000 requests/s takes 1 to 2 ms
_SPARE_FILES = 64


class HealthProbe:
    """Measures from ``start`` to ``stop``. ``cpu_ns`` gives this process's processor time in nanoseconds.

    The loop's lag is how late a timer of 20 ms fires. Timers of event loops count in whole milliseconds, so up
    to 1 ms of it is their rounding.
    """

    def __init__(self, clock: Callable[[], int], cpu_ns: Callable[[], int] = time.process_time_ns) -> None:
        self._clock = clock
        self._cpu_ns = cpu_ns
        self._lags_ns: list[int] = []
        self._began_ns = self._ended_ns = clock()
        self._began_cpu_ns = self._ended_cpu_ns = cpu_ns()
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0
        self._running = False

    def start(self) -> None:
        """Begin, in the running event loop."""
        self._running = True
        self._began_ns, self._began_cpu_ns = self._clock(), self._cpu_ns()
        self._arm()

    def stop(self) -> None:
        """End; later calls change nothing."""
        if not self._running:
            return
        self._running = False
        self._ended_ns, self._ended_cpu_ns = self._clock(), self._cpu_ns()
        if self._timer is not None:
            self._timer.cancel()
        # A loop that stood still until now shows in no timer that fired.
        self._lags_ns.append(max(0, self._ended_ns - self._due_ns))

    def result(self, peak_in_flight: int) -> GeneratorHealth:
        """What was measured."""
        wall_ns = max(1, self._ended_ns - self._began_ns)
        lags = sorted(self._lags_ns)
        lag_ns = lags[-(-99 * len(lags) // 100) - 1] if lags else 0
        return GeneratorHealth((self._ended_cpu_ns - self._began_cpu_ns) / wall_ns, lag_ns / 1e9, peak_in_flight)

    def _arm(self) -> None:
        self._due_ns = self._clock() + round(_PROBE_S * 1e9)
        self._timer = asyncio.get_running_loop().call_later(_PROBE_S, self._fire)

    def _fire(self) -> None:
        self._lags_ns.append(max(0, self._clock() - self._due_ns))
        self._arm()


class Collector:
    """Keeps Python's cycle collector from stopping the event loop at a bad moment.

    Within ``quiet`` nothing that existed before is looked at again, and young objects only by ``tidy``, which
    picks moments when nothing is due for a while. Objects that live long are not looked at: a run keeps its
    records anyway.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._tidied_ns = clock()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()

    def tidy(self, until_due_ns: int | None) -> None:
        """Collect young objects when it is time to and the next request is far enough away (None: none is known),
        or when it has been put off for long."""
        waited_ns = self._clock() - self._tidied_ns
        if waited_ns < _TIDY_S * 1e9:
            return
        if until_due_ns is None or until_due_ns > _TIDY_ROOM_NS or waited_ns > 5 * _TIDY_S * 1e9:
            gc.collect(1)
            self._tidied_ns = self._clock()


def raise_file_limit(wanted_connections: int) -> str | None:
    """Allow as many open files as this user may. A sentence when ``wanted_connections`` may still not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS refuses "unlimited" and what is above its own limit for a process.
        most = hard if hard != resource.RLIM_INFINITY else max(soft, 10_240)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    room = soft - _SPARE_FILES
    if soft == resource.RLIM_INFINITY or wanted_connections <= room:
        return None
    return (
        f"this process may open {soft} files (ulimit -n), so about {room} requests can be in flight; up to "
        f"{wanted_connections} may be. Requests beyond that fail, and the run is then not valid"
    )


def machine_facts(event_loop: str) -> dict[str, object]:
    """The machine that the generator runs on, for the records' first line."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor_name(),
        "cores": os.cpu_count() or 0,
        "cores_for_us": _usable_cores(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "event_loop": event_loop,
    }


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return os.cpu_count() or 0 if affinity is None else len(affinity(0))


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
