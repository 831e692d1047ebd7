"""Work beside the steps: packing, writing and reading files, in one thread.

The engine's thread hands jobs in and, between steps, takes their results. A job gets all it needs and touches nothing
of the engine's; ``finish`` runs in the engine's thread. The thread is of the lowest priority that the system has, so
that it computes only what the steps leave over, and its queue is bounded by jobs and by bytes: what does not fit is
refused at once.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

MOST_JOBS: Final = 4096


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

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
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
        _lowest_priority()
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


def _lowest_priority() -> None:
    """Let this thread run only when nobody else wants the core, where the system lets it ask for that."""
    with contextlib.suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
