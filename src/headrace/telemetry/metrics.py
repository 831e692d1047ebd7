"""Prometheus metrics, in a registry of their own.

Labels are bounded: lanes come from the configuration (``none`` before a lane is known), outcomes from
``Exchange``, decisions and shed reasons from ``admission``. What holds at the moment (running, waiting, KV) is read
when somebody scrapes (``telemetry.moment``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from headrace.admission.front import Verdict
from headrace.lanes.lane import SLO
from headrace.messages.engine import EngineLoad, Ready
from headrace.telemetry.goodput import Goodput, met_slo
from headrace.telemetry.moment import EngineCounts, MomentCollector, Sources
from headrace.telemetry.tenant_metrics import TenantMetrics
from headrace.telemetry.timing import ITL_BUCKETS_S, RequestTiming

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0,
    20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
_LABELS = ("lane", "outcome")
NO_LANE = "none"


class _ItlCollector(Collector):
    """The ITL histogram, filled with whole buckets per request: observing each token would cost more than
    sending it."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], tuple[list[int], float]] = {}

    def add(self, lane: str, outcome: str, timing: RequestTiming) -> None:
        buckets, total_s = self._series.get((lane, outcome), ([0] * len(timing.gap_buckets), 0.0))
        summed = [old + new for old, new in zip(buckets, timing.gap_buckets, strict=True)]
        self._series[lane, outcome] = (summed, total_s + timing.gap_sum_s)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "headrace_itl_seconds", "Gap between one token and the next, pooled over requests", labels=_LABELS
        )
        bounds = [*(str(bound) for bound in ITL_BUCKETS_S), "+Inf"]
        for labels, (buckets, total_s) in sorted(self._series.items()):
            cumulative = 0
            rows: list[tuple[str, float]] = []
            for bound, count in zip(bounds, buckets, strict=True):
                cumulative += count
                rows.append((bound, cumulative))
            family.add_metric(labels, rows, total_s)
        yield family


