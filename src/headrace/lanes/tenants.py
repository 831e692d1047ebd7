"""Who sends a request: API keys and the tenant header. Pure; keys are held as digests only.

- No tenant has a key: access is open. The tenant is the one that ``x-tenant-id`` names, if
  ``server.trust_tenant_header`` is on and that tenant is configured. Any other name is no tenant: the
  request is served as one without a tenant, it is not refused.
- A tenant has a key: every request needs ``Authorization: Bearer KEY``, and the key alone says who sends
  it; ``x-tenant-id`` is ignored. A tenant without a key of its own cannot be reached then.

A presented key is compared with every configured one, in constant time, by SHA-256 digests: neither the
place of the match nor a key's length shows in the time it takes. No key and no part of one is put into a
message, a log line or a repr.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.config.schema import Config
from headrace.errors import AuthenticationFailed, ConfigError

ENV_PREFIX = "env:"
DIGEST_PREFIX = "sha256:"
FILE_PREFIX = "file:"

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[!-~]+")


def digest(key: str) -> bytes:
    """SHA-256 of a key."""
    # A header may hold any code point, lone surrogates too; whatever came must be comparable.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def configured_digest(entry: str, env: Mapping[str, str]) -> bytes:
    """The digest behind one ``api_keys`` entry: a literal key, ``env:NAME`` or ``sha256:HEX`` (what ``file:PATH``
    stands for was put in its place by ``config.key_files``).

    Raises ConfigError when the entry has none of these forms or the variable is not set; the message names
    the variable, never the key.
    """
    if entry.startswith(DIGEST_PREFIX):
        text = entry.removeprefix(DIGEST_PREFIX)
        if not _DIGEST.fullmatch(text):
            raise ConfigError("sha256: needs the 64 hexadecimal digits of a key's SHA-256 after it")
        return bytes.fromhex(text)
    key, source = entry, "an API key"
    if entry.startswith(ENV_PREFIX):
        name = entry.removeprefix(ENV_PREFIX)
        if not _ENV_NAME.fullmatch(name):
            raise ConfigError("env: needs the name of an environment variable after it")
        key, source = env.get(name, ""), f"the API key in environment variable {name}"
        if not key:
            raise ConfigError(f"environment variable {name} is not set (an API key is expected in it)")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{source} may hold only printable ASCII characters without spaces")
    return digest(key)


@dataclass(frozen=True)
class TenantDirectory:
    """Everything needed to tell who sends a request; built once per configuration."""

    _digests: tuple[tuple[bytes, str], ...] = field(repr=False)
    _names: frozenset[str]
    _trust_header: bool

    @classmethod
    def build(cls, config: Config, env: Mapping[str, str] | None = None) -> TenantDirectory:
        """The directory of a configuration. ``env`` answers ``env:NAME`` entries; a configuration that
        ``config.load`` made has none left. Raises ConfigError as ``configured_digest`` does, and when two
        tenants have the same key."""
        digests: dict[bytes, str] = {}
        for name, tenant in config.tenants.items():
            for entry in tenant.api_keys:
                known = digests.setdefault(configured_digest(entry, env or {}), name)
                if known != name:
                    raise ConfigError(f"tenants {known!r} and {name!r} have the same API key")
        return cls(
            _digests=tuple(digests.items()),
            _names=frozenset(config.tenants),
            _trust_header=config.server.trust_tenant_header,
        )

    @property
    def needs_key(self) -> bool:
        """Whether every request must bring a key."""
        return bool(self._digests)

    def authenticate(self, authorization: str | None, tenant_header: str | None) -> str | None:
        """The tenant's name, or None for open access without one. ``authorization`` and ``tenant_header``
        are the values of ``Authorization`` and ``x-tenant-id``. Raises AuthenticationFailed (401)."""
        if not self._digests:
            named = (tenant_header or "").strip()
            return named if self._trust_header and named in self._names else None
        presented = digest(bearer_key(authorization))
        found: str | None = None
        for known, tenant in self._digests:
            # No early exit: every key is compared whatever matched before.
            if hmac.compare_digest(known, presented):
                found = tenant
        if found is None:
            raise AuthenticationFailed("the API key is not valid")
        return found


def authenticate(config: Config, authorization: str | None, tenant_header: str | None) -> str | None:
    """``TenantDirectory.authenticate`` for one call; a server builds the directory once and keeps it."""
    return TenantDirectory.build(config).authenticate(authorization, tenant_header)


def bearer_key(authorization: str | None) -> str:
    """The key in an ``Authorization`` header. Raises AuthenticationFailed when there is none, or no bearer's."""
    if authorization is None or not authorization.strip():
        raise AuthenticationFailed("an API key is needed: send it as 'Authorization: Bearer KEY'")
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise AuthenticationFailed("the Authorization header must have the form 'Bearer KEY'")
    return key.strip()
