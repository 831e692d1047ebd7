"""Documents at once in a KV budget that holds two of them, while short requests come all the time.

A served headrace, over HTTP. Five documents are sent in the same moment, one more two seconds later, and a burst of
short requests while documents run; whoever gets 429 comes back when it is told to. The same load without a budget,
and the short requests alone, take turns with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from benchmarks.harness import Served, headrace_server, report
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from headrace.models.store import resolve
from headrace.models.tiny import make_tiny_gguf

Setting = Literal["short alone", "budget", "no budget"]
SETTINGS: tuple[Setting, ...] = ("short alone", "budget", "no budget")
DOCUMENTS_SHARE = 0.81
"""Of the budget, what two documents take: below the mark (0.85) up to which long ones enter."""
FIRST_TOKEN, TOKENS = 300, 200
SHORT_LANE, SHORT_E2E_S = "interactive", 10.0
LATE_S = 2.0
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. ``short_interval_s`` lies between two short requests; ``burst`` more come at once."""

    documents: int
    document_tokens: int
    document_output: int
    short_tokens: int
    short_output: int
    short_interval_s: float
    burst: int
    short_ttft_s: float

    @property
    def budget_tokens(self) -> int:
        """A budget that holds two documents."""
        one = -(-(self.document_tokens + self.document_output) // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
        return int(2 * one / DOCUMENTS_SHARE)


@dataclass(slots=True)
class Found:
    """What one run came to. Times from sending; of documents without the time that a refusal told them to wait."""

    short_ttft_s: list[float] = field(default_factory=list)
    document_s: list[float] = field(default_factory=list)
    refused_for_memory: list[str] = field(default_factory=list)
    """The level of each such refusal."""
    shed_short: int = 0
    failures: list[str] = field(default_factory=list)
    took_s: float = 0.0
    most_used_tokens: float = 0.0
    most_rss_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    def attainment(self, target_s: float) -> float:
        """Share of short requests that had their first token in time; one that was shed had not."""
        in_time = sum([ttft_s <= target_s for ttft_s in self.short_ttft_s])
        return in_time / max(1, len(self.short_ttft_s) + self.shed_short)

    def ttft_s(self, share: float) -> float:
        """A quantile of short requests' times to first token."""
        ordered = sorted(self.short_ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Client:
    """Sends one run's requests."""

    def __init__(self, http: httpx.AsyncClient, load: Load, found: Found, seed: int) -> None:
        self._http = http
        self._load = load
        self._found = found
        self._random = random.Random(seed)

    async def ask(self, tokens: int, output: int, lane: str) -> float | None:
        """Time to the first token; None when it failed or was shed. Documents, and whoever is refused for want of
        memory, come back when they are told to."""
        body = {
            "model": "kv",
            "prompt": [self._random.randrange(FIRST_TOKEN, FIRST_TOKEN + TOKENS) for _ in range(tokens)],
            "max_tokens": output,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        while True:
            sent_s, first_s = time.perf_counter(), None
            async with self._http.stream(
                "POST", "/v1/completions", json=body, headers={"x-headrace-lane": lane}
            ) as reply:
                if reply.status_code == 429:
                    if (level := reply.headers.get("x-headrace-kv-level")) is not None:
                        self._found.refused_for_memory.append(level)
                    elif lane == SHORT_LANE:
                        self._found.shed_short += 1
                        return None
                    await asyncio.sleep(float(reply.headers["retry-after"]))
                    continue
                done = False
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and first_s is None:
                        first_s = time.perf_counter() - sent_s
                    done = done or line == "data: [DONE]"
                if reply.status_code != 200 or not done:
                    self._found.failures.append(f"{lane}: {reply.status_code}")
                    return None
            return first_s

    async def short(self) -> None:
        first_s = await self.ask(self._load.short_tokens, self._load.short_output, SHORT_LANE)
        if first_s is not None:
            self._found.short_ttft_s.append(first_s)

    async def document(self, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        began_s = time.perf_counter()
        if await self.ask(self._load.document_tokens, self._load.document_output, "batch") is not None:
            self._found.document_s.append(time.perf_counter() - began_s)

    async def run(self, *, documents: bool, least_s: float) -> None:
        """Short ones until all documents have finished, and for ``least_s`` at least."""
        began_s = time.perf_counter()
        long: list[asyncio.Task[None]] = []
        if documents:
            long = [asyncio.create_task(self.document()) for _ in range(self._load.documents)]
            long.append(asyncio.create_task(self.document(LATE_S)))
        short: list[asyncio.Task[None]] = []
        burst = False
        while time.perf_counter() - began_s < least_s or not all(task.done() for task in long):
            if not burst and time.perf_counter() - began_s > least_s / 2:
                burst = True
                short += [asyncio.create_task(self.short()) for _ in range(self._load.burst)]
            short.append(asyncio.create_task(self.short()))
            await asyncio.sleep(self._load.short_interval_s)
        await asyncio.gather(*short, *long)
        self._found.took_s = time.perf_counter() - began_s


@contextlib.contextmanager
def watching(served: Served, found: Found) -> Iterator[None]:
    """Note the most memory that is seen meanwhile."""
    stop = threading.Event()
    process = psutil.Process(served.engine_pid())

    def watch() -> None:
        with httpx.Client(base_url=served.base_url, timeout=10) as http:
            while not stop.wait(0.25):
                found.most_rss_bytes = max(found.most_rss_bytes, process.memory_info().rss)
                found.most_used_tokens = max(found.most_used_tokens, _metrics(http).get("headrace_kv_used_tokens", 0))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _metrics(http: httpx.Client) -> dict[str, float]:
    """Samples by name with labels, as they stand in the text."""
    samples = {}
    for line in http.get("/metrics").text.splitlines():
        if line.startswith("headrace_kv_") or line.startswith("headrace_parked"):
            name, _, value = line.rpartition(" ")
            samples[name] = float(value)
    return samples


def run(model: Path, load: Load, setting: Setting, *, bytes_per_token: int, seed: int, least_s: float) -> Found:
    """One run of one setting on a server of its own."""
    longest = -(-(load.document_tokens + load.document_output + 1) // 1024) * 1024
    engine: dict[str, Any] = {
        "bands": [
            {"max_context_tokens": 1024, "max_sequences": 32},
            {"max_context_tokens": longest, "max_sequences": load.documents + 1},
        ],
        "scheduling": {"kv_long_tokens": load.document_tokens // 2},
    }
    if setting == "budget":
        engine["kv_memory"] = {"budget_bytes": load.budget_tokens * bytes_per_token}
    slo = {"p99_ttft_s": load.short_ttft_s, "p99_e2e_s": SHORT_E2E_S}
    settings = {
        "model": {"source": str(model), "name": "kv"},
        "engine": engine,
        "lanes": {SHORT_LANE: {"slo": slo}},
    }
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "headrace.yaml"
        config.write_text(json.dumps(settings), encoding="utf-8")
        with headrace_server(["--config", str(config)]) as served:

            async def send() -> None:
                limits = httpx.Limits(max_connections=200)
                async with httpx.AsyncClient(base_url=served.base_url, timeout=_TIMEOUT_S, limits=limits) as http:
                    client = Client(http, load, found, seed)
                    await client.run(documents=setting != "short alone", least_s=least_s)

            with watching(served, found):
                asyncio.run(send())
            with httpx.Client(base_url=served.base_url, timeout=10) as http:
                found.metrics = _metrics(http)
                problem = http.get("/admin/kv").json()["integrity"]
            if problem is not None:
                raise RuntimeError(problem)
    return found


def row(setting: Setting, found: Found, load: Load) -> tuple[list[str], dict[str, object]]:
    """A table row and its data."""
    entered = {
        level: found.metrics.get(f'headrace_kv_level_entered_total{{level="{level}"}}', 0.0)
        for level in ("warn", "refuse", "move")
    }
    parked = found.metrics.get("headrace_kv_parked_total", 0.0)
    data: dict[str, object] = {
        "documents_finished": len(found.document_s),
        "documents_s": sorted(found.document_s),
        "refused_for_memory": len(found.refused_for_memory),
        "refusal_levels": sorted(set(found.refused_for_memory)),
        "shed_short": found.shed_short,
        "failures": found.failures,
        "short_requests": len(found.short_ttft_s),
        "short_ttft_p50_s": found.ttft_s(0.5),
        "short_ttft_p99_s": found.ttft_s(0.99),
        "short_attainment": found.attainment(load.short_ttft_s),
        "most_used_tokens": found.most_used_tokens,
        "budget_tokens": found.metrics.get("headrace_kv_budget_tokens"),
        "levels_entered": entered,
        "parked": parked,
        "engine_rss_bytes": found.most_rss_bytes,
        "took_s": found.took_s,
    }
    cells = [
        setting,
        f"{len(found.document_s)}" if setting != "short alone" else "-",
        f"{max(found.document_s, default=0):.1f}",
        f"{len(found.refused_for_memory)}",
        f"{found.shed_short}",
        f"{found.ttft_s(0.5) * 1e3:.0f}",
        f"{found.ttft_s(0.99) * 1e3:.0f}",
        f"{found.attainment(load.short_ttft_s):.3f}",
        f"{found.most_used_tokens:.0f}",
        " ".join(f"{level} {count:.0f}" for level, count in entered.items()),
        f"{parked:.0f}",
        f"{len(found.failures)}",
    ]
    return cells, data


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_pressure", description=__doc__)
    parser.add_argument("--model", default="tiny", help="tiny (synthetic), or a model's name or GGUF")
    parser.add_argument("--documents", type=int, default=5)
    parser.add_argument("--document-tokens", type=int, default=12_300)
    parser.add_argument("--document-output", type=int, default=200)
    parser.add_argument("--short-interval", type=float, default=0.2, help="seconds between two short requests")
    parser.add_argument("--burst", type=int, default=24, help="short requests that come at once")
    parser.add_argument("--short-output", type=int, default=100)
    parser.add_argument("--short-ttft", type=float, default=0.5, help="target of short requests, seconds")
    parser.add_argument("--seconds", type=float, default=15.0, help="the shortest run")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    options = parser.parse_args()
    load = Load(
        documents=options.documents,
        document_tokens=options.document_tokens,
        document_output=options.document_output,
        short_tokens=100,
        short_output=options.short_output,
        short_interval_s=options.short_interval,
        burst=options.burst,
        short_ttft_s=options.short_ttft,
    )
    rows, data = [], {}
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "tiny":
            model, bytes_per_token = make_tiny_gguf(Path(folder) / "tiny.gguf"), 512
        else:
            model, bytes_per_token = resolve(options.model), 23_040
        for setting in options.settings:
            found = run(model, load, setting, bytes_per_token=bytes_per_token, seed=1, least_s=options.seconds)
            cells, data[setting] = row(setting, found, load)
            rows.append(cells)
    report(
        "kv_pressure",
        f"python -m benchmarks.kv_pressure --model {options.model} --documents {options.documents} "
        f"--document-tokens {options.document_tokens} --document-output {options.document_output} "
        f"--short-interval {options.short_interval:g} --burst {options.burst} --short-output {options.short_output} "
        f"--short-ttft {options.short_ttft:g} --seconds {options.seconds:g}",
        [
            "setting",
            "documents done",
            "slowest s",
            "refused for memory",
            "short shed",
            "short TTFT p50 ms",
            "p99 ms",
            f"in {options.short_ttft:g} s",
            "most KV tokens",
            "levels entered",
            "parked",
            "failed",
        ],
        rows,
        {"budget_tokens": load.budget_tokens, "settings": data},
    )


if __name__ == "__main__":
    main()
