"""What of KV memory the log tells."""

from __future__ import annotations

import pytest

from headrace.messages.engine import EngineLoad, TierLoad
from headrace.telemetry.kv_events import KvEvents
from headrace.telemetry.metrics import Metrics


def report(failed: int, **bad: int) -> EngineLoad:
    tiers = TierLoad(unsaved={"write_failed": failed}, bad=bad)
    return EngineLoad(1, 0, 0, 1, 0, 1, 0, 0.0, 1, 0, 1, tiers=tiers)


def test_a_failing_disk_is_told_at_its_first_and_at_every_doubling(caplog: pytest.LogCaptureFixture) -> None:
    """Not with every report: a disk that is full stays full. An engine that started again counts anew."""
    events = KvEvents(Metrics("1"))
    for failed in (0, 1, 1, 2, 3, 3, 5, 1):
        events.seen(report(failed))
    told = [record.args for record in caplog.records]
    assert told == [(1,), (2,), (5,), (1,)]


def test_blocks_that_were_dropped_are_told_with_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    events = KvEvents(Metrics("1"))
    events.seen(report(0, truncated=9, orphan=16))
    assert "25 blocks could not be used and were dropped (orphan 16, truncated 9)" in caplog.text
