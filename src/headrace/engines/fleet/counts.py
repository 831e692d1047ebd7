"""What a fleet counts since it started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class FleetCounts:
    """``attempts`` by group and outcome, ``again`` by group and how (retry, hedge, continue), ``routes`` by group and
    reason, ``degraded`` requests by lane, ``transitions`` of breakers by group, lane and new state."""

    attempts: Counter[tuple[str, str]] = field(default_factory=Counter)
    again: Counter[tuple[str, str]] = field(default_factory=Counter)
    routes: Counter[tuple[str, str]] = field(default_factory=Counter)
    degraded: Counter[str] = field(default_factory=Counter)
    transitions: Counter[tuple[str, str, str]] = field(default_factory=Counter)
