"""How long simulating takes, how it grows, and how much memory: 350 requests a second over eight replicas.

    python -m benchmarks.sim_speed                 # 60, 180 and 600 simulated seconds: the curve
    python -m benchmarks.sim_speed --hour          # and the whole hour, 1.26 million requests

Everything real is on: lanes, admission by prediction, routing, the hybrid step policy, KV accounting, prefix caches,
and every request's record is written to a file as it ends. One process, one core. Each point runs in a process of its
own, so that its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from benchmarks.harness import report
from headrace.bench.load.workload_file import LoadedWorkload, parse_workload
from headrace.bench.record_file import RecordWriter
from headrace.simulate.fleet.run import RunOptions, SimulatedLoad, quiet_collector
from headrace.simulate.fleet.scenario_file import LoadedScenario, load_scenario, with_knob

RATE_RPS: Final = 350.0
CURVE_S: Final = (60.0, 180.0, 600.0)
HOUR_S: Final = 3600.0
WORKLOAD: Final = """
description: short decisions, chat, captions and a few documents, as an enterprise's gateway sees them
arrivals: poisson(350)
duration_s: 60
classes:
  decision:
    {weight: 40, lane: realtime, input_length: "lognormal(median=60, p99=200)", output_length: 4, slo: {e2e_s: 0.35}}
  chat:
    weight: 25
    lane: interactive
    input_length: "lognormal(median=80, p99=600, max=1024)"
    output_length: "lognormal(median=24, p99=100, max=256)"
    slo: {ttft_s: 0.3, tpot_s: 0.06}
  caption:
    weight: 33
    lane: captions
    input_length: "lognormal(median=90, p99=500, max=1024)"
    output_length: "lognormal(median=16, p99=48)"
    slo: {e2e_s: 2}
  document:
    {weight: 2, lane: long, input_length: "uniform(500, 3000)", output_length: "lognormal(median=50, p99=200)"}
"""


def workload(rate_rps: float, duration_s: float) -> LoadedWorkload:
    """The mix at a rate."""
    text = WORKLOAD.replace("poisson(350)", f"poisson({rate_rps:g})")
    text = text.replace("duration_s: 60", f"duration_s: {duration_s:g}")
    return LoadedWorkload(parse_workload(text, name="sim_speed", folder=Path()), "sim_speed", Path())


def scenario(policy: str) -> LoadedScenario:
    """Eight A100s."""
    loaded = load_scenario("a100-8b")
    changed = with_knob(loaded.scenario, "groups.main.engine.policy", policy)
    return LoadedScenario(changed, loaded.name, loaded.folder)


def measure(duration_s: float, rate_rps: float, policy: str) -> dict[str, float]:
    """One run, its records written to a file that is then removed."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        path = Path(folder) / "records.jsonl"
        began_s = time.perf_counter()
        cpu_s = time.process_time()
        load = SimulatedLoad(scenario(policy), workload(rate_rps, duration_s), RunOptions(seed=1))
        with RecordWriter(path, load.first_info()) as writer, quiet_collector():
            done = load.run(writer.write)
            writer.finish(done.info)
        took_s = time.perf_counter() - began_s
        replicas = [one for group in done.groups for one in group.replicas]
        return {
            "simulated_s": duration_s,
            "requests": sum([one.routed + one.shed for one in replicas]),
            "took_s": took_s,
            "cpu_s": time.process_time() - cpu_s,
            "steps": sum([one.steps for one in replicas]),
            "events": done.events,
            "peak_in_flight": done.peak_in_flight,
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "records_mib": path.stat().st_size / 2**20,
            "busy": done.groups[0].busy,
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim_speed", description=__doc__)
    parser.add_argument("--hour", action="store_true", help="the whole hour too")
    parser.add_argument("--only", type=float, metavar="S", help="one run of so many simulated seconds, as JSON")
    parser.add_argument("--rate", type=float, default=RATE_RPS)
    parser.add_argument("--policy", default="hybrid")
    options = parser.parse_args()
    if options.only is not None:
        print(json.dumps(measure(options.only, options.rate, options.policy)))
        return
    rows, data = [], []
    for duration_s in (*CURVE_S, *((HOUR_S,) if options.hour else ())):
        command = [sys.executable, "-m", "benchmarks.sim_speed", "--only", str(duration_s)]
        command += ["--rate", str(options.rate), "--policy", options.policy]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        one = json.loads(done.stdout.strip().splitlines()[-1])
        data.append(one)
        rows.append(
            [
                f"{one['simulated_s']:g} s",
                f"{one['requests']:,.0f}",
                f"{one['took_s']:.1f} s",
                f"{1e6 * one['cpu_s'] / one['requests']:.0f} us",
                f"{one['steps']:,.0f}",
                f"{one['peak_in_flight']:,.0f}",
                f"{one['peak_mib']:.0f} MiB",
                f"{one['records_mib']:.0f} MiB",
            ]
        )
    report(
        "sim_speed",
        f"python -m benchmarks.sim_speed{' --hour' if options.hour else ''} --rate {options.rate:g}",
        ["simulated", "requests", "took", "CPU a request", "steps", "most in flight", "memory", "records"],
        rows,
        {"policy": options.policy, "rate_rps": options.rate, "points": data},
    )


if __name__ == "__main__":
    main()
