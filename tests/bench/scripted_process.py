"""headrace over a scripted engine, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from benchmarks.harness import free_port

_SCRIPT = Path(__file__).parents[1] / "openai_suite" / "scripted_server.py"
_READY_LIMIT_S = 60.0


@contextmanager
def scripted_server(folder: Path, *, answer: str = "one two three four", step_s: float = 0.0) -> Iterator[str]:
    """Its base URL. It serves the model ``tiny`` with a context of 4,096 tokens; a token is a byte of text, and every
    step of its engine takes ``step_s``. Killed when the block ends."""
    port = free_port()
    file, log = folder / "headrace.yaml", folder / "server.log"
    settings = {"model": {"source": "tiny"}, "server": {"port": port, "store_dir": str(folder / "store")}}
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    command = [sys.executable, str(_SCRIPT), "--config", str(file), "--answer", answer, "--step-s", str(step_s)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process, log)
        yield url
    finally:
        process.kill()
        process.wait()


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _READY_LIMIT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.02)
    raise AssertionError(f"the server did not become ready:\n{log.read_text()[-4000:]}")
