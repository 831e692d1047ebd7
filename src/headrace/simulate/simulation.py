"""One clock and one seed: events that return events.

An event happens at a time and returns the events that follow from it, at its own time or later. Events of the same
time happen by ``rank``, then in the order in which they were put in, so that a run depends on nothing but its parts
and its seed. No part reads another clock or another source of randomness.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headrace.errors import HeadraceError


class SimulationError(HeadraceError):
    """A part of a simulation did what no part may, such as asking for something to happen in the past."""


class Event(NamedTuple):
    """``happen`` is called with the time, ``at_s``. Lower ranks of the same time come first: whoever reacts to all
    that happened at a time (a step that begins with everything that has arrived) takes a higher one."""

    at_s: float
    happen: Callable[[float], Iterable[Event]]
    rank: int = 0


class Simulation:
    """Events in the order of their time. ``now_s`` is the time of the latest one."""

    def __init__(self, seed: int = 0, start_s: float = 0.0) -> None:
        self._seed = seed
        self._queue: list[tuple[float, int, int, Callable[[float], Iterable[Event]]]] = []
        self._put = 0
        self.now_s = start_s
        self.happened = 0
        """Events so far."""

    def random(self, name: str) -> random.Random:
        """The random source of a part: always the same for a seed and a name, and none depends on another."""
        return random.Random(f"{self._seed}/{name}")

    def add(self, *events: Event) -> None:
        """Put events in. Raises SimulationError for a time that has passed."""
        for at_s, happen, rank in events:
            if not at_s >= self.now_s:
                raise SimulationError(f"an event at {at_s} s comes too late: it is {self.now_s} s")
            self._put += 1
            heapq.heappush(self._queue, (at_s, rank, self._put, happen))

    @property
    def next_s(self) -> float:
        """When the next event happens; infinity when none is left."""
        return self._queue[0][0] if self._queue else math.inf

    def run(self, until_s: float = math.inf, most: int | None = None, *, to_the_end: bool = True) -> None:
        """Let events happen until none is left, or none up to ``until_s``, or ``most`` of them have happened. The
        clock then stands at ``until_s`` if it is finite and was reached, unless not ``to_the_end``: then it stands at
        the latest event."""
        last = math.inf if most is None else self.happened + most
        queue = self._queue
        while queue and queue[0][0] <= until_s:
            if self.happened >= last:
                return
            self.now_s, _, _, happen = heapq.heappop(queue)
            self.happened += 1
            self.add(*happen(self.now_s))
        if to_the_end and math.isfinite(until_s):
            self.now_s = max(self.now_s, until_s)
