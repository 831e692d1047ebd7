"""Where requests go: the target's address as the operator writes it, its addresses resolved once, its API key."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from headrace.errors import ConfigError

API_KEY_ENV = "OPENAI_API_KEY"
"""The environment variable that holds the API key unless another is named."""


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible server. ``prefix`` is what comes before ``/v1`` in its paths (usually nothing)."""

    scheme: str
    host: str
    port: int
    prefix: str

    @property
    def base_url(self) -> str:
        """Without ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"

    def url(self, path: str) -> URL:
        """The URL of an API path such as ``/v1/chat/completions``."""
        return URL(self.base_url + path, encoded=True)


def parse_target(text: str) -> Target:
    """``http://host:port`` or ``https://host/some/prefix``, with or without ``/v1`` at the end.

    Raises ConfigError for anything else, and for a URL with a user or password in it: records name the target.
    """
    try:
        url = URL(text.strip())
        port = url.port
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a URL: {error}", where="--target") from error
    if url.user is not None or url.password is not None:
        raise ConfigError("a password does not belong in the URL; use --api-key-env", where="--target")
    if url.scheme not in ("http", "https") or not url.host or port is None:
        raise ConfigError(f"{text!r} is not like http://127.0.0.1:8000 or https://host/v1", where="--target")
    if url.raw_query_string or url.raw_fragment:
        raise ConfigError(f"{text!r} has a query or a fragment; leave it away", where="--target")
    prefix = url.raw_path.rstrip("/").removesuffix("/v1")
    return Target(url.scheme, url.host, port, prefix)


async def resolve(target: Target) -> list[tuple[int, str]]:
    """The target's addresses as (family, address), looked up once. Raises ConfigError when there is none."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{target.host!r} is not found: {error.strerror or error}", where="--target") from error
    return [(family, str(address[0])) for family, _, _, _, address in found]


def api_key(environment: Mapping[str, str], variable: str = API_KEY_ENV, *, required: bool = False) -> str | None:
    """The API key from ``variable``; None when it is not set and not ``required`` (named by the operator).

    Raises ConfigError when a required one is missing, or when it cannot be sent in a header. No message
    contains the key.
    """
    key = environment.get(variable, "").strip()
    if not key:
        if required:
            raise ConfigError(f"the environment has no {variable}; set it to the API key", where="--api-key-env")
        return None
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(f"{variable} holds characters that no API key has", where="--api-key-env")
    return key


class FixedResolver(AbstractResolver):
    """Gives the addresses that were looked up before the run."""

    def __init__(self, addresses: list[tuple[int, str]]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=address, port=port, family=of, proto=0, flags=socket.AI_NUMERICHOST)
            for of, address in self._addresses
            if family in (socket.AF_UNSPEC, of)
        ]

    async def close(self) -> None:
        """Nothing is open."""
