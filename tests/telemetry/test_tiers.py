"""Metrics of the stores of KV blocks."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from headrace.messages.engine import TierLoad
from headrace.telemetry.tiers import TierCounts, tier_gauges


def values(families: Iterable[Metric]) -> dict[tuple[str, ...], float]:
    """By name and label values."""
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_what_the_stores_hold_is_shown_by_tier() -> None:
    """Bytes, quotas and blocks."""
    load = TierLoad(ram_bytes=3, ram_quota_bytes=10, ram_blocks=1, disk_bytes=5, disk_quota_bytes=20, disk_blocks=2)
    shown = values(tier_gauges(load))
    assert shown[("headrace_kv_tier_bytes", "ram")] == 3
    assert shown[("headrace_kv_tier_quota_bytes", "disk")] == 20
    assert shown[("headrace_kv_tier_blocks", "disk")] == 2


def test_counters_go_on_when_the_engine_starts_again() -> None:
    """By tier and by reason, too; a reason that the new engine has not met keeps its count."""
    counts = TierCounts()
    counts.seen(TierLoad(stored=4, ram_hit_tokens=256, bad={"truncated": 1}, unsaved={"no_time": 2}))
    counts.seen(TierLoad(stored=5, ram_hit_tokens=256, bad={"truncated": 1}, unsaved={"no_time": 2}))
    counts.seen(TierLoad(stored=1, disk_hit_tokens=128, unsaved={"no_time": 1}))
    shown = values(counts.collect())
    assert shown[("headrace_kv_tier_stored_blocks_total",)] == 6
    assert shown[("headrace_kv_tier_hit_tokens_total", "ram")] == 256
    assert shown[("headrace_kv_tier_hit_tokens_total", "disk")] == 128
    assert shown[("headrace_kv_tier_bad_blocks_total", "truncated")] == 1
    assert shown[("headrace_kv_tier_unsaved_blocks_total", "no_time")] == 3
