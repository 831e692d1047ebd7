"""Each peer as a running server: same model file, same threads, same context and number of slots."""

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

from benchmarks.harness import free_port
from headrace.bench.load.workload import Workload

HEADRACE, LLAMA_SERVER = "headrace", "llama-server"
SLOTS = 16
"""Concurrent sequences of llama-server; headrace's bands hold at least as many short ones."""
START_LIMIT_S = 180.0
END_LIMIT_S = 10.0


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


def headrace(setting: Setting, lanes: Mapping[str, Mapping[str, object]], *, strategy: str | None = None) -> Peer:
    """headrace with its defaults and with ``lanes`` (``lane_sections``) as its operator would set them. With a
    ``strategy`` it makes its batches by that one, and is a peer of its own."""
    engine: dict[str, object] = {"threads": setting.threads}
    if strategy is not None:
        engine["scheduling"] = {"strategy": strategy}
    config = {
        "model": {"source": str(setting.model_path), "name": setting.model_name},
        "engine": engine,
        "lanes": lanes,
    }
    command = (sys.executable, "-m", "headrace", "serve", "--config", "{config}", "--port", "{port}")
    name = HEADRACE if strategy is None else f"{HEADRACE} {strategy}"
    return Peer(name, (*command, "--log-level", "warning"), "/ready", json.dumps(config))


def lane_sections(workload: Workload, keys: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The ``lanes`` section for a workload: each lane that a class names gets that class's SLO, and ``keys``.

    That is what an operator does who knows the traffic: the lanes' default targets are for machines with a GPU, and
    a scheduler that is asked for what no policy can give here would refuse everything. The SLO is the one that the
    requests are judged by afterwards; llama-server cannot be told. A target that the class does not have is set to
    null, so that no default one stays.

    Raises ValueError when two classes of one lane have different SLOs: a lane has one.
    """
    sections: dict[str, dict[str, object]] = {}
    for name, traffic in workload.classes.items():
        if traffic.lane is None:
            continue
        slo = {"p99_ttft_s": traffic.slo.ttft_s, "p99_tpot_s": traffic.slo.tpot_s, "p99_e2e_s": traffic.slo.e2e_s}
        section: dict[str, object] = {"slo": slo, **keys}
        if sections.setdefault(traffic.lane, section) != section:
            raise ValueError(f"class {name} has another SLO than those before it in lane {traffic.lane}")
    return sections


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
    return Peer(LLAMA_SERVER if batch is None else f"{LLAMA_SERVER} -b {batch}", tuple(command), "/health")


def vllm(setting: Setting, python: Path) -> Peer:
    """vLLM's CPU build in an environment of its own (``HEADRACE_PEER_VLLM`` names its Python)."""
    command = (
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(setting.model_path), "--served-model-name", setting.model_name),
        *("--max-model-len", str(setting.context_tokens), "--host", "127.0.0.1", "--port", "{port}"),
    )
    return Peer("vllm (CPU)", command, "/health")


@dataclass(frozen=True)
class Running:
    """A peer that serves at ``url``."""

    url: str
    process: subprocess.Popen[bytes]

    def exit_code(self) -> int | None:
        """None while it runs, as it should."""
        return self.process.poll()


@contextlib.contextmanager
def running(peer: Peer) -> Iterator[Running]:
    """Start the peer, wait until it serves, end it with all its processes. Raises RuntimeError with its log."""
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
                start_new_session=True,
            )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}{peer.ready_path}", log_path)
            yield Running(f"http://127.0.0.1:{port}", process)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing is measured any more. What does not end when asked (llama-server first works through its queue) is
    ended, with the processes that it started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=END_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
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
