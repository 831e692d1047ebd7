"""Metrics of groups and replicas, read from the fleet when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.engines.fleet.fleet import Fleet

_STATES = {"closed": 0, "half_open": 1, "open": 2}


class FleetCollector(Collector):
    """``lanes`` are the configured lanes."""

    def __init__(self, fleet: Fleet, lanes: Callable[[], Iterator[str]], clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._lanes = lanes
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        yield from self._replicas()
        yield from self._counts()
        degraded = GaugeMetricFamily(
            "headrace_lane_degraded", "Whether a lane is in degraded mode: its group cannot serve it", labels=["lane"]
        )
        for lane in self._lanes():
            degraded.add_metric([lane], 0 if self._fleet.not_served(lane) is None else 1)
        yield degraded

    def _replicas(self) -> Iterator[Metric]:
        labels = ["group", "replica"]
        up = GaugeMetricFamily("headrace_replica_up", "Whether a replica is well and not draining", labels=labels)
        running = GaugeMetricFamily("headrace_replica_in_flight", "Requests that a replica has", labels=labels)
        limit = GaugeMetricFamily("headrace_replica_limit", "Requests that it may have at once now", labels=labels)
        kv = GaugeMetricFamily(
            "headrace_replica_kv_ratio", "Share of its KV memory in use, where it says so", labels=labels
        )
        waiting = GaugeMetricFamily("headrace_group_waiting", "Requests in a group's line", labels=["group"])
        state = GaugeMetricFamily(
            "headrace_breaker_state", "0 closed, 1 half open, 2 open", labels=["group", "replica", "lane"]
        )
        now_s = self._clock()
        for name, group in self._fleet.groups.items():
            waiting.add_metric([name], group.waiting)
            for replica in group.replicas.values():
                where = [name, replica.name]
                well = replica.engine.ready is not None and replica.health.healthy(now_s)
                up.add_metric(where, 1 if well and not replica.spec.draining else 0)
                running.add_metric(where, replica.in_flight)
                limit.add_metric(where, replica.places())
                if replica.figures is not None and replica.figures.kv_share is not None:
                    kv.add_metric(where, replica.figures.kv_share)
                for lane, breaker in replica.breakers.items():
                    state.add_metric([*where, lane], _STATES[breaker.state])
        yield from (up, running, limit, kv, waiting, state)

    def _counts(self) -> Iterator[Metric]:
        counts = self._fleet.counts
        tables = (
            ("headrace_attempts", "What came of requests to replicas", ["group", "outcome"], counts.attempts),
            ("headrace_tries_again", "Further tries: retry, hedge, continue", ["group", "how"], counts.again),
            ("headrace_routes", "Why a replica was chosen", ["group", "reason"], counts.routes),
            (
                "headrace_breaker_transitions",
                "Changes of breakers, by the new state",
                ["group", "lane", "state"],
                counts.transitions,
            ),
        )
        for name, text, labels, table in tables:
            family = CounterMetricFamily(name, text, labels=labels)
            for key, count in sorted(table.items()):
                family.add_metric(list(key), count)
            yield family
        family = CounterMetricFamily("headrace_degraded_requests", "Requests served in degraded mode", labels=["lane"])
        for lane, count in sorted(counts.degraded.items()):
            family.add_metric([lane], count)
        yield family
        alerts = CounterMetricFamily("headrace_alerts", "Alerts to the webhook", labels=["outcome"])
        alerts.add_metric(["sent"], self._fleet.alerts.sent)
        alerts.add_metric(["failed"], self._fleet.alerts.failed)
        yield alerts
