"""Checks that need more than one value, or a value's range: what the shape alone does not say.

Pure: an environment is handed in only to see that the variables that hold API keys are set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from headrace.config.fields import Note, notes
from headrace.config.group_checks import group_problems
from headrace.config.model_names import served_model_names
from headrace.config.problems import Problem
from headrace.config.schema import Config, Tenant
from headrace.config.shape import nearest
from headrace.errors import ConfigError
from headrace.kv.precision import at_least
from headrace.lanes.lane import Lane
from headrace.lanes.tenants import configured_digest
from headrace.scheduling.knobs import marks_problem

RESERVED_SEGMENTS: Final = ("v1", "health", "ready", "metrics", "tokenize", "detokenize", "admin")
"""Path segments of headrace's own API; a lane's prefix must not contain them."""

_LANE_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_TENANT_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")


def validate(config: Config, env: Mapping[str, str]) -> list[Problem]:
    """Everything that is wrong with a configuration of the right shape; empty when nothing is.

    ``env`` is where ``env:NAME`` keys are looked up. No key is ever part of a message.
    """
    return [
        *range_problems(config),
        *_texts(config),
        *_bands(config),
        *_tiers(config),
        *scheduling_problems(config),
        *_lanes(config),
        *group_problems(config, env),
        *_keys(config, env),
        *_tls(config),
        *_tenants(config),
    ]


def range_problems(config: Config) -> list[Problem]:
    """Every number that is outside its range."""
    return list(_ranges(config, "", notes()))


def _ranges(value: object, where: str, table: Mapping[type, Mapping[str, Note]]) -> Iterator[Problem]:
    """Every number outside its range, in the struct ``value`` and what it holds."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            item = getattr(value, name)
            here = f"{where}.{name}" if where else name
            if isinstance(item, int | float) and not isinstance(item, bool):
                note = table[type(value)][name]
                if not note.holds(item):
                    yield Problem(here, f"{item:g} is out of range ({note.range_text})")
            else:
                yield from _ranges(item, here, table)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _ranges(item, f"{where}.{key}", table)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _ranges(item, f"{where}[{index}]", table)


def _texts(config: Config) -> Iterator[Problem]:
    texts = {
        "model.source": config.model.source,
        "model.name": config.model.name,
        "server.host": config.server.host,
        "server.store_dir": config.server.store_dir,
        "engine.kv_memory.spill_dir": config.engine.kv_memory.spill_dir,
        "engine.kv_tiers.disk_path": config.engine.kv_tiers.disk_path,
    }
    texts |= {f"model.aliases[{index}]": alias for index, alias in enumerate(config.model.aliases)}
    for where, text in texts.items():
        if text is not None and not text.strip():
            yield Problem(where, "must not be empty")


def _bands(config: Config) -> Iterator[Problem]:
    bands = config.engine.bands
    if not bands:
        yield Problem("engine.bands", "at least one band is needed")
    for index, band in enumerate(bands):
        if band.layout == "streaming" and config.engine.kv_memory.spill_dir is None:
            yield Problem(
                f"engine.bands[{index}].layout", "streaming keeps parked sequences in files: set kv_memory.spill_dir"
            )
    for index in range(1, len(bands)):
        below, here = bands[index - 1], bands[index]
        finer = here.kv_dtype != below.kv_dtype and at_least(here.kv_dtype, below.kv_dtype)
        if here.max_context_tokens < below.max_context_tokens or (
            here.max_context_tokens == below.max_context_tokens and not finer
        ):
            yield Problem(
                f"engine.bands[{index}].max_context_tokens",
                f"bands must ascend: {here.max_context_tokens} is not above {below.max_context_tokens}"
                + (" (of one length, the finer kv_dtype comes second)" if here.kv_dtype != below.kv_dtype else ""),
            )


def _tiers(config: Config) -> Iterator[Problem]:
    tiers = config.engine.kv_tiers
    if tiers.disk_path is not None and tiers.ram_bytes == 0:
        yield Problem("engine.kv_tiers.ram_bytes", "must be above 0 with a disk_path: blocks go to disk from RAM")
    if (tiers.ram_bytes or tiers.disk_path is not None) and not config.engine.prefix_cache:
        where = "ram_bytes" if tiers.ram_bytes else "disk_path"
        yield Problem(f"engine.kv_tiers.{where}", "stores need engine.prefix_cache: it finds what they have")


def scheduling_problems(config: Config) -> Iterator[Problem]:
    """Scheduling values that are each within their range and do not fit together."""
    scheduling = config.engine.scheduling
    if scheduling.min_prefill_tokens > scheduling.max_prefill_tokens:
        yield Problem(
            "engine.scheduling.min_prefill_tokens",
            f"{scheduling.min_prefill_tokens} is above max_prefill_tokens {scheduling.max_prefill_tokens}",
        )
    marks = marks_problem(scheduling.kv_warn, scheduling.kv_refuse, scheduling.kv_move, scheduling.kv_gap)
    if marks is not None:
        yield Problem("engine.scheduling.kv_warn", marks)
    for index, band in enumerate(config.engine.bands):
        if band.max_running is not None and band.max_running > band.max_sequences:
            yield Problem(
                f"engine.bands[{index}].max_running",
                f"{band.max_running} is above max_sequences {band.max_sequences}",
            )


