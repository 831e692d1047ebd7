"""What the benchmarks share: a served headrace, the bare loop, a lean client, medians and tables."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Served:
    """A running ``headrace serve``. ``ready_s``: from process start to /ready answering 200; ``process`` is
    the gateway; the engine process is its child."""

    host: str
    port: int
    process: subprocess.Popen[bytes]
    ready_s: float
    log_path: Path

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def engine_pid(self) -> int:
        """Process id of the engine process. Raises LookupError while there is none."""
        for child in psutil.Process(self.pid).children():
            if "headrace.engines.llama.process" in " ".join(child.cmdline()):
                return child.pid
        raise LookupError("no engine process")


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def headrace_server(
    arguments: Sequence[str] = (), *, wait_s: float = 120.0, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Run ``headrace serve`` for the length of the block; its log goes to a temporary file."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        log_path = Path(folder) / "serve.log"
        started_s = time.perf_counter()
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "serve", "--port", str(port), *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        try:
            while not _ready(port):
                if process.poll() is not None or time.perf_counter() - started_s > wait_s:
                    raise RuntimeError(f"headrace serve did not become ready:\n{log_path.read_text()}")
                time.sleep(0.02)
            yield Served("127.0.0.1", port, process, time.perf_counter() - started_s, log_path)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


class BareProcess:
    """The bare loop in a process of its own."""

    def __init__(self, model: Path, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_loop", str(model)],
            cwd=HERE.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(environment or {})},
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the bare loop ended early")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tokens_per_s(self, streams: int, tokens: int, threads: int) -> float:
        """Throughput of one run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"streams": streams, "tokens": tokens, "threads": threads}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(answer["tokens"]) / float(answer["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


READ_AT_BYTES = 16 * 1024
"""A client is woken by the kernel for this much, or by the stream's end (SO_RCVLOWAT)."""


class LeanStream:
    """One streaming request on a raw socket. Deliberately lean: on two cores whatever the client burns, the
    server lacks, and a client elsewhere would burn nothing here. The server writes every token as ever."""

    def __init__(self, served: Served, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        self.socket = socket.create_connection((served.host, served.port))
        self.socket.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {served.host}\r\nContent-Type: application/json\r\n"
            # No targets: many streams at once are what is measured, not whether they would be refused.
            f"X-Headrace-Lane: batch\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode()
            + payload
        )
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, READ_AT_BYTES)
        self._tail = b""

    def read(self) -> bool:
        """Take in what has arrived; False at the end of the stream."""
        data = self.socket.recv(65536)
        self._tail = (self._tail + data)[-4096:] if len(data) < 4096 else data[-4096:]
        return bool(data)

    def completion_tokens(self) -> int:
        """The tokens that the server counted. Raises RuntimeError when the stream did not end well."""
        start = self._tail.rfind(b'"completion_tokens":')
        if start < 0:
            raise RuntimeError(f"no usage at the end of the stream: {self._tail[-300:]!r}")
        return int(self._tail[start + 20 :].split(b",")[0].split(b"}")[0])


def metric(served: Served, name: str) -> float | None:
    """The value of a metric without labels; None while it is not there."""
    with urllib.request.urlopen(f"{served.base_url}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    return None


def served_tokens_per_s(served: Served, bodies: Sequence[dict[str, Any]]) -> float:
    """Throughput of ``bodies`` sent at once, one stream each."""
    started_s = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        streams = [LeanStream(served, body) for body in bodies]
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
    elapsed_s = time.perf_counter() - started_s
    return sum(stream.completion_tokens() for stream in streams) / elapsed_s


@dataclass(frozen=True)
class Spread:
    """Median with the smallest and largest of the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 1) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"

    def plain(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


def report(name: str, command: str, columns: Sequence[str], rows: Sequence[Sequence[str]], data: object) -> None:
    """One JSON line on standard output, a table for people on standard error, and the reproducing command."""
    print(json.dumps({"benchmark": name, "command": command, "results": data}), flush=True)
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=200)  # a file has no edge
    table = Table(*columns, title=name)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"reproduce: {command}")
