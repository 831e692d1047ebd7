"""What holds at the moment of a scrape: sequences by lane, what was learned of lanes, the engine's latest report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.admission.decide import LaneLoad
from headrace.admission.lengths import OutputLength
from headrace.kv.watermarks import LEVELS
from headrace.messages.engine import EngineLoad, Ready
from headrace.scheduling.knobs import Strategy
from headrace.telemetry.tiers import TierCounts, tier_gauges

OTHER: Final = "other"
_MOST_REASONS: Final = 16
_REASON_END: Final = re.compile("[:;]")
_STRATEGIES: Final = frozenset(
    [*get_args(Strategy), *(f"auto:{strategy}" for strategy in get_args(Strategy) if strategy != "auto")]
)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where scrape-time values come from: sequences by lane, the engine's load and its Ready (None: down), lanes'
    learned output lengths, and the typical relative error of their TTFT predictions."""

    lanes: Callable[[], Mapping[str, LaneLoad]]
    load: Callable[[], EngineLoad | None]
    ready: Callable[[], Ready | None]
    lengths: Callable[[], Mapping[str, OutputLength]] = dict
    ttft_errors: Callable[[], Mapping[str, float]] = dict


class Counts(NamedTuple):
    """What an engine counts, under the names of ``EngineLoad``."""

    moves: int = 0
    victims: int = 0
    cut_steps: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefix_saved_s: float = 0.0
    kv_parked: int = 0
    kv_spills: int = 0
    kv_dropped: int = 0
    kv_conversions: int = 0

    @classmethod
    def of(cls, load: EngineLoad) -> Counts:
        return cls(*[getattr(load, name) for name in cls._fields])


class EngineCounts:
    """The engine's own counts, carried on when its process starts again from 0. Counts of the last moments before
    it died, which no report brought, are lost."""

    def __init__(self) -> None:
        self._before = self._latest = Counts()

    def seen(self, load: EngineLoad) -> None:
        """Take in a load report."""
        counts = Counts.of(load)
        if any(new < old for new, old in zip(counts, self._latest, strict=True)):
            self._before = self.totals
        self._latest = counts

    @property
    def totals(self) -> Counts:
        """Since the gateway started."""
        return Counts._make([old + new for old, new in zip(self._before, self._latest, strict=True)])


