"""Each peer as a running server: same model file, same threads, same context and number of slots."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import free_port

SLOTS = 16
"""Concurrent sequences of llama-server; headrace's bands hold at least as many short ones."""
START_LIMIT_S = 180.0


@dataclass(frozen=True)
class Setting:
    """What all peers share."""

    model_path: Path
    model_name: str
    threads: int
    context_tokens: int


@dataclass(frozen=True)
class Peer:
    """A server to compare. ``command`` makes its command line for a port."""

    name: str
    command: tuple[str, ...]
    ready_path: str
    config: str = ""

    def arguments(self, port: int, config_path: Path) -> list[str]:
        return [part.format(port=port, config=config_path) for part in self.command]


def headrace(setting: Setting) -> Peer:
    """headrace with its defaults; only the length bands are cut to the common context."""
    config = {
        "model": {"source": str(setting.model_path), "name": setting.model_name},
        "engine": {"threads": setting.threads},
    }
    command = (sys.executable, "-m", "headrace", "serve", "--config", "{config}", "--port", "{port}")
    return Peer("headrace", (*command, "--log-level", "warning"), "/ready", json.dumps(config))


def llama_server(setting: Setting, program: Path, *, batch: int | None = None) -> Peer:
    """llama-server with its defaults, or with another logical batch (``-b``): how much of a long prompt a step
    takes, its one knob against a long prompt holding up the others."""
    command = [
        str(program),
        *("--model", str(setting.model_path), "--alias", setting.model_name),
        *("--threads", str(setting.threads), "--threads-batch", str(setting.threads)),
        *("--parallel", str(SLOTS), "--ctx-size", str(SLOTS * setting.context_tokens)),
        *("--host", "127.0.0.1", "--port", "{port}"),
    ]
    if batch is not None:
        command += ["--batch-size", str(batch)]
    return Peer("llama-server" if batch is None else f"llama-server -b {batch}", tuple(command), "/health")


def vllm(setting: Setting, python: Path) -> Peer:
    """vLLM's CPU build in an environment of its own (``HEADRACE_PEER_VLLM`` names its Python)."""
    command = (
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(setting.model_path), "--served-model-name", setting.model_name),
        *("--max-model-len", str(setting.context_tokens), "--host", "127.0.0.1", "--port", "{port}"),
    )
    return Peer("vllm (CPU)", command, "/health")


@contextlib.contextmanager
def running(peer: Peer) -> Iterator[str]:
    """Start the peer, wait until it serves, give its base URL, end it. Raises RuntimeError with its log."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="headrace-peer-") as folder:
        config, log_path = Path(folder) / "headrace.yaml", Path(folder) / "log"
        config.write_text(peer.config)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                peer.arguments(port, config),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}{peer.ready_path}", log_path)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.1)
    raise RuntimeError(f"not ready: {' '.join(_shown(process.args))}\n{log_path.read_text(errors='replace')[-3000:]}")


def _shown(arguments: object) -> Sequence[str]:
    return [str(part) for part in arguments] if isinstance(arguments, list) else [str(arguments)]
