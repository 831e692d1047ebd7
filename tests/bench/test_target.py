"""What a target may be, and whose key it is asked with."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from headrace.bench.drive.target import api_key, parse_target
from headrace.errors import ConfigError
from tests.bench.asking import client_of, send, wire
from tests.bench.truth_answers import Truth
from tests.bench.truth_server import TruthServer


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/models"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/models"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/models"),
        (" http://127.0.0.1:8000/v1/ ", "http://127.0.0.1:8000/v1/models"),
        ("https://api.example.com", "https://api.example.com/v1/models"),
        ("https://api.example.com/openai/v1", "https://api.example.com/openai/v1/models"),
        ("http://[::1]:8000", "http://[::1]:8000/v1/models"),
    ],
)
def test_a_target_is_a_base_url_with_or_without_v1(text: str, url: str) -> None:
    assert str(parse_target(text).url("/v1/models")) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:8000",
        "localhost",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host/v1?key=1",
        "http://host/#a",
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--target: "):
        parse_target(text)


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_target("http://user:hunter2@host")
    assert "hunter2" not in str(caught.value)


async def test_a_host_without_an_address_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    with pytest.raises(ConfigError, match=r"--target: 'nowhere' is not found: Name or service not known"):
        async with client_of("http://nowhere:1"):
            pass


async def test_a_name_is_looked_up_once(server: TruthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    look_up: Callable[..., Any] = loop.getaddrinfo
    asked: list[str] = []

    async def counting(host: str, *rest: Any, **named: Any) -> Any:
        asked.append(host)
        return await look_up(host, *rest, **named)

    monkeypatch.setattr(loop, "getaddrinfo", counting)
    async with client_of(f"http://localhost:{server.port}") as client:
        sent = await asyncio.gather(*(send(client, wire(Truth(tokens=1))) for _ in range(5)))
    assert [one.record.outcome for one in sent] == ["ok"] * 5
    assert asked.count("localhost") == 1


def test_the_key_comes_from_the_environment() -> None:
    assert api_key({"OPENAI_API_KEY": " sk-1 "}) == "sk-1"
    assert api_key({}) is None
    assert api_key({"MY_KEY": "k"}, "MY_KEY", required=True) == "k"
    with pytest.raises(ConfigError, match="the environment has no MY_KEY"):
        api_key({}, "MY_KEY", required=True)
    with pytest.raises(ConfigError) as caught:
        api_key({"MY_KEY": "line\nbreak"}, "MY_KEY")
    assert "break" not in str(caught.value)