class MomentCollector(Collector):
    """Reads ``Sources`` at every scrape."""

    def __init__(self, sources: Sources, restarts: Callable[[], int], counts: EngineCounts) -> None:
        self._sources = sources
        self._restarts = restarts
        self._counts = counts
        self._tier_counts = TierCounts()
        self._reasons: set[str] = set()

    def collect(self) -> Iterator[Metric]:
        yield from self._lanes()
        up = self._sources.ready() is not None
        yield GaugeMetricFamily("headrace_engine_up", "1 while the engine is ready", value=float(up))
        yield CounterMetricFamily(
            "headrace_engine_restarts", "Times the engine became ready again", value=self._restarts()
        )
        load = self._sources.load()
        if load is not None:
            self._counts.seen(load)
            yield from _gauges(load)
            yield from _counters(self._counts.totals)
            yield _shares(load)
            yield _kv_level(load)
            yield _kv_places(load)
            if load.tiers is not None:
                self._tier_counts.seen(load.tiers)
                yield from tier_gauges(load.tiers)
                yield from self._tier_counts.collect()
            if load.strategy:
                yield self._strategy(load)

    def _lanes(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("headrace_requests_running", "Sequences generating tokens", labels=["lane"])
        waiting = GaugeMetricFamily(
            "headrace_requests_waiting", "Sequences admitted, without a token yet", labels=["lane"]
        )
        for lane, count in sorted(self._sources.lanes().items()):
            running.add_metric([lane], count.running)
            waiting.add_metric([lane], count.held + count.waiting)
        yield running
        yield waiting
        lengths = GaugeMetricFamily(
            "headrace_expected_output_tokens",
            "Learned length of answers: their recency-weighted mean, and what nine of ten do not exceed",
            labels=["lane", "statistic"],
        )
        for lane, length in sorted(self._sources.lengths().items()):
            lengths.add_metric([lane, "mean"], length.expected_tokens)
            lengths.add_metric([lane, "p90"], length.likely_tokens)
        yield lengths
        errors = GaugeMetricFamily(
            "headrace_ttft_prediction_error_ratio",
            "Typical relative error of the latest predictions of time to first token, 1 at most",
            labels=["lane"],
        )
        for lane, error in sorted(self._sources.ttft_errors().items()):
            errors.add_metric([lane], error)
        yield errors

    def _strategy(self, load: EngineLoad) -> Metric:
        """Of a reason, the kind of traffic that it begins with; its figures would be labels without end, and so
        only so many become labels at all."""
        reason = _REASON_END.split(load.reason, maxsplit=1)[0].strip()[:80]
        if reason not in self._reasons and len(self._reasons) >= _MOST_REASONS:
            reason = OTHER
        self._reasons.add(reason)
        family = GaugeMetricFamily(
            "headrace_scheduling_strategy",
            "1 for the strategy that decided the last step, and why it was chosen",
            labels=["strategy", "reason"],
        )
        family.add_metric([load.strategy if load.strategy in _STRATEGIES else OTHER, reason], 1)
        return family


def _gauges(load: EngineLoad) -> Iterator[Metric]:
    ratio = load.kv_used_tokens / load.kv_total_tokens if load.kv_total_tokens else 0.0
    for name, text, value in (
        ("engine_threads", "Threads that the last step was computed with", load.threads),
        (
            "step_prediction_error_ratio",
            "Typical relative error of the engine's latest predictions of step time",
            load.step_error,
        ),
        ("batch_cap", "Sequences beyond which a larger batch only adds step time (0: not known)", load.batch_cap),
        ("slot_fragmentation_ratio", "Holes among the streams in use, of the worst band", load.fragmentation),
        ("parked_sequences", "Preempted sequences whose KV waits outside the streams", load.parked),
        ("parked_bytes", "Host memory that the KV of parked sequences takes", load.parked_bytes),
        ("kv_budget_tokens", "KV cells that sequences may hold together", load.kv_budget_tokens),
        ("kv_held_tokens", "KV cells that running sequences are expected to hold in the end", load.kv_held_tokens),
        ("kv_promised_tokens", "The same with sequences that wait in the engine", load.kv_promised_tokens),
        ("kv_drain_seconds", "Predicted time until long requests are taken again", load.kv_drain_s),
        ("kv_waste_ratio", "Cells of used streams that hold nothing", load.kv_waste),
        ("kv_used_tokens", "KV cells in use", load.kv_used_tokens),
        ("kv_used_bytes", "Bytes of KV memory in use", load.kv_used_bytes),
        ("kv_used_ratio", "KV cells in use, of all", ratio),
        ("prefix_idle_streams", "Streams that keep the KV of a sequence that has ended", load.idle_residents),
        ("prefix_idle_tokens", "KV cells of sequences that have ended", load.idle_resident_tokens),
    ):
        yield GaugeMetricFamily(f"headrace_{name}", text, value=value)


def _shares(load: EngineLoad) -> Metric:
    family = GaugeMetricFamily(
        "headrace_lane_engine_ratio", "Share of engine time that a lane had in the last seconds", labels=["lane"]
    )
    for lane, share in sorted(load.lane_shares.items()):
        family.add_metric([lane], share)
    return family


def _kv_level(load: EngineLoad) -> Metric:
    family = GaugeMetricFamily("headrace_kv_level", "1 for the level of KV memory that holds", labels=["level"])
    for level in LEVELS:
        family.add_metric([level], float(level == load.kv_level))
    return family


def _kv_places(load: EngineLoad) -> Metric:
    family = GaugeMetricFamily(
        "headrace_kv_place_bytes",
        "Bytes of KV by place: streams that somebody runs in, streams that keep what an ended sequence left, host"
        " memory and files of parked sequences",
        labels=["place"],
    )
    per_token = load.kv_total_bytes / load.kv_total_tokens if load.kv_total_tokens else 0.0
    family.add_metric(["live"], load.kv_used_bytes)
    family.add_metric(["idle"], load.idle_resident_tokens * per_token)
    family.add_metric(["ram"], load.parked_bytes)
    family.add_metric(["disk"], load.spilled_bytes)
    return family


def _counters(counts: Counts) -> Iterator[Metric]:
    for name, text, value in (
        ("slot_moves", "Sequences moved to another stream to close a hole", counts.moves),
        ("preemptions", "Running sequences that had to give up their stream", counts.victims),
        ("cut_steps", "Steps ended early for something urgent", counts.cut_steps),
        ("prefix_query_tokens", "Prompt tokens of sequences that began", counts.prefix_query_tokens),
        ("prefix_hit_tokens", "Prompt tokens that did not have to be computed", counts.prefix_hit_tokens),
        ("prefix_saved_seconds", "Engine time that cached prompt tokens saved, by prediction", counts.prefix_saved_s),
        ("kv_parked", "Running sequences that were parked for want of KV memory", counts.kv_parked),
        ("kv_spills", "Parked KV that went on to a file", counts.kv_spills),
        ("kv_dropped", "Parked KV that was lost and is computed again", counts.kv_dropped),
        ("kv_conversions", "Streams of KV converted from another band's precision", counts.kv_conversions),
    ):
        yield CounterMetricFamily(f"headrace_{name}", text, value=value)
