"""What must be right about groups beyond their shape. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from headrace.config.groups import GroupConfig
from headrace.config.problems import Problem
from headrace.config.schema import Config
from headrace.config.shape import nearest
from headrace.engines.remote.connection import Address

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KEY: Final = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")


def group_problems(config: Config, env: Mapping[str, str]) -> Iterator[Problem]:
    """Everything that is wrong with groups, and with what lanes say of them."""
    groups = config.groups
    embedded = [name for name, group in groups.items() if group.kind == "embedded"]
    if len(embedded) > 1:
        yield Problem(f"groups.{embedded[1]}.kind", f"there is one embedded engine, and {embedded[0]} has it")
    for name, group in groups.items():
        yield from _group(f"groups.{name}", name, group, env)
    if config.default_group is not None and config.default_group not in groups:
        yield Problem("default_group", _no_group(config, config.default_group))
    unnamed = len(groups) > 1 and config.default_group is None
    for name, lane in config.lanes.items():
        where = f"lanes.{name}"
        if lane.group is not None and lane.group not in groups:
            yield Problem(f"{where}.group", _no_group(config, lane.group))
        elif lane.group is None and unnamed:
            yield Problem(f"{where}.group", "is needed where there are several groups and no default_group")
        fallback = lane.fallback.group
        if fallback is not None and fallback not in groups:
            yield Problem(f"{where}.fallback.group", _no_group(config, fallback))
        elif fallback is not None and fallback == config.group_of(lane):
            yield Problem(f"{where}.fallback.group", f"{fallback} is the lane's own group")
        if lane.breaker.cool_down_s > lane.breaker.max_cool_down_s:
            yield Problem(f"{where}.breaker.cool_down_s", "is above max_cool_down_s")
    webhook = config.fleet.alert_webhook
    if webhook is not None and not webhook.startswith(("http://", "https://")):
        yield Problem("fleet.alert_webhook", "must look like http://HOST:PORT/PATH")


def _group(where: str, name: str, group: GroupConfig, env: Mapping[str, str]) -> Iterator[Problem]:
    if not _NAME.fullmatch(name):
        yield Problem(where, "a group's name is lower-case letters, digits, - and _, at most 63")
    listed = group.replicas or group.dns or group.file
    if group.kind == "embedded" and listed:
        yield Problem(f"{where}.replicas", "the embedded engine is its group's only replica")
    if group.kind != "embedded" and not group.model.strip():
        yield Problem(f"{where}.model", "is needed: the name that the engines know the model by")
    if group.min_in_flight > group.max_in_flight:
        yield Problem(f"{where}.min_in_flight", f"{group.min_in_flight} is above max_in_flight {group.max_in_flight}")
    if group.api_key is not None:
        if not _KEY.fullmatch(group.api_key):
            yield Problem(f"{where}.api_key", "must name an environment variable, as env:NAME")
        elif not env.get(group.api_key.removeprefix("env:")):
            yield Problem(f"{where}.api_key", f"environment variable {group.api_key[4:]} is not set")
    seen: set[str] = set()
    urls = [(f"replicas[{index}]", replica.url) for index, replica in enumerate(group.replicas)]
    urls += [(f"dns[{index}]", named.url) for index, named in enumerate(group.dns)]
    for key, url in urls:
        problem = url_problem(url)
        if problem is not None:
            yield Problem(f"{where}.{key}.url", problem)
        elif url in seen:
            yield Problem(f"{where}.{key}.url", "is there twice")
        seen.add(url)


def url_problem(url: str) -> str | None:
    """Why a replica cannot be at ``url``, or None."""
    try:
        Address.of(url)
    except ValueError:
        return f"must look like http://HOST:PORT, got {url[:64]!r}"
    return None


def _no_group(config: Config, name: str) -> str:
    known = f" (groups: {', '.join(config.groups)})" if config.groups else " (there are none)"
    return f"there is no group {name[:64]!r}{nearest(name, config.groups) or known}"
