"""The server process: signals, exit codes, ports."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import yaml

from headrace.api.server import bind
from headrace.config.schema import ServerConfig
from headrace.errors import ConfigError
from tests.api.harness import chat_body, post

SCRIPT = Path(__file__).parents[1] / "openai_suite" / "scripted_server.py"


@contextmanager
def process(folder: Path, *options: str, **server: object) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A scripted server process, its port and its configuration file."""
    file = folder / "headrace.yaml"
    file.write_text(yaml.safe_dump(document(folder, server)))
    command = [sys.executable, str(SCRIPT), "--config", str(file), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started, int(started.stdout.readline().rsplit(":", 1)[1]), file
        finally:
            started.kill()


def document(folder: Path, server: dict[str, object], aliases: tuple[str, ...] = ()) -> dict[str, object]:
    settings = {"port": free_port(), "store_dir": str(folder / "store"), **server}
    return {"model": {"name": "scripted", "aliases": list(aliases)}, "server": settings}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def streaming(port: int) -> Iterator[IO[bytes]]:
    """A stream whose first event has come."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(post("/v1/chat/completions", chat_body(stream=True), "connection: close"))
        with client.makefile("rb") as reader:
            while b"data:" not in reader.readline():
                pass
            yield reader


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with process(tmp_path, "--step-s", "0.02") as (server, port, _):
        with streaming(port) as reader:
            server.send_signal(number)
            rest = reader.read()
        assert server.wait(timeout=20) == 0
    assert b"[DONE]" in rest


def test_what_outlasts_the_limit_gets_an_error_event_and_the_exit_is_0(tmp_path: Path) -> None:
    answer = ["--answer", "x" * 1000, "--step-s", "0.05"]
    with process(tmp_path, *answer, drain_timeout_s=0.2) as (server, port, _):
        with streaming(port) as reader:
            server.send_signal(signal.SIGTERM)
            rest = reader.read()
        assert server.wait(timeout=20) == 0
    assert b"shutting down" in rest
    assert b"[DONE]" not in rest


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    answer = ["--answer", "x" * 2000, "--step-s", "0.05"]
    with process(tmp_path, *answer) as (server, port, _):
        with streaming(port):
            server.send_signal(signal.SIGTERM)
            assert server.stderr is not None
            while "draining" not in server.stderr.readline():
                pass
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=10)


def test_sighup_loads_the_configuration_again_and_keeps_the_old_one_when_it_is_wrong(tmp_path: Path) -> None:
    with process(tmp_path) as (server, port, file):

        def knows(alias: str) -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models/{alias}", timeout=10):
                    return True
            except urllib.error.HTTPError as error:
                error.close()
                return False

        assert not knows("later")
        file.write_text(yaml.safe_dump(document(tmp_path, {}, aliases=("later",))))
        server.send_signal(signal.SIGHUP)
        while not knows("later"):
            assert server.poll() is None
        file.write_text("nonsense: 1")
        server.send_signal(signal.SIGHUP)
        assert server.stderr is not None
        while "was not reloaded" not in server.stderr.readline():
            pass
        assert knows("later")


def test_an_address_that_cannot_be_bound_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1 port .*in use"):
            bind(ServerConfig(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match=r"server\.host"):
        bind(ServerConfig(host="no.such.host.invalid"))
