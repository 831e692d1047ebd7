"""What an engine's own /metrics say of its load: a few names out of Prometheus' text format. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_LINE: Final = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})?\s+(?P<value>\S+)")

_RUNNING: Final = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
)
_WAITING: Final = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
)
_KV_SHARE: Final = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_KNOWN: Final = frozenset((*_RUNNING, *_WAITING, *_KV_SHARE))


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """None: the engine does not say. ``kv_share`` is 0 to 1 of its KV memory, of its fullest part when it has
    several."""

    running: int | None = None
    waiting: int | None = None
    kv_share: float | None = None


def read_exposition(text: str) -> EngineFigures:
    """The figures in a scrape. Lines that are not understood are skipped; NaN and infinity say nothing."""
    found: dict[str, list[float]] = {}
    for name, value in _samples(text):
        found.setdefault(name, []).append(value)
    running = _first(found, _RUNNING)
    waiting = _first(found, _WAITING)
    shares = _first(found, _KV_SHARE)
    return EngineFigures(
        running=None if running is None else round(sum(running)),
        waiting=None if waiting is None else round(sum(waiting)),
        kv_share=None if shares is None else min(1.0, max(0.0, *shares, 0.0)),
    )


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        found = _LINE.match(line)
        if found is None or found["name"] not in _KNOWN:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            yield found["name"], value


def _first(found: dict[str, list[float]], names: tuple[str, ...]) -> list[float] | None:
    for name in names:
        if name in found:
            return found[name]
    return None
