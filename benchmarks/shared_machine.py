"""Throughput beside a busy neighbour, and what being ready for one costs when there is none.

Part 1: a process that never sleeps is pinned to one core; headrace's throughput at 8 and 32 streams beside it,
against the same without it, in turns; and, in the same turns, the bare loop beside it with each way of waiting,
the best of which is what any scheduling of one pass could reach. Part 2: single-stream decode of an idle machine
through headrace, against the bare loop with each wait policy of the OpenMP runtime.
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
from benchmarks.harness import BareProcess, Served, Spread, headrace_server, metric, report, served_tokens_per_s
from headrace.engines.llama.threads import usable_cores
from headrace.models.store import resolve

WAIT_POLICIES: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 3000": {"GOMP_SPINCOUNT": "3000"},
}
BESIDE: dict[str, tuple[dict[str, str], int]] = {
    "1 thread": ({}, 1),
    "2 threads, passive": ({"OMP_WAIT_POLICY": "passive"}, 2),
}
"""Bare loops beside the neighbour: environment and threads. Spinning threads are left out: at a fifth of the idle
figure they would only take the time of the run (``docs/decisions/0003``)."""
PAUSE_S = 0.3
"""The threads of the run before spin on for a while (see ``engine_overhead``)."""
SETTLE_LIMIT_S = 60.0


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


def settle(served: Served, threads: int) -> None:
    """Keep the engine at work until it computes with ``threads`` threads: steady states are compared. Raises
    RuntimeError when it does not get there."""
    until_s = time.monotonic() + SETTLE_LIMIT_S
    while time.monotonic() < until_s:
        served_tokens_per_s(served, [body(0, 16, "smollm2")])
        if metric(served, "headrace_engine_threads") == threads:
            return
    raise RuntimeError(f"the engine does not come to {threads} threads; what else runs here?")


@dataclass(frozen=True)
class Beside:
    """Tokens/s at one number of streams: alone, beside a neighbour, and by the bare loops beside it."""

    streams: int
    idle: Spread
    shared: Spread
    ratio: Spread
    bare: dict[str, Spread]

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "streams": self.streams,
            "idle": self.idle.plain(),
            "shared": self.shared.plain(),
            "ratio": self.ratio.plain(),
            "bare_beside": {name: spread.plain() for name, spread in self.bare.items()},
        }


def neighbour_rows(rounds: int, tokens: int) -> list[Beside]:
    """Part 1."""
    core, cores = max(os.sched_getaffinity(0)), usable_cores()
    loops = {name: BareProcess(resolve("smollm2"), environment) for name, (environment, _) in BESIDE.items()}
    found: dict[int, dict[str, list[float]]] = {8: {}, 32: {}}
    try:
        with headrace_server() as served:
            for _ in range(rounds):
                for streams, figures in found.items():
                    bodies = [body(index, tokens, "smollm2") for index in range(streams)]
                    settle(served, cores)
                    figures.setdefault("idle", []).append(served_tokens_per_s(served, bodies))
                    with busy_neighbour(core):
                        settle(served, cores - 1)
                        figures.setdefault("shared", []).append(served_tokens_per_s(served, bodies))
                        for name, loop in loops.items():
                            time.sleep(PAUSE_S)
                            bare = loop.tokens_per_s(streams, tokens, BESIDE[name][1])
                            figures.setdefault(name, []).append(bare)
    finally:
        for loop in loops.values():
            loop.close()
    return [
        Beside(
            streams,
            Spread.of(figures["idle"]),
            Spread.of(figures["shared"]),
            Spread.of([a / b for a, b in zip(figures["shared"], figures["idle"], strict=True)]),
            {name: Spread.of(figures[name]) for name in loops},
        )
        for streams, figures in found.items()
    ]


def wait_policy_rows(rounds: int, tokens: int) -> dict[str, Spread]:
    """Part 2: tokens/s of one stream by the bare loop under each wait policy, and by headrace."""
    bare = {name: BareProcess(resolve("smollm2"), environment) for name, environment in WAIT_POLICIES.items()}
    results: dict[str, list[float]] = {name: [] for name in [*bare, "headrace"]}
    try:
        with headrace_server() as served:
            for round_number in range(rounds + 1):
                figures = {}
                for name, process in bare.items():
                    time.sleep(PAUSE_S)
                    figures[name] = process.tokens_per_s(1, tokens, usable_cores())
                time.sleep(PAUSE_S)
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    neighbour = neighbour_rows(options.rounds, options.tokens)
    policies = wait_policy_rows(options.rounds, options.tokens)
    best = max((name for name in policies if name != "headrace"), key=lambda name: policies[name].median)
    kept = policies["headrace"].median / policies[best].median
    rows = [
        [f"{row.streams} streams", row.shared.text(), f"alone: {row.idle.text()}", row.ratio.text(2), ">= 0.6"]
        for row in neighbour
    ]
    rows += [
        [f"{row.streams} streams, bare, {name}", spread.text(), "", f"{spread.median / row.idle.median:.2f}", ""]
        for row in neighbour
        for name, spread in row.bare.items()
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
