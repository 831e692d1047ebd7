"""Changes of KV memory's level, and what they did to sequences, as lines of the log and counts."""

from __future__ import annotations

import logging

from headrace.kv.watermarks import LEVELS, KvLevel
from headrace.messages.engine import EngineLoad
from headrace.telemetry.metrics import Metrics

_logger = logging.getLogger(__name__)


class KvEvents:
    """Sees the engine's load reports one after the other."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._level: KvLevel = "normal"
        self._parked = 0
        self._entries: dict[str, int] = {}

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
