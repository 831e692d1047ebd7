"""Throughput beside a busy neighbour, and what being ready for one costs when there is none.

Part 1: a process that never sleeps is pinned to one core; headrace's throughput at 8 and 32 streams with it,
against the same without it, in turns. Part 2: single-stream decode of an idle machine through headrace,
against the bare loop with each wait policy of the OpenMP runtime, the best of which is the yardstick.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.engine_overhead import body
from benchmarks.harness import BareProcess, Served, Spread, headrace_server, report, served_tokens_per_s
from headrace.engines.llama.threads import usable_cores
from headrace.models.store import resolve

WAIT_POLICIES: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 3000": {"GOMP_SPINCOUNT": "3000"},
}
SETTLE_S = 3.0
"""headrace needs two windows of 0.25 s to notice a neighbour and a moment to prepare for it, and its hold to
trust that one has left. Steady states are compared, so each begins after this long."""


@contextlib.contextmanager
def busy_neighbour(core: int) -> Iterator[None]:
    """A process in a session of its own that keeps ``core`` busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    os.sched_setaffinity(process.pid, {core})
    try:
        yield
    finally:
        process.kill()
        process.wait()


def settled_tokens_per_s(served: Served, streams: int, tokens: int) -> float:
    """Throughput after the engine has had ``SETTLE_S`` of work to adapt to what is beside it."""
    bodies = [body(index, tokens, "smollm2") for index in range(streams)]
    until_s = time.monotonic() + SETTLE_S
    while time.monotonic() < until_s:
        served_tokens_per_s(served, [{**one, "max_tokens": 24} for one in bodies])
    return served_tokens_per_s(served, bodies)


@dataclass(frozen=True)
class Beside:
    """Throughput at one number of streams, alone and beside a neighbour."""

    streams: int
    idle: Spread
    shared: Spread
    ratio: Spread

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "streams": self.streams,
            "idle": self.idle.plain(),
            "shared": self.shared.plain(),
            "ratio": self.ratio.plain(),
        }


def neighbour_rows(rounds: int, tokens: int) -> list[Beside]:
    """Part 1."""
    core = max(os.sched_getaffinity(0))
    results: dict[int, list[tuple[float, float]]] = {8: [], 32: []}
    with headrace_server() as served:
        for _ in range(rounds):
            for streams, pairs in results.items():
                idle = settled_tokens_per_s(served, streams, tokens)
                with busy_neighbour(core):
                    shared = settled_tokens_per_s(served, streams, tokens)
                pairs.append((idle, shared))
    return [
        Beside(
            streams,
            Spread.of([idle for idle, _ in pairs]),
            Spread.of([shared for _, shared in pairs]),
            Spread.of([shared / idle for idle, shared in pairs]),
        )
        for streams, pairs in results.items()
    ]


def wait_policy_rows(rounds: int, tokens: int) -> dict[str, Spread]:
    """Part 2: tokens/s of one stream by the bare loop under each wait policy, and by headrace."""
    bare = {name: BareProcess(resolve("smollm2"), environment) for name, environment in WAIT_POLICIES.items()}
    results: dict[str, list[float]] = {name: [] for name in [*bare, "headrace"]}
    try:
        with headrace_server() as served:
            for round_number in range(rounds + 1):
                figures = {name: process.tokens_per_s(1, tokens, usable_cores()) for name, process in bare.items()}
                figures["headrace"] = served_tokens_per_s(served, [body(0, tokens, "smollm2")])
                if round_number > 0:  # the first round warms everything
                    for name, figure in figures.items():
                        results[name].append(figure)
    finally:
        for process in bare.values():
            process.close()
    return {name: Spread.of(figures) for name, figures in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    neighbour = neighbour_rows(options.rounds, options.tokens)
    policies = wait_policy_rows(options.rounds, options.tokens)
    best = max((name for name in policies if name != "headrace"), key=lambda name: policies[name].median)
    kept = policies["headrace"].median / policies[best].median
    rows = [
        [f"{row.streams} streams", row.shared.text(), f"alone: {row.idle.text()}", row.ratio.text(2), ">= 0.6"]
        for row in neighbour
    ]
    rows += [[f"bare, {name}", spread.text(), "", "", ""] for name, spread in policies.items() if name != "headrace"]
    rows.append(["1 stream, idle", policies["headrace"].text(), f"best bare: {best}", f"{kept:.2f}", ">= 0.9"])
    report(
        "shared_machine",
        f"python -m benchmarks.shared_machine --rounds {options.rounds} --tokens {options.tokens}",
        ["case", "tokens/s", "yardstick", "ratio", "target"],
        rows,
        {
            "neighbour": [row.plain() for row in neighbour],
            "single_stream": {name: spread.plain() for name, spread in policies.items()},
            "best_wait_policy": best,
            "single_stream_ratio": kept,
        },
    )


if __name__ == "__main__":
    main()
