"""The lanes of a simulated gateway: those of a configuration, or the default ones with the workload's own targets."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.bench.load.lengths import parse_lengths
from headrace.bench.load.workload import TrafficClass, Workload
from headrace.bench.planned import SloTarget
from headrace.config.load import build
from headrace.config.schema import Config
from headrace.errors import ConfigError
from headrace.lanes.lane import SLO, Lane

_OTHER_PRIORITY = 50
"""Of a workload's lane that is none of the default ones."""


def config_file(path: Path) -> Config:
    """A configuration's lanes, tenants and limits. Raises ConfigError; the process's environment is not looked at, so
    that a run depends on its files alone."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or type(error).__name__}", where="config") from error
    config, _ = build(data, name=str(path), env={}, overrides={})
    return config


def config_for(workload: Workload, folder: Path) -> Config:
    """The default lanes, with the targets and output lengths of the workload's classes, and a lane for each of its
    lanes that is not among them. Where several classes share a lane the tightest target holds."""
    config = Config()
    lanes = dict(config.lanes)
    by_lane: dict[str, list[TrafficClass]] = {}
    for traffic in workload.classes.values():
        by_lane.setdefault(traffic.lane or config.default_lane, []).append(traffic)
    for name, classes in by_lane.items():
        lane = lanes.get(name, Lane(priority=_OTHER_PRIORITY))
        outputs = [parse_lengths(one.output_length, folder=folder).mean() for one in classes if one.output_length]
        if outputs:
            lane = msgspec.structs.replace(lane, typical_output_tokens=max(1, round(sum(outputs) / len(outputs))))
        lanes[name] = msgspec.structs.replace(lane, slo=_tightest([one.slo for one in classes]))
    return msgspec.structs.replace(config, lanes=lanes)


def _tightest(targets: list[SloTarget]) -> SLO:
    def least(values: list[float | None]) -> float | None:
        return min([value for value in values if value is not None], default=None)

    return SLO(
        least([one.ttft_s for one in targets]),
        least([one.tpot_s for one in targets]),
        least([one.e2e_s for one in targets]),
    )
