"""From the configuration to the live values of scheduling, and which changes of it need a restart. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from headrace.config.schema import Config, EngineConfig, SchedulingConfig
from headrace.scheduling.knobs import SchedulingKnobs


def scheduling_knobs(config: Config) -> SchedulingKnobs:
    """The live set that a configuration stands for. A band without ``max_running`` is capped by its streams."""
    bands = config.engine.bands
    return SchedulingKnobs(
        **msgspec.structs.asdict(config.engine.scheduling),
        band_caps=tuple(band.max_sequences if band.max_running is None else band.max_running for band in bands),
        lane_caps={name: lane.max_running for name, lane in config.lanes.items() if lane.max_running is not None},
        lane_weights={name: lane.weight for name, lane in config.lanes.items()},
    )


def needs_restart(started: Config, fresh: Config) -> list[str]:
    """What keeps ``fresh`` from being put in force in a process that began with ``started``, in words; empty when
    nothing does. Scheduling is live, except that no step can hold more tokens than memory was laid out for."""
    fixed_before, fixed_after = _fixed(started), _fixed(fresh)
    found = [key for key in fixed_before if fixed_before[key] != fixed_after[key]]
    return [*found, *_beyond_start(started, fresh)]


def _fixed(config: Config) -> dict[str, object]:
    """Values that hold as long as the process lives, by key."""
    engine = msgspec.structs.replace(
        config.engine,
        scheduling=SchedulingConfig(),
        bands=tuple(msgspec.structs.replace(band, max_running=None) for band in config.engine.bands),
    )
    return {
        **{f"engine.{key}": getattr(engine, key) for key in EngineConfig.__struct_fields__},
        "model.source": config.model.source,
        "server.host": config.server.host,
        "server.port": config.server.port,
        "server.store_dir": config.server.store_dir,
        "server.max_stored_completions": config.server.max_stored_completions,
        "server.tls (whether there is a certificate)": config.server.tls.certificate is not None,
        "groups (whether there are any, and which is embedded)": (
            bool(config.groups),
            [name for name, group in config.groups.items() if group.kind == "embedded"],
        ),
        "fleet.alert_webhook": config.fleet.alert_webhook,
    }


def _beyond_start(started: Config, fresh: Config) -> Iterator[str]:
    at_start, wanted = started.engine.scheduling.step_tokens, fresh.engine.scheduling.step_tokens
    if wanted > at_start:
        yield f"engine.scheduling.step_tokens (raised above its value at start, {at_start})"