class Metrics:
    """Every metric that headrace exposes, and how requests are recorded in them."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._restarts = 0
        self._last_ready: Ready | None = None
        self._counts = EngineCounts()
        self._itl = _ItlCollector()
        self.registry.register(self._itl)
        ProcessCollector(registry=self.registry)
        Info("headrace_build", "Version of headrace", registry=self.registry).info({"version": version})
        self._ttft = self._latency("headrace_ttft_seconds", "Request sent to first token")
        self._tpot = self._latency("headrace_tpot_seconds", "Time per token after the first, per request")
        self._queue_wait = self._latency("headrace_queue_wait_seconds", "Arrival to the first step")
        self._e2e = self._latency("headrace_e2e_seconds", "Request sent to last token")
        self._requests = Counter("headrace_requests", "Requests ended", _LABELS, registry=self.registry)
        self.tenants = TenantMetrics(self.registry)
        self.goodput = Goodput()
        self._good = Counter(
            "headrace_requests_good", "Requests that met their whole SLO", ["lane"], registry=self.registry
        )
        self._violations = Counter(
            "headrace_requests_violated",
            "Requests that missed a target, failed or were shed",
            ["lane"],
            registry=self.registry,
        )
        self._tuner_moves = Counter(
            "headrace_tuner_moves", "What the tuner did with knobs", ["knob", "outcome"], registry=self.registry
        )
        self._tuner_reward = Gauge(
            "headrace_tuner_reward",
            "Good requests per second less the penalty for violations, in the tuner's latest window",
            registry=self.registry,
        )
        self._prompt_tokens = Counter("headrace_prompt_tokens", "Prompt tokens", ["lane"], registry=self.registry)
        self._generated = Counter("headrace_generated_tokens", "Tokens generated", ["lane"], registry=self.registry)
        self._knob_changes = Counter(
            "headrace_knob_changes",
            "Times that a knob of scheduling got another value",
            ["knob"],
            registry=self.registry,
        )
        self._kv_levels = Counter(
            "headrace_kv_level_entered",
            "Times that KV memory came to a level, from above or below",
            ["level"],
            registry=self.registry,
        )
        self._admissions = Counter(
            "headrace_admissions", "What admission decided", ["lane", "decision"], registry=self.registry
        )
        self._sheds = Counter(
            "headrace_sheds", "Requests shed by admission, by reason", ["lane", "reason"], registry=self.registry
        )
        self._predicted_ttft = Histogram(
            "headrace_predicted_ttft_seconds",
            "Time to first token as predicted at admission, of shed requests too",
            ["lane"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._step = Histogram(
            "headrace_engine_step_seconds",
            "Duration of one engine step",
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )

    def watch(self, sources: Sources) -> None:
        """Expose gauges read from ``sources`` at every scrape. Call once."""
        self.registry.register(MomentCollector(sources, lambda: self._seen_restarts(sources), self._counts))

    def watch_fleet(self, collector: Collector) -> None:
        """Expose a fleet's metrics (``telemetry.fleet_metrics``). Call once."""
        self.registry.register(collector)

    def request_ended(
        self,
        lane: str | None,
        outcome: str,
        *,
        prompt_tokens: int,
        timing: RequestTiming | None,
        ended_s: float,
        slo: SLO | None = None,
    ) -> None:
        """Record one request. ``timing`` is None when it never reached the engine, ``slo`` when it ended before its
        lane was known."""
        label = lane or NO_LANE
        self._requests.labels(label, outcome).inc()
        if slo is not None:
            self._judged(label, met_slo(slo, outcome, timing, ended_s), prompt_tokens)
        if timing is None:
            return
        self._prompt_tokens.labels(label).inc(prompt_tokens)
        self._generated.labels(label).inc(timing.tokens)
        self._e2e.labels(label, outcome).observe(ended_s - timing.arrived_s)
        if timing.ttft_s is not None:
            self._ttft.labels(label, outcome).observe(timing.ttft_s)
        if timing.tpot_s is not None:
            self._tpot.labels(label, outcome).observe(timing.tpot_s)
        if timing.queue_wait_s is not None:
            self._queue_wait.labels(label, outcome).observe(timing.queue_wait_s)
        if timing.gap_count:
            self._itl.add(label, outcome, timing)

    def _judged(self, lane: str, good: bool | None, prompt_tokens: int) -> None:
        if good is not None:
            self.goodput.ended(lane, good=good, prompt_tokens=prompt_tokens)
            (self._good if good else self._violations).labels(lane).inc()

    def admission_decided(self, lane: str, verdict: Verdict) -> None:
        """Record what admission made of one request."""
        self.goodput.arrived += 1
        self._admissions.labels(lane, verdict.name).inc()
        if verdict.decision.action == "shed":
            self._sheds.labels(lane, verdict.decision.reason).inc()
        if verdict.predicted is not None:
            self._predicted_ttft.labels(lane).observe(verdict.predicted.ttft_s)

    def step_ended(self, load: EngineLoad) -> None:
        """Record one engine step."""
        self._step.observe(load.step_s)
        self._counts.seen(load)

    def kv_level_entered(self, level: str, times: int) -> None:
        """Count changes of KV memory's level."""
        if times:
            self._kv_levels.labels(level).inc(times)

    def knobs_changed(self, names: Iterable[str]) -> None:
        """Count knobs that have another value than before."""
        for name in names:
            self._knob_changes.labels(name).inc()

    def tuner_moved(self, knob: str, outcome: str) -> None:
        """Count what the tuner did with a knob."""
        self._tuner_moves.labels(knob, outcome).inc()

    def tuner_earned(self, reward: float) -> None:
        """Note the reward of the tuner's latest window."""
        self._tuner_reward.set(reward)

    def engine_seen(self, ready: Ready | None) -> None:
        """Note the engine's Ready; a new one after an older one is a restart."""
        if ready is None or ready is self._last_ready:
            return
        if self._last_ready is not None:
            self._restarts += 1
        self._last_ready = ready

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    def _seen_restarts(self, sources: Sources) -> int:
        self.engine_seen(sources.ready())
        return self._restarts

    def _latency(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=_LATENCY_BUCKETS_S, registry=self.registry)
