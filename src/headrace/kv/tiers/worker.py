"""Work beside the steps: packing, writing and reading files, each in one thread.

The engine's thread hands jobs in and, between steps, takes their results. A job gets all it needs and touches nothing
of the engine's; ``finish`` runs in the engine's thread. The thread is of a low priority. Not of the lowest: beside
steps that never rest it would not get on at all, and nothing would be stored just when it is needed most. Its queue is
bounded by jobs and by bytes: what does not fit is refused at once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

MOST_JOBS: Final = 4096
NICENESS: Final = 10
"""Measured on 2 cores that compute all the time (``benchmarks.kv_tiers --steps``, steps of 7.6 ms, p99 11.3): with 19,
44 MB are not packed and written within 6 s, p99 12.3; with 10 in 0.9 s, p99 13.7; with 5 in 0.3 s, p99 16.1."""
READING_NICENESS: Final = 5
"""Of a thread that somebody waits for."""


@dataclass(frozen=True, slots=True)
class Job:
    """``work`` returns what ``finish`` gets; it lets no exception out that it expects. ``held_bytes``: memory that it
    keeps alive."""

    work: Callable[[], object]
    finish: Callable[[object], None]
    held_bytes: int = 0


class Worker(Protocol):
    """Who does jobs, in the order in which they came."""

    def submit(self, job: Job) -> bool:
        """Take a job in; False when the queue is full."""
        ...

    def has_room(self, held_bytes: int) -> bool:
        """Whether a job that keeps so much memory would be taken in."""
        ...

    def poll(self) -> None:
        """Finish what has been done. Raises what a job raised."""
        ...

    @property
    def waiting(self) -> int:
        """Jobs that are not finished."""
        ...

    @property
    def held_bytes(self) -> int:
        """Memory that jobs keep alive until they are finished."""
        ...

    def close(self, timeout_s: float) -> None:
        """Finish what can be in ``timeout_s``, and end."""
        ...


class ThreadWorker:
    """One thread. Made, polled and closed by the engine's thread."""

    def __init__(self, most_bytes: int, niceness: int = NICENESS) -> None:
        self._most_bytes = most_bytes
        self._niceness = niceness
        self._todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Job, object, BaseException | None]] = queue.SimpleQueue()
        self._waiting = 0
        self._held_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-kv-tiers", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def has_room(self, held_bytes: int) -> bool:
        if self._stop.is_set() or self._waiting >= MOST_JOBS:
            return False
        return not held_bytes or not self._held_bytes or self._held_bytes + held_bytes <= self._most_bytes

    def submit(self, job: Job) -> bool:
        if not self.has_room(job.held_bytes):
            return False
        self._waiting += 1
        self._held_bytes += job.held_bytes
        self._todo.put(job)
        return True

    def poll(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._finish(*self._done.get_nowait())

    def _finish(self, job: Job, result: object, error: BaseException | None) -> None:
        self._waiting -= 1
        self._held_bytes -= job.held_bytes
        if error is not None:
            raise error
        job.finish(result)

    def close(self, timeout_s: float) -> None:
        self._todo.put(None)
        self._thread.join(timeout_s)
        self._stop.set()
        self._thread.join(timeout_s)
        self.poll()

    def _run(self) -> None:
        _step_back(self._niceness)
        while not self._stop.is_set():
            job = self._todo.get()
            if job is None:
                return
            try:
                result = job.work()
            except Exception as error:  # it goes to the engine's thread, which raises it
                self._done.put((job, None, error))
            else:
                self._done.put((job, result, None))


def _step_back(niceness: int) -> None:
    """Leave cores that others want to them, as far as ``niceness`` goes (with 10 a tenth of one is left for this
    thread), where the system has priorities for threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + niceness))
