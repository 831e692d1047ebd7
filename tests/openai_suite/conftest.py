"""A running headrace for client tests: once with the scripted engine, once with the real model."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ALIASES = ["gpt-6-astra", "gpt-3.5-turbo-instruct", "ft:gpt-4o-mini:acemeco:suffix:abc123"]
SERVER_SCRIPT = Path(__file__).parent / "scripted_server.py"
_READY_LIMIT_S = 180.0


@dataclass(frozen=True)
class RunningServer:
    """``base_url`` ends in ``/v1``."""

    base_url: str
    pid: int
    store: Path


@pytest.fixture(
    scope="session",
    params=[
        pytest.param([sys.executable, str(SERVER_SCRIPT)], id="scripted"),
        pytest.param([sys.executable, "-m", "headrace", "serve"], id="real", marks=pytest.mark.model),
    ],
)
def running_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server process, started with ``--config FILE``."""
    folder = tmp_path_factory.mktemp("running_server")
    port = _free_port()
    store = folder / "store"
    file = folder / "headrace.yaml"
    settings = {
        "model": {"aliases": ALIASES},
        "server": {"port": port, "store_dir": str(store), "allow_model_delete": True},
        # Those tests give no limit, and a small model talks on: an operator's default keeps them short.
        "lanes": {"interactive": {"default_max_tokens": 32}},
    }
    file.write_text(yaml.safe_dump(settings))
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*request.param, "--config", str(file)], stdout=output, stderr=output)
    try:
        _wait_ready(f"http://127.0.0.1:{port}", process, log)
        yield RunningServer(f"http://127.0.0.1:{port}/v1", process.pid, store)
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    assert code == 0, log.read_text()[-4000:]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise AssertionError(f"the server did not become ready:\n{log.read_text()[-4000:]}")
