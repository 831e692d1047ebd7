"""A vLLM API server on this machine's CPU, for a benchmark or a test: stock, with its own best flags, or steered."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.harness import free_port

Kind = Literal["stock", "flags", "headrace"]
MODEL: Final = "smollm2"
MAX_NUM_SEQS: Final = 16
CONTEXT_TOKENS: Final = 8192


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


@dataclass(frozen=True)
class VllmServer:
    """A running server; ``log`` holds what it says."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(f"{self.base}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def send(self, path: str, body: Mapping[str, Any], *, method: str = "POST", key: str | None = None) -> Any:
        """The JSON answer to a JSON body. Raises Refused."""
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        request = urllib.request.Request(
            f"{self.base}{path}", json.dumps(body).encode(), headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, error.read().decode()) from None


def arguments(kind: Kind, checkpoint: Path, port: int, settings: Mapping[str, Any] | None = None) -> list[str]:
    """The command line. The console script of the CPU build looks for another package's name: the module is started."""
    words = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL,
        "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT_TOKENS),
        "--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", "2048",
    ]  # fmt: skip
    if kind == "flags":
        words += [
            "--long-prefill-token-threshold",
            "256",
            "--max-num-batched-tokens",
            "512",
            "--scheduling-policy",
            "priority",
        ]
    if kind == "headrace":
        words += ["--scheduler-cls", "headrace.vllm.scheduler"]
        words += ["--additional-config", json.dumps({"headrace": dict(settings or {})})]
    return words


@contextlib.contextmanager
def vllm_server(
    kind: Kind, checkpoint: Path, settings: Mapping[str, Any] | None = None, *, wait_s: float = 150.0
) -> Iterator[VllmServer]:
    """Run one for the length of the block. Raises TimeoutError or RuntimeError when it does not come up."""
    port = free_port()
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2", "VLLM_NO_USAGE_STATS": "1"}
    if kind == "headrace":
        environment["VLLM_PLUGINS"] = "headrace"
    with tempfile.TemporaryDirectory(prefix="headrace-vllm-") as folder:
        log = Path(folder) / "serve.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                arguments(kind, checkpoint, port, settings),
                stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
            )  # fmt: skip
        server = VllmServer(port, process, log)
        try:
            _wait(server, wait_s)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(server: VllmServer, wait_s: float) -> None:
    ends_s = time.monotonic() + wait_s
    while time.monotonic() < ends_s:
        if server.process.poll() is not None:
            raise RuntimeError(f"vLLM ended:\n{_tail(server.log)}")
        with contextlib.suppress(OSError, urllib.error.URLError):
            server.get("/health")
            return
        time.sleep(0.2)
    raise TimeoutError(f"vLLM did not come up within {wait_s} s:\n{_tail(server.log)}")


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def lane_body(
    prompt: Sequence[int], tokens: int, kind: Kind, lane: Mapping[str, Any], *, priority: int = 0
) -> dict[str, Any]:
    """A greedy completion of ``tokens`` tokens. Each server is told of the lane in the way that it understands."""
    body: dict[str, Any] = {
        "model": MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    if kind == "flags":
        body["priority"] = priority
    if kind == "headrace":
        body["vllm_xargs"] = {f"headrace_{name}": value for name, value in lane.items()}
    return body
