"""The plug-in's metrics beside vLLM's own, in the same ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.kv.watermarks import LEVELS
from headrace.vllm.status import Status

PREFIX: Final = "headrace_vllm_"
_COUNTERS: Final = {
    "steps": "Steps that headrace's policies decided",
    "stock_steps": "Steps that vLLM decided by itself",
    "deviations": "Steps that vLLM made otherwise than planned",
    "failures": "Times that a policy failed and vLLM went on by itself",
    "victims": "Running requests that gave way to a more urgent one",
    "made_way": "Running requests that gave way for want of KV memory",
    "ignored_xargs": "Fields of requests that made no sense and were left out",
}


class StatusCollector(Collector):
    """Turns the latest status of every engine core into metrics. ``statuses`` is set by whoever asks for it."""

    def __init__(self) -> None:
        self.statuses: Sequence[Status] = ()

    def collect(self) -> Iterable[Metric]:
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["engine"])
            for engine, status in enumerate(self.statuses):
                counter.add_metric([str(engine)], getattr(status.counts, name))
            yield counter
        gauges: dict[str, tuple[str, Callable[[Status], float]]] = {
            "enabled": ("1 while headrace's policies decide", lambda s: float(s.enabled and not s.failed)),
            "decide_seconds": ("What deciding a step takes on average", lambda s: s.decide_s),
            "step_prediction_error": ("Typical relative error of predicted step times", lambda s: s.step_error),
            "batch_cap": ("Sequences beyond which a larger batch adds little (0: not known)", lambda s: s.batch_cap),
            "kv_budget_tokens": (
                "KV memory, tokens, what is shared counted as often as it is",
                lambda s: s.kv_budget_tokens,
            ),
            "kv_held_tokens": ("KV tokens that running requests are expected to hold", lambda s: s.kv_held_tokens),
            "kv_promised_tokens": ("The same with waiting requests", lambda s: s.kv_promised_tokens),
            "kv_drain_seconds": ("Time until long requests should be sent again (0: now)", lambda s: s.kv_drain_s),
            "kv_level": ("Level of KV memory: 0 normal, 1 warn, 2 refuse, 3 move", lambda s: LEVELS.index(s.kv_level)),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["engine"])
            for engine, status in enumerate(self.statuses):
                gauge.add_metric([str(engine)], value(status))
            yield gauge
        yield from self._lanes()

    def _lanes(self) -> Iterable[Metric]:
        for name, text, field in (
            ("running", "Running requests of a lane", "running_by_lane"),
            ("waiting", "Waiting requests of a lane", "waiting_by_lane"),
            ("lane_share", "A lane's share of engine time lately, 0 to 1", "lane_shares"),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["engine", "lane"])
            for engine, status in enumerate(self.statuses):
                for lane, value in getattr(status, field).items():
                    gauge.add_metric([str(engine), lane], value)
            yield gauge
