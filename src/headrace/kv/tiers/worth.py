"""What a stored block is worth, as a number that does not change while nobody uses it.

    worth = chance of being used * time that having it saves / bytes that it takes

The chance halves every ``STORED_HALF_LIFE_S``, of all blocks alike. So log2(worth at its last use) + last use /
half-life orders blocks as their worths do at any one time, and needs no update as time goes by.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Final

from headrace.kv.tiers.block_tree import BlockNode

STORED_HALF_LIFE_S: Final = 60.0
"""Chosen on the first half of a trace of conversations (``benchmarks.kv_replay``): there, with 30 to 200 s, 60 found
most, in blocks and in time saved. Shorter than for streams: how often somebody comes back in the next minute falls
faster than whether he comes back at all, and what stays longer keeps somebody else out."""
_LEAST_S: Final = 1e-9
_MOST_STALE: Final = 64


def rank(fresh_chance: float, saved_s: float, stored_bytes: int, used_s: float) -> float:
    """Where a block stands: the least goes first. ``fresh_chance`` as of ``used_s``."""
    return (
        math.log2(max(_LEAST_S, fresh_chance * max(_LEAST_S, saved_s)) / max(1, stored_bytes))
        + used_s / STORED_HALF_LIFE_S
    )


class LeastWorth:
    """Blocks by rank, least first. ``current`` says a block's rank now, or None when it must stay."""

    def __init__(self, current: Callable[[BlockNode], float | None]) -> None:
        self._current = current
        self._heap: list[tuple[float, int, BlockNode]] = []
        self._ranks: dict[BlockNode, float] = {}
        self._count = itertools.count()

    def push(self, node: BlockNode) -> None:
        """``node`` may go from now on, must stay, or is worth something else than before."""
        now = self._current(node)
        if now is None:
            self._ranks.pop(node, None)
        elif self._ranks.get(node) != now:
            self._ranks[node] = now
            heapq.heappush(self._heap, (now, next(self._count), node))
            if len(self._heap) > 2 * len(self._ranks) + _MOST_STALE:
                self._heap = [entry for entry in self._heap if self._ranks.get(entry[2]) == entry[0]]
                heapq.heapify(self._heap)

    def least(self) -> tuple[float, BlockNode] | None:
        """The block of least worth, which stays pushed, and its rank; None when all must stay."""
        while self._heap:
            pushed, _, node = self._heap[0]
            if self._ranks.get(node) == pushed:
                now = self._current(node)
                if now == pushed:
                    return now, node
                heapq.heappop(self._heap)
                self.push(node)  # its group's chance has changed
            else:
                heapq.heappop(self._heap)
        return None
