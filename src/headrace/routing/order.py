"""Who of the waiting goes first, decided as late as possible: when a place is free. Pure."""

from __future__ import annotations

from typing import Final

AGEING_S: Final = 10.0
"""In this time a waiting request becomes ten points of priority more urgent."""

NO_TARGET_S: Final = 60.0
"""What a request without a deadline counts as having left."""


def rank(priority: int, arrived_s: float, deadline_s: float | None) -> float:
    """The request's place in line, smallest first; it does not change while it waits. Within one priority the earliest
    deadline goes first; across priorities nobody waits for ever, since every point is worth a second of waiting."""
    due_s = arrived_s + NO_TARGET_S if deadline_s is None else deadline_s
    return due_s + priority * AGEING_S / 10.0
