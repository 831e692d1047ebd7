"""How many requests a second the load generator sends on one core before it is late.

Open loop with Poisson arrivals of short streams against the truth server of the tests, which has the other core.
Each rate is run several times; the highest one of which every run is valid is the generator's limit here.

    python -m benchmarks.bench_generator
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence

from benchmarks.harness import Spread, report
from headrace.bench.drive.runner import RunSettings, run
from headrace.bench.planned import PlannedRequest, Schedule
from headrace.bench.requests.bodies import RequestBodies
from headrace.bench.requests.texts import PromptTexts
from headrace.bench.requests.token_scale import TokenScale
from headrace.bench.results.validity import Validity, validity
from tests.bench.truth_server import TruthServer

_SEED = 7
_INPUT_TOKENS = 64
_OUTPUT_TOKENS = 8
_GAP_MS = 5.0


def poisson(rate: float, duration_s: float, seed: int) -> Schedule:
    """Short streams at ``rate`` requests a second."""
    draw = random.Random(seed)
    requests: list[PlannedRequest] = []
    due_s = draw.expovariate(rate)
    while due_s < duration_s:
        planned = PlannedRequest(
            index=len(requests),
            class_name="short",
            input_tokens=_INPUT_TOKENS,
            output_tokens=_OUTPUT_TOKENS,
            due_ns=round(due_s * 1e9),
            text_seed=draw.getrandbits(32),
        )
        requests.append(planned)
        due_s += draw.expovariate(rate)
    return Schedule(requests, duration_s, seed, {"arrivals": f"poisson({rate:g})"}, {})


def pin(pid: int, core: int) -> None:
    """Keep a process on one core."""
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("this machine cannot pin a process to a core")
    os.sched_setaffinity(pid, {core})


def one_run(url: str, rate: float, duration_s: float, seed: int) -> dict[str, float | int | bool]:
    """One run's figures."""
    bodies = RequestBodies(model="truth", texts=PromptTexts(seed), scale=TokenScale())
    result = run(poisson(rate, duration_s, seed), bodies, RunSettings(target=url, model="truth"), environment={})
    found: Validity = validity(result.records, result.info.health)
    ok = sum(record.outcome == "ok" for record in result.records)
    return {
        "requests": len(result.records),
        "ok": ok,
        "chunks": sum(len(record.chunk_ns) for record in result.records),
        "sent_per_s": len(result.records) / duration_s,
        "send_lag_p99_ms": 1e3 * (found.send_lag_p99_s or 0.0),
        "loop_lag_p99_ms": 1e3 * result.info.health.loop_lag_p99_s,
        "cpu_share": result.info.health.cpu_share,
        "in_flight_peak": result.info.health.peak_in_flight,
        "valid": found.valid and ok == len(result.records),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[500, 1000, 2000, 3000, 4000])
    parser.add_argument("--duration", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    own_core, server_core = sorted(os.sched_getaffinity(0))[-1], sorted(os.sched_getaffinity(0))[0]
    if own_core == server_core:
        raise SystemExit("this machine has one core: the server would run on the generator's")
    server = TruthServer(first_ms=_GAP_MS, gap_ms=_GAP_MS, keep=False)
    try:
        pin(server.pid, server_core)
        pin(0, own_core)
        results = {}
        for rate in options.rates:
            seeds = range(_SEED, _SEED + options.repeats)
            results[f"{rate:g}"] = [one_run(server.url, rate, options.duration, seed) for seed in seeds]
    finally:
        server.close()
    shown = (("sent_per_s", 0), ("send_lag_p99_ms", 2), ("loop_lag_p99_ms", 2), ("cpu_share", 2))
    rows = [
        [
            rate,
            *[Spread.of([float(one[name]) for one in runs]).text(digits) for name, digits in shown],
            f"{sum(bool(one['valid']) for one in runs)} of {len(runs)}",
        ]
        for rate, runs in results.items()
    ]
    columns = ["rate, req/s", "sent/s", "send lag p99, ms", "loop lag p99, ms", "CPU share", "valid runs"]
    command = " ".join(["python -m benchmarks.bench_generator", *(sys.argv[1:] if arguments is None else arguments)])
    report(f"generator on one core, streams of {_OUTPUT_TOKENS} tokens", command, columns, rows, results)


if __name__ == "__main__":
    main()
