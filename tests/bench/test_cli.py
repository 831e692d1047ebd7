"""``headrace bench``, as a shell sees it, against a server whose answers are known."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.bench.load.workload_file import shipped_workloads
from headrace.bench.record_file import read_run
from headrace.cli.main import main
from tests.bench.truth_server import TruthServer

FIRST_MS, GAP_MS = 20.0, 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[TruthServer]:
    one = TruthServer(first_ms=FIRST_MS, gap_ms=GAP_MS)
    yield one
    one.close()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return CliRunner()


def run(shell: CliRunner, server: TruthServer, *arguments: str) -> Result:
    target = f"http://127.0.0.1:{server.port}"
    return shell.invoke(main, ["bench", "run", "--target", target, "--model", "truth", *arguments])


def test_a_run_leaves_all_its_files_and_they_agree_with_the_truth(shell: CliRunner, server: TruthServer) -> None:
    """20 requests of 6 tokens: 20 ms to the first one, then 5 ms each."""
    done = run(
        shell, server, "--arrivals", "constant(20)", "--duration", "1", "--input-length", "30",
        "--output-length", "6", "--slo-e2e", "5", "--output", "out",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    folder = Path("out")
    assert {file.name for file in folder.iterdir()} == {
        "records.jsonl", "summary.json", "vllm.json", "groups.csv", "latencies.csv", "report.html",
    }  # fmt: skip
    records = read_run(folder / "records.jsonl").records
    assert len(records) == 20
    assert {(record.outcome, record.output_tokens, len(record.chunk_ns)) for record in records} == {("ok", 6, 6)}
    vllm = json.loads((folder / "vllm.json").read_text())
    assert (vllm["completed"], vllm["failed"], vllm["total_output_tokens"]) == (20, 0, 120)
    # The client sees a token no sooner than the server writes it; how much later is the machine's noise.
    assert FIRST_MS <= vllm["median_ttft_ms"] < FIRST_MS + 50
    assert GAP_MS * 0.9 <= vllm["median_tpot_ms"] < GAP_MS + 20
    rows = {row["name"]: row for row in csv.DictReader((folder / "groups.csv").read_text().splitlines())}
    assert {row["offered"] for row in rows.values()} == {"20"}
    assert "<svg" in (folder / "report.html").read_text()
    assert "results: out" in done.output


def test_a_report_made_again_is_the_same(shell: CliRunner, server: TruthServer) -> None:
    run(shell, server, "--arrivals", "constant(20)", "--duration", "0.5", "--output-length", "2", "--output", "out")
    before = {name: (Path("out") / name).read_bytes() for name in ("summary.json", "vllm.json", "groups.csv")}
    assert shell.invoke(main, ["bench", "report", "out"]).exit_code == 0
    assert {name: (Path("out") / name).read_bytes() for name in before} == before


def test_two_runs_with_one_seed_have_one_load_and_compare_finds_nothing(shell: CliRunner, server: TruthServer) -> None:
    for name in ("a", "b"):
        run(shell, server, "--arrivals", "poisson(40)", "--duration", "2", "--output-length", "uniform(2, 6)",
            "--seed", "3", "--output", name)  # fmt: skip
    hashes = {read_run(Path(name) / "records.jsonl").info.schedule_sha256 for name in ("a", "b")}
    assert len(hashes) == 1
    compared = shell.invoke(main, ["bench", "compare", "a", "b", "--json"])
    assert compared.exit_code == 0, compared.output
    assert json.loads(compared.stdout)["method"] == "blocks"


def test_a_slower_server_is_found_out(shell: CliRunner, server: TruthServer) -> None:
    slow = TruthServer(first_ms=FIRST_MS + 100, gap_ms=GAP_MS)
    try:
        for name, one in (("a", server), ("b", slow)):
            run(shell, one, "--arrivals", "constant(40)", "--duration", "3", "--output-length", "2", "--output", name)
    finally:
        slow.close()
    checked = shell.invoke(main, ["bench", "compare", "a", "b", "--check"])
    assert checked.exit_code == 4, checked.output
    assert shell.invoke(main, ["bench", "compare", "b", "a", "--check"]).exit_code == 0


def test_sweep_finds_a_rate_between_one_that_holds_and_one_that_does_not(shell: CliRunner, server: TruthServer) -> None:
    """A server without a queue holds every rate up to the highest tried; a bound it cannot meet holds none."""
    target = f"http://127.0.0.1:{server.port}"
    common = ["bench", "sweep", "--target", target, "--model", "truth", "--output-length", "2", "--start", "20",
              "--duration", "1", "--attainment", "0.6", "--most-trials", "3"]  # fmt: skip
    holds = shell.invoke(main, [*common, "--slo-ttft", "5", "--output", "holds"])
    assert holds.exit_code == 0, holds.output
    assert json.loads(Path("holds/sweep.json").read_text())["answer_rps"] >= 20
    fails = shell.invoke(main, [*common, "--slo-ttft", "0.001", "--output", "fails"])
    assert fails.exit_code == 3, fails.output
    assert json.loads(Path("fails/sweep.json").read_text())["answer_rps"] is None


def test_the_shipped_workload_runs_and_its_illegal_requests_are_judged_apart(
    shell: CliRunner, server: TruthServer
) -> None:
    done = run(shell, server, "--workload", "mixed-enterprise", "--max-context", "512", "--arrivals", "poisson(40)",
               "--duration", "2", "--output", "out")  # fmt: skip
    assert done.exit_code in (0, 3), done.output
    records = read_run(Path("out/records.jsonl")).records
    assert {r.class_name for r in records if r.malformed is None} == {
        "long_document", "dialogue", "short_generation",
    }  # fmt: skip
    assert any(record.malformed is not None for record in records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--duration", "1"], "--arrivals"),
        (["--arrivals", "poison(1)", "--duration", "1"], "did you mean 'poisson'?"),
        (["--arrivals", "poisson(1)"], "duration"),
        (["--arrivals", "poisson(1)", "--duration", "1", "--header", "nonsense"], "NAME:VALUE"),
        (["--arrivals", "poisson(1)", "--duration", "1", "--body", "[1]"], "JSON object"),
        (["--arrivals", "poisson(1)", "--duration", "1", "--timeout", "0"], "--timeout"),
        (["--arrivals", "poisson(1)", "--duration", "1", "--warmup", "2"], "warm-up"),
        (["--arrivals", "poisson(1)", "--duration", "1", "--input-length", "uniform(9,1)"], "uniform"),
        (["--workload", "mixed-enterprize"], "mixed-enterprise"),
        (["--workload", "mixed-enterprise", "--lane", "x"], "workload file says this"),
        (["--arrivals", "poisson(1)", "--duration", "1", "--api-key-env", "NOT_THERE"], "NOT_THERE"),
    ],
)
def test_wrong_options_are_one_line_and_exit_status_1(
    shell: CliRunner, server: TruthServer, arguments: list[str], message: str
) -> None:
    failed = run(shell, server, *arguments)
    assert failed.exit_code == 1, failed.output
    assert failed.stderr.startswith("error: ")
    assert message in failed.stderr


def test_a_folder_that_holds_a_run_is_not_overwritten(shell: CliRunner, server: TruthServer) -> None:
    arguments = ["--arrivals", "constant(5)", "--duration", "0.4", "--output-length", "1", "--output", "out"]
    assert run(shell, server, *arguments).exit_code == 0
    again = run(shell, server, *arguments)
    assert again.exit_code == 1
    assert "holds a run already" in again.stderr


def test_a_target_that_is_not_there_is_one_line(shell: CliRunner) -> None:
    failed = shell.invoke(
        main, ["bench", "run", "--target", "http://127.0.0.1:1", "--model", "x", "--arrivals", "constant(1)",
               "--duration", "1"]
    )  # fmt: skip
    assert failed.exit_code == 1
    assert "does not answer" in failed.stderr


def test_workloads_are_listed_and_printed(shell: CliRunner) -> None:
    listed = shell.invoke(main, ["bench", "workloads"])
    assert listed.stdout.startswith("mixed-enterprise: ")
    printed = shell.invoke(main, ["bench", "workloads", "mixed-enterprise"])
    assert printed.stdout == shipped_workloads()["mixed-enterprise"].read_text(encoding="utf-8")


def test_ctrl_c_stops_sending_and_reports_what_there_is(tmp_path: Path, server: TruthServer) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "bench", "run", "--target", f"http://127.0.0.1:{server.port}",
         "--model", "truth", "--arrivals", "constant(20)", "--duration", "60", "--output-length", "2",
         "--output", "out"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    records = tmp_path / "out" / "records.jsonl"
    until_s = time.monotonic() + 30
    while not (records.exists() and records.read_bytes().count(b"\n") > 5) and time.monotonic() < until_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode in (0, 3), output
    assert "interrupted" in output
    assert read_run(records).info.interrupted
    assert (tmp_path / "out" / "report.html").exists()
