"""Streams that keep the KV of a sequence that has ended, as long as nobody needs the stream, and what each is worth.

A resident's worth is the time that it is expected to save:

    chance of being used * time to compute again what nobody else holds

The chance falls by half every ``HALF_LIFE_S`` that nobody used it. It begins with the share of residents of its group
(lane) that were used before they were given up, learned while serving: a caption's tail is almost never asked for
again, a dialogue's usually is. Each use of a resident raises its own chance. Only uses that reach into what nobody else
holds count: a system prompt that ten residents share says nothing about any of their tails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from headrace.kv.group_chance import HALF_LIFE_S, GroupChance
from headrace.kv.prefix_tree import H


@dataclass(frozen=True, slots=True)
class Resident:
    """``hits``: how often its sequence was used, over all its turns. Times are monotonic seconds. ``saved``: whatever
    the stores (``kv.tiers``) want of it, they have."""

    group: str
    hits: int
    used_s: float
    used: bool = False
    """Whether it was used since it was kept."""
    saved: bool = False


class IdleResidents(Generic[H]):
    """The idle holders. Knows nothing of tokens; that is the tree's part."""

    def __init__(self) -> None:
        self._residents: dict[H, Resident] = {}
        self._groups = GroupChance()

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
            self._groups.note_used(before.group)
        self._residents[holder] = replace(before, hits=before.hits + 1, used_s=now_s, used=True)
        return before.hits + 1

    def drop(self, holder: H) -> None:
        """The resident is gone, or lives on as part of a new sequence. Its group's share learns from it."""
        self._groups.note_gone(self._residents.pop(holder).group)

    def save(self, holder: H) -> None:
        """The stores have what they want of it."""
        self._residents[holder] = replace(self._residents[holder], saved=True)

    def saved(self, holder: H) -> bool:
        """Whether ``save`` was called for it."""
        return self._residents[holder].saved

    def rename(self, holder: H, new: H) -> None:
        """The resident is with ``new`` now."""
        self._residents[new] = self._residents.pop(holder)

    def first_chance(self, group: str) -> float:
        """The chance of a resident of ``group`` that was never used."""
        return self._groups.first_chance(group)

    def chance(self, holder: H, now_s: float) -> float:
        """The chance that a resident is used again, 0 to 1."""
        resident = self._residents[holder]
        fresh = self._groups.fresh_chance(resident.group, resident.hits)
        return float(fresh * 0.5 ** (max(0.0, now_s - resident.used_s) / HALF_LIFE_S))
