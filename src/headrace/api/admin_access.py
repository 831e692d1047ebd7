"""Who may use the admin API.

With ``server.admin_keys`` every request needs one of them as ``Authorization: Bearer KEY``. Without them only
clients on the same machine get in: the connection comes from a loopback address, it was not forwarded, it names
this machine as its host (a web page that has its own name resolve to 127.0.0.1 does not), and it brings no key. A
tenant's key opens nothing here.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from starlette.types import Scope

from headrace.api.exchange import header
from headrace.errors import AuthenticationFailed, PermissionDenied
from headrace.lanes.tenants import TenantDirectory, bearer_key, configured_digest, digest

_FORWARDED: Final = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")
_HOST: Final = re.compile(r"(\[(?P<ipv6>[^\]]*)\]|(?P<name>[^:]*))(:\d*)?")
_REMEDY: Final = "configure server.admin_keys and send one as 'Authorization: Bearer KEY'"


@dataclass(frozen=True)
class AdminKeys:
    """The keys that open the admin API, as digests only."""

    _digests: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def build(cls, entries: Sequence[str], env: Mapping[str, str] | None = None) -> AdminKeys:
        """From ``server.admin_keys``. Raises ConfigError as ``lanes.tenants.configured_digest`` does."""
        return cls(tuple(configured_digest(entry, env or {}) for entry in entries))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def index_of(self, authorization: str | None) -> int:
        """Which key an ``Authorization`` header brings. Raises AuthenticationFailed."""
        presented = digest(bearer_key(authorization))
        found: int | None = None
        for index, known in enumerate(self._digests):
            # No early exit: every key is compared whatever matched before.
            if hmac.compare_digest(known, presented):
                found = index
        if found is None:
            raise AuthenticationFailed("the admin key is not valid")
        return found


def admit_admin(scope: Scope, keys: AdminKeys, tenants: TenantDirectory) -> str:
    """Who asks, in words for the log. Raises AuthenticationFailed (401), PermissionDenied (403)."""
    authorization = header(scope, b"authorization")
    peer = scope.get("client")
    address = "?" if peer is None else str(peer[0])
    if _tenant_of(authorization, tenants) is not None:
        raise PermissionDenied("a tenant's key does not open the admin API")
    if keys:
        return f"admin key {keys.index_of(authorization)} from {address}"
    if not _is_loopback(address) or any(header(scope, name) is not None for name in _FORWARDED):
        raise PermissionDenied(f"without admin keys only clients on the same machine may do this; {_REMEDY}")
    if not _names_this_machine(header(scope, b"host")):
        raise PermissionDenied(
            f"without admin keys the request must go to 127.0.0.1, [::1] or localhost by that name; {_REMEDY}"
        )
    if authorization is not None:
        raise PermissionDenied(f"no key is valid here while server.admin_keys is empty; send none, or {_REMEDY}")
    return f"a local client ({address})"


def _tenant_of(authorization: str | None, tenants: TenantDirectory) -> str | None:
    try:
        return tenants.authenticate(authorization, None)
    except AuthenticationFailed:
        return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _names_this_machine(host: str | None) -> bool:
    match = _HOST.fullmatch((host or "").strip())
    if match is None:
        return False
    name = match["ipv6"] or match["name"] or ""
    return name.lower() == "localhost" or _is_loopback(name)
