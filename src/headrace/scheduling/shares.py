"""Each lane's share of engine time lately."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

DECAY_S: Final = 5.0
"""Time constant: long enough to hold some tens of steps of a slow engine, so that one step does not decide who is
over its share; short enough that a lane which was greedy is forgiven before an operator looks."""
MOST_LANES: Final = 256
_FORGOTTEN_SHARE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step with a time of its own, seconds: one forward pass and the rows that each lane had in it."""

    rows_by_lane: Mapping[str, int]
    took_s: float


class LaneShares:
    """Shares of engine time, exponentially decayed: a second that lies ``t`` seconds back weighs
    ``exp(-t / decay_s)``. A lane that always had the engine for itself has a share of 1; all shares add up to at
    most 1; what is missing is idle time.

    A row is a row: within one forward pass a decode token and a prefill token go through the same matrices, and the
    pass's fixed part (reading the weights) is divided as its rows are. Where decodes and prefill are passes of their
    own, a decode row costs many times a prefill row, because few rows share the fixed part. ``charge_parts`` sees
    that by itself, since each part is charged its own time; ``charge`` takes the whole step for one pass.

    Remembers at most ``MOST_LANES`` lanes: those that used the engine least are forgotten first, and any lane some
    20 time constants after it used the engine last.
    """

    def __init__(self, decay_s: float = DECAY_S) -> None:
        if not 0 < decay_s < math.inf:
            raise ValueError(f"the time constant must be above 0 s, not {decay_s}")
        self._decay_s = decay_s
        self._shares: dict[str, float] = {}
        self._charged_until_s = -math.inf

    def charge(self, rows_by_lane: Mapping[str, int], took_s: float, now_s: float) -> None:
        """Divide a step that ended at ``now_s`` and took ``took_s`` among lanes by their rows in it."""
        self.charge_parts((Part(rows_by_lane, took_s),), now_s)

    def charge_parts(self, parts: Iterable[Part], now_s: float) -> None:
        """Divide a step of several forward passes, which ended at ``now_s``: each part's time by its own rows.

        Parts without rows and impossible times are ignored. Time that was charged before is not charged again: of
        a step that claims to have begun before the last one ended only the rest counts.
        """
        counted = [part for part in parts if sum(part.rows_by_lane.values()) > 0 and 0 < part.took_s < math.inf]
        took_s = sum([part.took_s for part in counted])
        free_s = now_s - self._charged_until_s
        if not counted or free_s <= 0:
            return
        self._shares = self.shares(now_s)
        self._charged_until_s = now_s
        # The integral of the weights over the step, of which each part has its share of the step's time.
        weight = -math.expm1(-min(took_s, free_s) / self._decay_s)
        for part in counted:
            per_row = weight * part.took_s / took_s / sum(part.rows_by_lane.values())
            for lane, rows in part.rows_by_lane.items():
                self._shares[lane] = self._shares.get(lane, 0.0) + per_row * rows
        if len(self._shares) > MOST_LANES:
            self._shares = dict(heapq.nlargest(MOST_LANES, self._shares.items(), key=lambda item: item[1]))

    def shares(self, now_s: float) -> dict[str, float]:
        """Every remembered lane's share at ``now_s``, 0 to 1."""
        if not self._shares:
            return {}
        kept = math.exp(-max(0.0, now_s - self._charged_until_s) / self._decay_s)
        return {lane: share * kept for lane, share in self._shares.items() if share * kept > _FORGOTTEN_SHARE}
