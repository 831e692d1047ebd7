"""Nothing is lost and nothing is made up, whatever goes wrong; the same seed gives the same bytes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.bench.load.build_schedule import build_schedule, schedule_sha256
from headrace.bench.record_checks import check_info, check_record
from headrace.bench.records import RequestRecord
from headrace.simulate.fleet.run import SimulatedRun
from tests.simulate.fleet.small import run_of, scenario_of, workload_of

POLICIES = ("hybrid", "continuous", "static", "dynamic", "auto", "vllm", "sglang", "llama-server")
FAULTS = [
    {"kind": "dies", "replica": "main/0", "at_s": 3, "for_s": 4, "noticed_s": 1},
    {"kind": "slow", "replica": "main/1", "at_s": 2, "for_s": 5, "factor": 4},
    {"kind": "stale", "replica": "main/1", "at_s": 1, "for_s": 5},
]


def check(run: SimulatedRun, asked: int) -> None:
    """Every request has one record that a measured run could have; tokens are those that were asked for."""
    assert sorted(record.index for record in run.records) == list(range(asked))
    check_info(run.info, "run")
    for record in run.records:
        check_record(record, f"request {record.index}")
        assert record.output_tokens == len(record.chunk_ns)
        if record.outcome == "ok":
            assert record.output_tokens == record.wanted_output_tokens
            assert record.sent_ns is not None and record.first_ns is not None and record.first_ns > record.sent_ns
        else:
            assert record.output_tokens <= record.wanted_output_tokens
    routed = sum(one.routed for group in run.groups for one in group.replicas)
    answered = sum(record.outcome in ("ok", "cut", "cancelled") for record in run.records)
    assert routed >= answered


def bytes_of(run: SimulatedRun) -> bytes:
    encode = msgspec.json.encode
    return encode(run.info) + b"".join([encode(record) for record in run.records])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_has_one_record(policy: str) -> None:
    """Under each policy, with a replica that dies, a slow one and stale metrics."""
    workload = workload_of(duration_s=10.0)
    run = run_of(scenario_of(engine={"policy": policy}, faults=FAULTS), workload)
    check(run, len(build_schedule(workload, seed=1).requests))
    assert Counter(record.outcome for record in run.records)["ok"] > 100


@pytest.mark.parametrize("policy", POLICIES)
def test_scarce_kv_memory_loses_nobody(policy: str) -> None:
    """With KV memory for a few sequences somebody waits or is preempted, and everybody ends with all tokens."""
    workload = workload_of(duration_s=8.0)
    scenario = scenario_of(engine={"policy": policy, "kv_tokens": 4096}, gateway={"admission": False})
    run = run_of(scenario, workload, drain_s=3000.0)
    check(run, len(build_schedule(workload, seed=1).requests))
    assert {record.outcome for record in run.records} == {"ok"}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(POLICIES),
    routing=st.sampled_from(
        ["gateway", "power-of-two", "least-requests", "least-wait", "prefix", "random", "round-robin"]
    ),
    admission=st.booleans(),
    retries=st.integers(0, 2),
    interval_s=st.sampled_from([0.0, 0.3]),
    network_s=st.sampled_from([0.0, 0.01]),
    split=st.booleans(),
    dies_at_s=st.floats(0.1, 3.5),
)
def test_whatever_the_scenario(
    seed: int,
    policy: str,
    routing: str,
    admission: bool,
    retries: int,
    interval_s: float,
    network_s: float,
    split: bool,
    dies_at_s: float,
) -> None:
    """Random scenarios: records are whole, and twice the same scenario is twice the same bytes."""
    engine = {"policy": policy, "stated": {"weights_s": 0.01, "row_s": 1e-4}, "max_sequences": 16}
    groups: dict[str, Any] = {"main": {"replicas": 2, "role": "prefill" if split else "both", "engine": engine}}
    if split:
        groups["rest"] = {"replicas": 1, "role": "decode", "engine": engine}
    gateway = {
        "routing": routing,
        "admission": admission,
        "retries": retries,
        "metrics_interval_s": interval_s,
        "network_s": network_s,
    }
    faults = [{"kind": "dies", "replica": "main/1", "at_s": dies_at_s, "for_s": 1.0, "noticed_s": 0.4}]
    scenario = scenario_of(groups=groups, gateway=gateway, faults=faults)
    workload = workload_of("poisson(25)", 4.0, malformed={"share": 0.05})
    run = run_of(scenario, workload, seed)
    check(run, len(build_schedule(workload, seed=seed).requests))
    assert bytes_of(run) == bytes_of(run_of(scenario, workload, seed))


def test_the_same_seed_gives_the_same_files_in_any_process(tmp_path: Path) -> None:
    """Byte for byte, also where strings hash otherwise; another seed gives others."""
    found = []
    for number, (hashes, seed) in enumerate((("1", "5"), ("2", "5"), ("1", "6"))):
        folder = tmp_path / str(number)
        command = [sys.executable, "-m", "headrace", "simulate", "run", "one-engine", "--arrivals", "poisson(3)"]
        command += ["--duration", "5", "--output-length", "8", "--seed", seed, "--output", str(folder)]
        subprocess.run(command, check=True, capture_output=True, env={"PYTHONHASHSEED": hashes, **_path()})
        found.append({file.name: file.read_bytes() for file in sorted(folder.iterdir())})
    assert found[0] == found[1]
    assert found[0]["records.jsonl"] != found[2]["records.jsonl"]


def _path() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}


def test_a_schedule_in_pieces_has_the_digest_of_the_whole() -> None:
    """So that a simulated and a measured run of one load can be told to have had the same one."""
    workload = workload_of(duration_s=5.0)
    run = run_of(scenario_of(), workload, 3)
    assert run.info.schedule_sha256 == schedule_sha256(build_schedule(workload, seed=3))


def by_index(run: SimulatedRun) -> dict[int, RequestRecord]:
    return {record.index: record for record in run.records}
