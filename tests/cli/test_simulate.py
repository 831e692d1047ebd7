"""``headrace simulate`` as it is typed: what it prints, writes and refuses."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from headrace.bench.record_file import read_info
from headrace.cli.main import main
from headrace.simulate.sweep import SimulatedSweep

LOAD = ["--arrivals", "poisson(20)", "--duration", "5", "--output-length", "8", "--slo-e2e", "1"]


def typed(*words: str) -> Result:
    """Run in this process."""
    return CliRunner().invoke(main, ["simulate", *words])


def refusal(*words: str) -> str:
    """The one line on standard error with which it fails."""
    result = typed(*words)
    assert result.exit_code == 1 and result.stderr.startswith("error: "), result.output
    return result.stderr


def test_a_run_writes_what_bench_writes(tmp_path: Path) -> None:
    """All of its files, marked as simulated; its table says so too."""
    result = typed("run", "a100-8b", *LOAD, "--output", str(tmp_path / "run"), "--check")
    assert result.exit_code == 0, result.output
    assert "SIMULATED" in result.output and "prefix hits" in result.output
    names = {file.name for file in (tmp_path / "run").iterdir()}
    expected = {"records.jsonl", "summary.json", "vllm.json", "groups.csv", "latencies.csv", "report.html"}
    assert names == {*expected, "fleet.json"}
    assert read_info(tmp_path / "run" / "records.jsonl").simulated
    assert "simulated" in (tmp_path / "run" / "report.html").read_text()


def test_compare_takes_it(tmp_path: Path) -> None:
    """Two simulated runs, by folder's records; the names say that they are simulated."""
    for name, policy in (("a", "vllm"), ("b", "hybrid")):
        change = f"groups.main.engine.policy={policy}"
        assert typed("run", "a100-8b", *LOAD, "--set", change, "--output", str(tmp_path / name)).exit_code == 0
    result = CliRunner().invoke(main, ["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "[simulated]" in result.output, result.output


def test_a_sweep_is_the_same_with_any_number_of_processes(tmp_path: Path) -> None:
    """Table, CSV and plot; two processes give the bytes of one."""
    words = ["sweep", "a100-8b", *LOAD[2:], "--rate", "10", "--rate", "40", "--knob", "groups.main.replicas=1,2"]
    for processes in ("1", "2"):
        result = typed(*words, "--processes", processes, "--output", str(tmp_path / processes))
        assert result.exit_code == 0, result.output
        assert "SIMULATED" in result.output
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("1", "2")]
    assert files[0] == files[1] and set(files[0]) == {"sweep.json", "sweep.csv", "sweep.svg"}
    found = msgspec.json.decode(files[0]["sweep.json"], type=SimulatedSweep)
    assert [(point.rate_rps, point.knobs["groups.main.replicas"]) for point in found.points] == [
        (10, 1), (10, 2), (40, 1), (40, 2),
    ]  # fmt: skip
    rows = list(csv.DictReader(files[0]["sweep.csv"].decode().splitlines()))
    assert {row["simulated"] for row in rows} == {"true"} and len(rows) == 4


WRONG = {
    ("run", "nowhere"): "no scenario file 'nowhere'",
    ("run", "a100-8b"): "say when requests come",
    ("run", "a100-8b", *LOAD, "--set", "groups.main.replica=2"): "did you mean replicas",
    ("run", "a100-8b", *LOAD, "--set", "replicas"): "KEY=VALUE",
    ("run", "a100-8b", *LOAD, "--warmup", "9"): "a warm-up of 9 s leaves nothing",
    ("sweep", "a100-8b", *LOAD): "say what to vary",
    ("sweep", "a100-8b", *LOAD, "--rate", "5"): "needs the word RATE",
    ("sweep", "a100-8b", *LOAD[2:], "--rate", "5", "--knob", "gateway.routing=best"): "routing",
}


@pytest.mark.parametrize(("words", "message"), WRONG.items())
def test_what_is_wrong_is_said(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """What, where and what to do, before anything is written."""
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert message in refusal(*words)
    finally:
        os.chdir(before)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    """Neither a run's nor a sweep's."""
    words = ("run", "a100-8b", *LOAD, "--output", str(tmp_path))
    assert typed(*words).exit_code == 0
    assert "holds a run already" in refusal(*words)


def test_scenarios_are_listed_and_printed() -> None:
    """To copy one."""
    assert "a100-8b: eight A100" in typed("scenarios").output
    assert "weights_s" in typed("scenarios", "a100-8b").output
    assert "did you mean one-engine" in refusal("scenarios", "one-engin")


def test_a_configuration_of_lanes_is_used(tmp_path: Path) -> None:
    """A lane that takes one at a time and queues nobody sheds the others."""
    config = tmp_path / "headrace.yaml"
    config.write_text("lanes:\n  interactive: {max_running: 1, max_queue: 1, priority: 10}\n")
    result = typed(
        "run", "a100-8b", "--arrivals", "poisson(300)", "--duration", "3", "--output-length", "50",
        "--set", "groups.main.replicas=1", "--config", str(config), "--output", str(tmp_path / "run"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    records = (tmp_path / "run" / "records.jsonl").read_text()
    assert "lane_queue_full" in records
