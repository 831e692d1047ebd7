"""Keys that stand in files: ``file:PATH`` entries are replaced by what the file holds, before anything else is checked.

One key a line, as it is or as ``sha256:HEX``; empty lines and lines that begin with ``#`` are skipped. The files are
read at start and at every reload, so a new key is written beside the old one, put in force, and the old one removed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from headrace.config.problems import Problem
from headrace.config.schema import Config
from headrace.errors import ConfigError
from headrace.lanes.tenants import DIGEST_PREFIX, ENV_PREFIX, FILE_PREFIX, configured_digest

MAX_FILE_BYTES: Final = 1024 * 1024


def with_key_files(config: Config) -> tuple[Config, list[Problem]]:
    """The configuration with the digests of the keys in files, and what is wrong with the files. An entry whose file
    is wrong is left out. No key is ever part of a message."""
    problems: list[Problem] = []
    replace = msgspec.structs.replace
    tenants = {
        name: replace(tenant, api_keys=_read_all(tenant.api_keys, f"tenants.{name}.api_keys", problems))
        for name, tenant in config.tenants.items()
    }
    admin_keys = _read_all(config.server.admin_keys, "server.admin_keys", problems)
    return replace(config, tenants=tenants, server=replace(config.server, admin_keys=admin_keys)), problems


def _read_all(entries: tuple[str, ...], where: str, problems: list[Problem]) -> tuple[str, ...]:
    found: list[str] = []
    for index, entry in enumerate(entries):
        if not entry.startswith(FILE_PREFIX):
            found.append(entry)
            continue
        try:
            found += _keys_in(entry.removeprefix(FILE_PREFIX))
        except ConfigError as error:
            problems.append(Problem(f"{where}[{index}]", str(error)))
    return tuple(found)


def _keys_in(name: str) -> list[str]:
    """The digests of a file's keys, in the form of the configuration. Raises ConfigError."""
    if not name:
        raise ConfigError("file: needs the path of a file after it")
    path = Path(name).expanduser()
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise ConfigError(f"the key file {name[:256]} cannot be read: {reason}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the key file {name[:256]} is larger than {MAX_FILE_BYTES} bytes")
    found: list[str] = []
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if key.startswith((ENV_PREFIX, FILE_PREFIX)):
            raise ConfigError(f"the key file {name[:256]} line {number}: expected a key, or sha256: and its digest")
        try:
            found.append(DIGEST_PREFIX + configured_digest(key, {}).hex())
        except ConfigError as error:
            raise ConfigError(f"the key file {name[:256]} line {number}: {error}") from error
    if not found:
        raise ConfigError(f"the key file {name[:256]} holds no key")
    return found
