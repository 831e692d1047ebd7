"""Changes of KV memory's level, and what they did to sequences, as lines of the log and counts."""

from __future__ import annotations

import logging

from headrace.kv.watermarks import LEVELS, KvLevel
from headrace.messages.engine import EngineLoad, TierLoad
from headrace.telemetry.metrics import Metrics

_logger = logging.getLogger(__name__)


class KvEvents:
    """Sees the engine's load reports one after the other."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._level: KvLevel = "normal"
        self._parked = 0
        self._entries: dict[str, int] = {}
        self._told = {"write_failed": 0, "bad": 0}

    def seen(self, load: EngineLoad) -> None:
        """Take in a report. Counts that are lower than before are those of an engine that started again."""
        for level, count in load.kv_level_entries.items():
            before = self._entries.get(level, 0)
            self._metrics.kv_level_entered(level, count - before if count >= before else count)
        self._entries = load.kv_level_entries
        if load.kv_parked > self._parked:
            _logger.warning(
                "KV memory: %d sequences parked to make room, %d parked in all (%d bytes in memory, %d in files)",
                load.kv_parked - self._parked,
                load.parked,
                load.parked_bytes,
                load.spilled_bytes,
            )
        self._parked = load.kv_parked
        if load.tiers is not None:
            self._stores(load.tiers)
        if load.kv_level == self._level:
            return
        higher = LEVELS.index(load.kv_level) > LEVELS.index(self._level)
        _logger.log(
            logging.WARNING if higher else logging.INFO,
            "KV memory: level %s after %s; %d tokens held and %d promised of %d",
            load.kv_level,
            self._level,
            load.kv_held_tokens,
            load.kv_promised_tokens,
            load.kv_budget_tokens,
        )
        self._level = load.kv_level

    def _stores(self, tiers: TierLoad) -> None:
        """Trouble with files is told at its first, and whenever there is twice as much: a full disk fails for hours."""
        failed, bad = tiers.unsaved.get("write_failed", 0), sum(tiers.bad.values())
        if self._worth_telling("write_failed", failed):
            _logger.warning("KV stores: %d blocks could not be written to disk; they stay in RAM, or are lost", failed)
        if self._worth_telling("bad", bad):
            reasons = ", ".join([f"{reason} {count}" for reason, count in sorted(tiers.bad.items())])
            _logger.warning("KV stores: %d blocks could not be used and were dropped (%s)", bad, reasons)

    def _worth_telling(self, what: str, count: int) -> bool:
        told = self._told[what] if count >= self._told[what] else 0  # lower: the engine started again
        self._told[what] = count if (worth := count > 0 and count >= 2 * told) else told
        return worth
