"""Where a group's replicas come from: the configuration, DNS names, a watched file, the admin API."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from headrace.config.group_checks import url_problem
from headrace.config.groups import DnsConfig, GroupConfig, ReplicaConfig
from headrace.config.problems import ConfigProblems
from headrace.config.yaml_tree import MAX_TEXT_BYTES, parse_yaml
from headrace.engines.fleet.replica import ReplicaSource, ReplicaSpec
from headrace.engines.remote.connection import Address
from headrace.errors import ConfigError

_logger = logging.getLogger(__name__)

FILE_POLL_S: Final = 1.0
EMBEDDED: Final = "embedded"


class _ReplicaFile(msgspec.Struct, forbid_unknown_fields=True):
    replicas: list[ReplicaConfig]


def spec_of(replica: ReplicaConfig, source: ReplicaSource) -> ReplicaSpec:
    """A replica as its configuration says; it is known by host and port."""
    address = Address.of(replica.url)
    name = f"{address.host}:{address.port}{address.base_path}"
    return ReplicaSpec(name, replica.url, replica.zone, replica.weight, replica.draining, source)


def configured(config: GroupConfig) -> list[ReplicaSpec]:
    """The replicas that the configuration lists."""
    if config.kind == EMBEDDED:
        return [ReplicaSpec(EMBEDDED)]
    return [spec_of(replica, "config") for replica in config.replicas]


def read_replica_file(path: Path) -> list[ReplicaSpec]:
    """The replicas in a watched file. Raises ConfigError: it cannot be read, or is wrong."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or type(error).__name__}", where=str(path)) from error
    try:
        tree = parse_yaml(data, str(path)).value
        listed = msgspec.convert(tree, _ReplicaFile, strict=False).replicas
    except ConfigProblems as error:
        raise ConfigError(str(error)) from error
    except msgspec.ValidationError as error:
        raise ConfigError(str(error), where=str(path)) from error
    for replica in listed:
        problem = url_problem(replica.url)
        if problem is not None:
            raise ConfigError(f"url {problem}", where=str(path))
        if not 0.01 <= replica.weight <= 100:
            raise ConfigError(f"weight {replica.weight:g} is out of range (0.01 to 100)", where=str(path))
    return [spec_of(replica, "file") for replica in listed]


def file_mark(path: Path) -> object:
    """What changes when a file does."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


async def resolve(named: DnsConfig) -> list[ReplicaSpec]:
    """A replica for every address of a name. Raises OSError when it does not resolve."""
    address = Address.of(named.url)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    hosts = sorted({str(entry[4][0]) for entry in found})
    return [
        ReplicaSpec(
            f"{host}:{address.port}{address.base_path}",
            _at(named.url, address, host),
            named.zone,
            named.weight,
            source="dns",
        )
        for host in hosts
    ]


def merged(found: Mapping[str, Iterable[ReplicaSpec]]) -> dict[str, ReplicaSpec]:
    """All sources together, by name; the first that names a replica decides. Keys are sources in order."""
    together: dict[str, ReplicaSpec] = {}
    for specs in found.values():
        for spec in specs:
            together.setdefault(spec.name, spec)
    return together


def _at(url: str, address: Address, host: str) -> str:
    shown = f"[{host}]" if ":" in host else host
    scheme = "https" if address.tls else "http"
    return f"{scheme}://{shown}:{address.port}{address.base_path}"