def _lanes(config: Config) -> Iterator[Problem]:
    if not config.lanes:
        yield Problem("lanes", "at least one lane is needed")
    elif config.default_lane not in config.lanes:
        yield Problem("default_lane", _no_lane(config, config.default_lane))
    owners: dict[tuple[str, object], str] = {}
    for name, lane in config.lanes.items():
        where = f"lanes.{name}"
        if not _LANE_NAME.fullmatch(name):
            yield Problem(where, "a lane's name is lower-case letters, digits, - and _, at most 63")
        yield from _lane_limits(where, lane)
        yield from _overload(config, where, lane)
        if config.engine.bands and not any(at_least(band.kv_dtype, lane.min_kv_dtype) for band in config.engine.bands):
            yield Problem(f"{where}.min_kv_dtype", f"no band keeps KV at {lane.min_kv_dtype} or finer")
        for what, key, value in _recognised_by(lane):
            owner = owners.setdefault((what, value), name)
            if owner != name:
                yield Problem(f"{where}.match.{key}", f"{what} {value} is already lane {owner}'s")


def _lane_limits(where: str, lane: Lane) -> Iterator[Problem]:
    if lane.max_tokens is not None and (lane.default_max_tokens or 0) > lane.max_tokens:
        yield Problem(f"{where}.default_max_tokens", f"{lane.default_max_tokens} is above max_tokens {lane.max_tokens}")
    over = lane.match.prompt_tokens_over
    if over is not None and lane.max_prompt_tokens is not None and lane.max_prompt_tokens <= over:
        yield Problem(
            f"{where}.max_prompt_tokens",
            f"{lane.max_prompt_tokens} leaves nothing of the prompts over {over} that the lane is matched by",
        )
    for index, alias in enumerate(lane.match.model_aliases):
        if not alias.strip():
            yield Problem(f"{where}.match.model_aliases[{index}]", "must not be empty")
    for index, prefix in enumerate(lane.match.path_prefixes):
        here = f"{where}.match.path_prefixes[{index}]"
        if not _PREFIX.fullmatch(prefix):
            yield Problem(here, f"must look like /name (begin with /, not end with it), got {prefix[:64]!r}")
            continue
        taken = sorted(set(prefix.split("/")).intersection(RESERVED_SEGMENTS))
        if taken:
            yield Problem(here, f"must not contain /{taken[0]}, which is headrace's own")


def _overload(config: Config, where: str, lane: Lane) -> Iterator[Problem]:
    fallback = lane.fallback
    served = served_model_names(config)
    if fallback.model is not None and not config.groups and fallback.model not in served:
        yield Problem(
            f"{where}.fallback.model",
            f"there is no model {fallback.model[:64]!r} to fall back to: only the served model exists"
            f" ({', '.join(served)})",
        )
    if lane.overload == "degrade" and fallback.max_tokens is None:
        yield Problem(f"{where}.fallback.max_tokens", "overload: degrade needs it, else nothing would be cheaper")
    if fallback.max_tokens is not None and lane.max_tokens is not None and fallback.max_tokens >= lane.max_tokens:
        yield Problem(
            f"{where}.fallback.max_tokens",
            f"{fallback.max_tokens} is not below max_tokens {lane.max_tokens}: nothing would be cheaper",
        )


def _recognised_by(lane: Lane) -> Iterator[tuple[str, str, object]]:
    """What only one lane may have: in words, its key, the value."""
    for prefix in lane.match.path_prefixes:
        yield "path prefix", "path_prefixes", prefix
    for alias in lane.match.model_aliases:
        yield "model alias", "model_aliases", alias
    if lane.match.prompt_tokens_over is not None:
        yield "prompt length over", "prompt_tokens_over", lane.match.prompt_tokens_over


def _tenants(config: Config) -> Iterator[Problem]:
    for name, tenant in config.tenants.items():
        where = f"tenants.{name}"
        if not _TENANT_NAME.fullmatch(name):
            yield Problem(where, "a tenant's name is letters, digits, '.', - and _, at most 63")
        yield from _tenant_lanes(config, where, tenant)


def _tls(config: Config) -> Iterator[Problem]:
    tls = config.server.tls
    for name, value, other in (("key", tls.key, tls.certificate), ("certificate", tls.certificate, tls.key)):
        if value is None and other is not None:
            yield Problem(f"server.tls.{name}", "a certificate and its key are needed together")
        elif value is not None and not value.strip():
            yield Problem(f"server.tls.{name}", "must not be empty")


def _keys(config: Config, env: Mapping[str, str]) -> Iterator[Problem]:
    """Keys that cannot be read, and keys that would say two things at once."""
    owners: dict[bytes, str] = {}
    keys = {"server.admin_keys": config.server.admin_keys}
    keys |= {f"tenants.{name}.api_keys": tenant.api_keys for name, tenant in config.tenants.items()}
    for where, entries in keys.items():
        for index, entry in enumerate(entries):
            here = f"{where}[{index}]"
            try:
                digest = configured_digest(entry, env)
            except ConfigError as error:
                yield Problem(here, str(error))
                continue
            owner = owners.setdefault(digest, here)
            if owner != here:
                yield Problem(here, f"the same key as {owner}")


def _tenant_lanes(config: Config, where: str, tenant: Tenant) -> Iterator[Problem]:
    for index, lane in enumerate(tenant.lanes):
        if lane not in config.lanes:
            yield Problem(f"{where}.lanes[{index}]", _no_lane(config, lane))
    default = tenant.default_lane
    if default is None:
        return
    if default not in config.lanes:
        yield Problem(f"{where}.default_lane", _no_lane(config, default))
    elif tenant.lanes and default not in tenant.lanes:
        yield Problem(f"{where}.default_lane", f"{default} is not among the tenant's lanes")


def _no_lane(config: Config, name: str) -> str:
    hint = nearest(name, config.lanes) or f" (lanes: {', '.join(config.lanes)})"
    return f"there is no lane {name[:64]!r}{hint}"
