"""Our own engine, simulated: calibrate it, load it for real, replay the same requests on the virtual clock.

``headrace calibrate engine`` measures the engine with the configuration that then serves; some single requests to the
idle server measure what serving adds (steps that are longer beside gateway and client, and the way around them).
``headrace bench run`` sends mixed traffic in three lanes, and every request that it sent goes at the same time, with
the lengths that the server counted, to the virtual engine with the same policy, knobs and bands. The engine computes
on one thread, so that gateway and load generator have the other core. The yardstick, lane by lane: p50 within 10 %, p99
within 20 %, throughput within 5 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import headrace_server, report
from headrace.bench.drive.runner import RunSettings
from headrace.bench.record_file import read_run
from headrace.bench.records import RequestRecord
from headrace.config.load import load_with_origins
from headrace.config.scheduling import scheduling_knobs
from headrace.config.schema import Config
from headrace.models.tiny import make_tiny_gguf
from headrace.scheduling.bands import Band
from headrace.scheduling.cost import CostModel, CostPrior
from headrace.simulate.calibrate.server import InService, measure_in_service
from headrace.simulate.calibrated import CalibratedTimes, Calibration, at_pace, read_calibration, write_calibration
from headrace.simulate.requests import RequestRecord as VirtualRecord
from headrace.simulate.requests import Targets, VirtualRequest
from headrace.simulate.simulation import Simulation
from headrace.simulate.virtual_engine import EngineShape, VirtualEngine

CONFIG = """
model:
  source: {model}
engine:
  threads: 1
  prefix_cache: false
  bands:
    - {{max_context_tokens: 1024, max_sequences: 12}}
    - {{max_context_tokens: 4096, max_sequences: 6}}
lanes:
  chat: {{slo: {{p99_ttft_s: 2, p99_tpot_s: 0.5}}, priority: 10, overload: queue}}
  answers: {{slo: {{p99_e2e_s: 20}}, priority: 20, overload: queue}}
  papers: {{slo: {{}}, priority: 50, overload: queue}}
"""
WORKLOAD = """
arrivals: poisson({rate})
duration_s: {duration_s}
classes:
  chat:
    {{weight: 60, lane: chat, input_length: "lognormal(median=80, p99=400, min=20, max=800)",
      output_length: "lognormal(median=40, p99=120, min=4, max=160)", slo: {{ttft_s: 2}}}}
  answers:
    {{weight: 30, lane: answers, input_length: "uniform(200, 900)", output_length: "uniform(8, 48)",
      slo: {{e2e_s: 20}}}}
  papers:
    {{weight: 10, lane: papers, input_length: "uniform(1500, 3000)", output_length: "uniform(30, 120)",
      slo: {{e2e_s: 120}}}}
