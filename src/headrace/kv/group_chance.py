"""How often what a group (lane) leaves behind is used again, learned while serving.

Of a group nothing is known of, one in four is taken to be used. A caption's tail is almost never asked for again, a
dialogue's usually is.
"""

from __future__ import annotations

from typing import Final

HALF_LIFE_S: Final = 120.0
"""People answer within seconds to minutes; who has not come back after some half-lives has left."""

_FIRST_USED, _FIRST_KEPT = 1.0, 4.0
_MEMORY: Final = 0.98
"""Weight of the one before, of the same group: half of the memory is the last 34."""


class GroupChance:
    """Shares of what was used before it was given up, by group."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._kept: dict[str, float] = {}

    def note_used(self, group: str) -> None:
        """Something of ``group`` was used, for the first time since it was kept."""
        self._used[group] = self._used.get(group, _FIRST_USED) + 1.0

    def note_gone(self, group: str) -> None:
        """Something of ``group`` is kept no longer."""
        self._used[group] = _MEMORY * self._used.get(group, _FIRST_USED)
        self._kept[group] = _MEMORY * (self._kept.get(group, _FIRST_KEPT) + 1.0)

    def first_chance(self, group: str) -> float:
        """The chance, 0 to 1, of something of ``group`` that was never used."""
        return min(1.0, self._used.get(group, _FIRST_USED) / self._kept.get(group, _FIRST_KEPT))

    def fresh_chance(self, group: str, hits: int) -> float:
        """The same after ``hits`` uses, right after the last."""
        return (hits + self.first_chance(group)) / (hits + 1)
