"""Streams that keep the KV of a sequence that has ended, as long as nobody needs the stream, and what each is worth.

A resident's worth is the time that it is expected to save:

    chance of being used * time to compute again what nobody else holds

The chance falls by half every ``HALF_LIFE_S`` that nobody used it. It begins with the share of residents of its group
(lane) that were used before they were given up, learned while serving: a caption's tail is almost never asked for
again, a dialogue's usually is. Each use of a resident raises its own chance. Only uses that reach into what nobody else
holds count: a system prompt that ten residents share says nothing about any of their tails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic

from headrace.kv.prefix_tree import H

HALF_LIFE_S: Final = 120.0
"""People answer within seconds to minutes; who has not come back after some half-lives has left."""

_FIRST_USED, _FIRST_KEPT = 1.0, 4.0
"""Before anything is known, one resident in four is taken to be used again."""
_MEMORY: Final = 0.98
"""Weight of the resident before, of the same group: half of the memory is the last 34."""


@dataclass(frozen=True, slots=True)
class Resident:
    """``hits``: how often its sequence was used, over all its turns. Times are monotonic seconds."""

    group: str
    hits: int
    used_s: float
    used: bool = False
    """Whether it was used since it was kept."""


class IdleResidents(Generic[H]):
    """The idle holders. Knows nothing of tokens; that is the tree's part."""

    def __init__(self) -> None:
        self._residents: dict[H, Resident] = {}
        self._used: dict[str, float] = {}
        self._kept: dict[str, float] = {}

    def __contains__(self, holder: H) -> bool:
        return holder in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    def holders(self) -> list[H]:
        """All of them, longest idle first unless used since."""
        return list(self._residents)

    def get(self, holder: H) -> Resident | None:
        """What is known of a resident, or None."""
        return self._residents.get(holder)

    def keep(self, holder: H, group: str, hits: int, now_s: float) -> None:
        """A sequence of ``group`` ended in ``holder``. Raises ValueError when one is kept there already."""
        if holder in self._residents:
            raise ValueError(f"{holder} keeps a resident already")
        self._residents[holder] = Resident(group, hits, now_s)

    def use(self, holder: H, now_s: float) -> int:
        """A new sequence began with what only this resident had. Returns its hits so far, this one included."""
        before = self._residents[holder]
        if not before.used:
            self._used[before.group] = self._used.get(before.group, _FIRST_USED) + 1.0
        self._residents[holder] = Resident(before.group, before.hits + 1, now_s, used=True)
        return before.hits + 1

    def drop(self, holder: H) -> None:
        """The resident is gone, or lives on as part of a new sequence. Its group's share learns from it."""
        gone = self._residents.pop(holder)
        used = self._used.get(gone.group, _FIRST_USED)
        self._used[gone.group] = _MEMORY * used
        self._kept[gone.group] = _MEMORY * (self._kept.get(gone.group, _FIRST_KEPT) + 1.0)

    def rename(self, holder: H, new: H) -> None:
        """The resident is with ``new`` now."""
        self._residents[new] = self._residents.pop(holder)

    def first_chance(self, group: str) -> float:
        """The chance of a resident of ``group`` that was never used."""
        return min(1.0, self._used.get(group, _FIRST_USED) / self._kept.get(group, _FIRST_KEPT))

    def chance(self, holder: H, now_s: float) -> float:
        """The chance that a resident is used again, 0 to 1."""
        resident = self._residents[holder]
        fresh = (resident.hits + self.first_chance(resident.group)) / (resident.hits + 1)
        return float(fresh * 0.5 ** (max(0.0, now_s - resident.used_s) / HALF_LIFE_S))