"""
BOUNDS = {"p50": 0.10, "p99": 0.20, "throughput": 0.05}


def headrace(*arguments: str, statuses: Sequence[int] = (0,)) -> None:
    """A command, to its end; its words go to standard error."""
    done = subprocess.run([sys.executable, "-m", "headrace", *arguments], stdout=sys.stderr.fileno())
    if done.returncode not in statuses:
        raise SystemExit(f"headrace {' '.join(arguments)} ended with {done.returncode}")


def simulate(records: Sequence[RequestRecord], config: Config, calibration: Calibration) -> dict[int, VirtualRecord]:
    """The same requests on the virtual clock; half of the way around comes before the engine, half after it."""
    simulation = Simulation(seed=1)
    shape = EngineShape(
        tuple([Band(*band) for band in calibration.bands]),
        layout="libllama",
        kv_travels=True,
        cuts=True,
        overhead_s=calibration.overhead_s,
        noise=calibration.noise,
    )
    times = CalibratedTimes(calibration)
    # The real engine does not know these curves: it measures itself shortly at its start, and learns from each step.
    believed = CostModel(CostPrior(times.call_s(1), 1 / (times.call_s(256, 0, 1) / 256), 0.0))
    engine = VirtualEngine(
        shape,
        times,
        simulation.random("engine"),
        knobs=scheduling_knobs(config),
        believed=believed,
        learn=believed.learn,
    )
    expected: dict[str, float] = {}
    for record in sorted(records, key=lambda record: record.sent_ns or 0):
        lane = config.lanes[record.lane or ""]
        before = expected.get(lane_name := record.lane or "", 64.0)
        expected[lane_name] = before + 0.1 * (record.output_tokens - before)
        request = VirtualRequest(
            str(record.index),
            (record.sent_ns or 0) * 1e-9 + calibration.edge_s / 2,
            record.prompt_tokens or record.input_tokens,
            record.output_tokens,
            lane=lane_name,
            priority=lane.priority,
            targets=Targets(lane.slo.p99_ttft_s, lane.slo.p99_tpot_s, lane.slo.p99_e2e_s),
            max_tokens=record.wanted_output_tokens,
            expected_tokens=round(before),
        )
        simulation.add(_arrival(engine, request))
    simulation.run()
    return {int(name): found for name, found in engine.records.items()}


def _arrival(engine: VirtualEngine, request: VirtualRequest) -> Any:
    from headrace.simulate.simulation import Event

    return Event(request.arrived_s, lambda now_s: engine.submit(request, now_s))


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def figures(records: Sequence[RequestRecord], virtual: dict[int, VirtualRecord], edge_s: float) -> list[dict[str, Any]]:
    """Real and simulated, of one lane."""
    real: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "E2E": []}
    made: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "E2E": []}
    spans: list[tuple[float, float]] = []
    made_spans: list[tuple[float, float]] = []
    tokens = 0
    for record in records:
        twin = virtual[record.index]
        assert record.sent_ns is not None and record.first_ns is not None
        assert twin.ttft_s is not None and twin.e2e_s is not None and twin.ended_s is not None
        last_ns = record.chunk_ns[-1]
        real["TTFT"].append((record.first_ns - record.sent_ns) * 1e-9)
        real["E2E"].append((last_ns - record.sent_ns) * 1e-9)
        made["TTFT"].append(twin.ttft_s + edge_s)
        made["E2E"].append(twin.e2e_s + edge_s)
        if record.output_tokens > 1 and twin.tpot_s is not None:
            real["TPOT"].append((last_ns - record.first_ns) * 1e-9 / (record.output_tokens - 1))
            made["TPOT"].append(twin.tpot_s)
        spans.append((record.sent_ns * 1e-9, last_ns * 1e-9))
        made_spans.append((record.sent_ns * 1e-9, twin.ended_s + edge_s / 2))
        tokens += record.output_tokens
    found = []
    for name in real:
        for figure, share in (("p50", 0.5), ("p99", 0.99)):
            values = quantile(real[name], share), quantile(made[name], share)
            found.append(_figure(name, figure, *values))
    rates = [tokens / (max([end for _, end in one]) - min([start for start, _ in one])) for one in (spans, made_spans)]
    found.append(_figure("tokens/s", "throughput", *rates))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="tiny (synthetic), a name of headrace model list, or a GGUF")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep configuration, calibration and records in this folder")
    parser.add_argument("--calibration", type=Path, help="use this profile instead of measuring")
    parser.add_argument("--records", type=Path, help="folder of an earlier run, to simulate it again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-") as name:
        folder = options.keep or Path(name)
        folder.mkdir(exist_ok=True)
        model = options.model
        if model == "tiny":
            model = str(
                make_tiny_gguf(folder / "tiny.gguf", layers=8, embedding=512, heads=8, kv_heads=4, feed_forward=1536)
            )
        config_path, workload_path = folder / "headrace.yaml", folder / "workload.yaml"
        config_path.write_text(CONFIG.format(model=model))
        workload_path.write_text(WORKLOAD.format(rate=options.rate, duration_s=options.duration))
        config = load_with_origins(str(config_path)).config
        calibration_path = options.calibration or folder / "calibration.json"
        pace = 1.0
        if options.records is None:
            seen = measured_run(config_path, workload_path, calibration_path, folder / "run", options)
            pace = seen.pace
            write_calibration(calibration_path, at_pace(read_calibration(calibration_path), pace, seen.edge_s))
        calibration = read_calibration(calibration_path)
        records = read_run((options.records or folder / "run") / "records.jsonl").records
        bad = [record for record in records if record.outcome != "ok"]
        good = [record for record in records if record.outcome == "ok"]
        virtual = simulate(good, config, calibration)
    rows, data = [], {}
    for lane in (*sorted({record.lane or "" for record in good}), "all"):
        mine = [record for record in good if lane in ("all", record.lane)]
        data[lane] = {"requests": len(mine), "figures": figures(mine, virtual, calibration.edge_s)}
        for item in data[lane]["figures"]:  # type: ignore[attr-defined]
            rows.append(
                [
                    lane, str(len(mine)), item["what"], item["figure"], f"{item['real']:.4f}",
                    f"{item['simulated']:.4f}", f"{item['error']:+.1%}", "yes" if item["within"] else "NO",
                ]
            )  # fmt: skip
    report(
        "sim_fidelity_engine",
        f"python -m benchmarks.sim_fidelity_engine --model {options.model} --rate {options.rate} "
        f"--duration {options.duration} --seed {options.seed}",
        ["lane", "requests", "", "figure", "real, s", "simulated, s", "error", "within"],
        rows,
        {
            "lanes": data,
            "not_ok": len(bad),
            "pace_in_service": pace,
            "edge_s": calibration.edge_s,
            "overhead_s": calibration.overhead_s,
            "noise": calibration.noise,
            "calibration_error_median": calibration.error_median,
            "preempted": statistics.mean([twin.preempted for twin in virtual.values()]),
        },
    )


def _figure(what: str, figure: str, real: float, simulated: float) -> dict[str, Any]:
    error = simulated / real - 1
    within = abs(error) <= BOUNDS[figure]
    return {"what": what, "figure": figure, "real": real, "simulated": simulated, "error": error, "within": within}


def measured_run(
    config_path: Path, workload_path: Path, calibration_path: Path, run_folder: Path, options: argparse.Namespace
) -> InService:
    """Calibrate (unless a profile is given), serve, measure what serving adds, load."""
    if options.calibration is None:
        headrace(
            "calibrate", "engine", "--config", str(config_path), "--output", str(calibration_path), "--most-time", "60",
            "--repeats", "5",
        )  # fmt: skip
    calibration = read_calibration(calibration_path)
    with headrace_server(["--config", str(config_path)]) as served:
        settings = RunSettings(served.base_url, model=_served_model(served.base_url))
        seen = measure_in_service(settings, {}, CalibratedTimes(calibration), calibration.overhead_s, seed=7)
        headrace(
            "bench", "run", "--target", served.base_url, "--model", settings.model, "--workload", str(workload_path),
            "--seed", str(options.seed), "--output", str(run_folder), "--drain", "60", statuses=(0, 3),
        )  # fmt: skip
    return seen


def _served_model(base_url: str) -> str:
    import urllib.request

    with urllib.request.urlopen(f"{base_url}/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


if __name__ == "__main__":
    main()
