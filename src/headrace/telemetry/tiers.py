"""Metrics of the stores of KV blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from headrace.messages.engine import TierLoad

_ONE_EACH: Final = {
    "kv_tier_stored_blocks": ("stored", "Blocks that came into RAM"),
    "kv_tier_deduplicated_blocks": ("deduplicated", "Blocks that came and were there already"),
    "kv_tier_written_blocks": ("written", "Blocks written to files"),
    "kv_tier_fetched_blocks": ("fetched", "Blocks read from files beside the steps, for sequences that waited"),
    "kv_tier_copy_seconds": ("copy_s", "Time between steps spent on copying KV out of streams"),
}
_BY_TIER: Final = {
    "kv_tier_hit_tokens": ("hit_tokens", "Prompt tokens loaded instead of computed"),
    "kv_tier_evicted_blocks": ("evicted", "Blocks let go for others"),
}
_BY_REASON: Final = {
    "kv_tier_bad_blocks": ("bad", "Blocks dropped because they could not be used"),
    "kv_tier_unsaved_blocks": ("unsaved", "Blocks that were not kept"),
}
_TIERS: Final = ("ram", "disk")

_Key = tuple[str, str]
"""Metric, and the value of its label (empty: it has none)."""


class TierCounts:
    """Counters that go on when the engine, which counts from zero, starts again."""

    def __init__(self) -> None:
        self._before: dict[_Key, float] = {}
        self._latest: dict[_Key, float] = {}

    def seen(self, load: TierLoad) -> None:
        """Take in a load report."""
        counts = _counts(load)
        if any([counts.get(key, 0) < old for key, old in self._latest.items()]):
            self._before = self._totals()
        self._latest = counts

    def _totals(self) -> dict[_Key, float]:
        keys = self._before.keys() | self._latest.keys()
        return {key: self._before.get(key, 0) + self._latest.get(key, 0) for key in keys}

    def collect(self) -> Iterator[Metric]:
        """Since the gateway started."""
        totals = self._totals()
        for name, (_, text) in _ONE_EACH.items():
            yield CounterMetricFamily(f"headrace_{name}", text, value=totals.get((name, ""), 0))
        for table, label in ((_BY_TIER, "tier"), (_BY_REASON, "reason")):
            for name, (_, text) in table.items():
                family = CounterMetricFamily(f"headrace_{name}", text, labels=[label])
                for (metric, value), count in sorted(totals.items()):
                    if metric == name:
                        family.add_metric([value], count)
                yield family


def tier_gauges(load: TierLoad) -> Iterator[Metric]:
    """What the stores hold now."""
    for name, text, values in (
        ("kv_tier_bytes", "Bytes of stored KV blocks", (load.ram_bytes, load.disk_bytes)),
        ("kv_tier_quota_bytes", "What they may take", (load.ram_quota_bytes, load.disk_quota_bytes)),
        ("kv_tier_blocks", "Stored KV blocks", (load.ram_blocks, load.disk_blocks)),
    ):
        family = GaugeMetricFamily(f"headrace_{name}", text, labels=["tier"])
        for tier, value in zip(_TIERS, values, strict=True):
            family.add_metric([tier], value)
        yield family
    yield GaugeMetricFamily("headrace_kv_tier_queued_jobs", "Work that waits for the stores' thread", value=load.queued)
    yield GaugeMetricFamily("headrace_kv_tier_queued_bytes", "Memory that it keeps", value=load.queued_bytes)
    yield GaugeMetricFamily(
        "headrace_kv_tier_fetched_bytes", "Memory for what is read for sequences that wait", value=load.fetched_bytes
    )


def _counts(load: TierLoad) -> dict[_Key, float]:
    counts: dict[_Key, float] = {(name, ""): getattr(load, field) for name, (field, _) in _ONE_EACH.items()}
    for name, (field, _) in _BY_TIER.items():
        counts |= {(name, tier): getattr(load, f"{tier}_{field}") for tier in _TIERS}
    for name, (field, _) in _BY_REASON.items():
        counts |= {(name, reason): count for reason, count in getattr(load, field).items()}
    return counts
