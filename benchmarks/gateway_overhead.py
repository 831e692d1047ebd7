"""What the gateway adds in front of a remote engine: 200 requests/s of 64-token streams, direct and through it.

``python -m benchmarks.gateway_overhead`` starts programmable engines and ``headrace serve`` before them, as processes
on loopback, and sends the same requests at the same times to both, in turns. Added latency is the difference of
quantiles, of the time to the first token and of the whole answer; streamed chunks per CPU-second are the gateway's.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.harness import Served, headrace_server, report
from benchmarks.programmable_engine import EngineProcess
from headrace.engines.remote.connection import Address, Pool, post
from headrace.errors import RemoteFailure

TTFT_S, ITL_S = 0.05, 0.01
WARM_UP_S = 1.0
"""Requests of the first second open the connections that the others find open; they are not counted."""


@dataclass
class Sample:
    """One request: when it was sent, its first and its last token's arrival, and how many events came."""

    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    events: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str | None = None

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        if status != 200:
            self.failure = f"status {status}"

    def body(self, piece: bytes) -> None:
        now_s = time.perf_counter()
        events = piece.count(b"data: ")
        if self.first_s is None and b'"content":"w' in piece:
            self.first_s = now_s
        if b"w63 " in piece:
            self.last_s = now_s
        self.events += events

    def ended(self, problem: RemoteFailure | None) -> None:
        self.failure = self.failure or (None if problem is None else str(problem))
        self.done.set()


async def load(url: str, rate: float, seconds: float, tokens: int) -> list[Sample]:
    """An open loop: one request every 1/rate, whatever came of the others."""
    address = Address.of(url)
    pool = Pool(address, clock=time.monotonic, connect_s=5.0)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    request = post(address, "/v1/chat/completions", b"x-headrace-lane: chat\r\n", msgspec.json.encode(body))
    samples: list[Sample] = []
    begun_s = time.perf_counter()

    async def send() -> None:
        connection = pool.take() or await pool.connect()
        sample = Sample(time.perf_counter())
        samples.append(sample)
        connection.send(request, sample)
        await sample.done.wait()

    tasks = []
    for number in range(int(rate * seconds)):
        due_s = begun_s + number / rate
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(send()))
    await asyncio.gather(*tasks)
    pool.close()
    return samples


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Times:
    """Quantiles in milliseconds."""

    ttft_p50: float
    ttft_p99: float
    e2e_p50: float
    e2e_p99: float
    failed: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Times:
        begin_s = samples[0].sent_s + WARM_UP_S
        samples = [sample for sample in samples if sample.sent_s >= begin_s]
        well = [s for s in samples if s.failure is None and s.first_s is not None and s.last_s is not None]
        ttft = [1000 * ((s.first_s or 0) - s.sent_s) for s in well]
        e2e = [1000 * ((s.last_s or 0) - s.sent_s) for s in well]
        return cls(
            quantile(ttft, 0.5), quantile(ttft, 0.99), quantile(e2e, 0.5), quantile(e2e, 0.99), len(samples) - len(well)
        )


def gateway_config(engines: Sequence[EngineProcess]) -> str:
    replicas = "".join(f"      - {{url: '{engine.url}'}}\n" for engine in engines)
    return (
        "log_level: warning\ndefault_lane: chat\ngroups:\n  g:\n    kind: vllm\n    model: m\n"
        f"    max_in_flight: 1000\n    replicas:\n{replicas}"
        "lanes:\n"
        + "".join(f"  {name}: null\n" for name in ("realtime", "interactive", "retrieval", "captions", "long", "batch"))
        + "  chat: {group: g}\nserver:\n  max_queue: 10000\n"
    )


def measure(url: str, rate: float, seconds: float, tokens: int) -> list[Sample]:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(load(url, rate, seconds, tokens))


def cpu_s(served: Served) -> float:
    times = psutil.Process(served.pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    engine = EngineProcess({"ttft_s": TTFT_S, "itl_s": ITL_S, "tokens": arguments.tokens, "places": 10_000})
    rows: list[list[str]] = []
    data: list[dict[str, Any]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "headrace.yaml"
            file.write_text(gateway_config([engine]), encoding="utf-8")
            with headrace_server(["--config", str(file)]) as served:
                measure(served.base_url, arguments.rate, 1.0, arguments.tokens)
                for number in range(arguments.rounds):
                    direct = measure(engine.url, arguments.rate, arguments.seconds, arguments.tokens)
                    before_s = cpu_s(served)
                    through = measure(served.base_url, arguments.rate, arguments.seconds, arguments.tokens)
                    used_s = cpu_s(served) - before_s
                    one, other = Times.of(direct), Times.of(through)
                    chunks = sum(sample.events for sample in through) / used_s
                    added = {
                        "ttft_p50_ms": other.ttft_p50 - one.ttft_p50,
                        "ttft_p99_ms": other.ttft_p99 - one.ttft_p99,
                        "e2e_p50_ms": other.e2e_p50 - one.e2e_p50,
                        "e2e_p99_ms": other.e2e_p99 - one.e2e_p99,
                    }
                    memory = psutil.Process(served.pid).memory_info().rss / 2**20
                    data.append(
                        {
                            "added": added,
                            "direct": asdict(one),
                            "through": asdict(other),
                            "chunks_per_cpu_s": chunks,
                            "failed": other.failed,
                            "memory_mib": memory,
                        }
                    )
                    rows.append(
                        [
                            str(number),
                            *(f"{value:.2f}" for value in added.values()),
                            f"{one.ttft_p99:.1f}",
                            f"{one.e2e_p99:.1f}",
                            f"{chunks:,.0f}",
                            str(other.failed),
                        ]
                    )
    finally:
        engine.kill()
    columns = ["round", *(f"added {name}" for name in data[0]["added"])]
    columns += ["direct ttft_p99", "direct e2e_p99", "chunks/CPU-s", "failed"]
    report("gateway_overhead", "python -m benchmarks.gateway_overhead", columns, rows, data)


if __name__ == "__main__":
    main()
