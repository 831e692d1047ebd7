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

import msgspec
import pytest
from click.testing import CliRunner, Result

from headrace.bench.load.workload_file import shipped_workloads
from headrace.bench.record_file import RecordWriter, read_run
from headrace.bench.records import RequestRecord, RunInfo
from headrace.cli.main import main
from tests.bench.bench_records import answered, run_info
from tests.bench.truth_server import TruthServer

FIRST_MS, GAP_MS = 20.0, 5.0
LOAD = ("--arrivals", "constant(5)", "--duration", "1", "--output-length", "1")


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
    turned = json.loads(shell.invoke(main, ["bench", "compare", "b", "a", "--json"]).stdout)
    faster = [one for one in turned["statements"] if one["figure"] == "TTFT p50" and one["beyond_noise"]]
    assert faster, turned
    assert {one["better"] for one in faster} == {"B"}


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
        ([*LOAD, "--send-lag-limit", "nan"], "--send-lag-limit"),
        ([*LOAD, "--send-lag-limit", "inf"], "--send-lag-limit"),
        ([*LOAD, "--send-lag-limit", "-1"], "--send-lag-limit"),
        ([*LOAD, "--timeout", "inf"], "--timeout"),
        ([*LOAD, "--drain", "nan"], "--drain"),
        ([*LOAD, "--slo-ttft", "soon"], "'soon' is not a number"),
        ([*LOAD, "--label", "\udc80"], "--label"),
        ([*LOAD, "--model", "\udc80"], "--model"),
        ([*LOAD, "--warmup", "1"], "--warmup"),
        ([*LOAD, "--body", '{"model": "other"}'], "--body: model is set by the tool itself"),
        ([*LOAD, "--body", '{"stream": false}'], "--no-stream"),
        ([*LOAD, "--body", '{"max_tokens": 1}'], "--body: max_tokens"),
        ([*LOAD, "--body", '{"n": 2}'], "--body: n is"),
        ([*LOAD, "--body", '{"stream_options": {}}'], "--body: stream_options"),
        ([*LOAD, "--header", "content-length: 3"], "content-length"),
        ([*LOAD, "--header", "x-a: b\nc"], "--header: not fit"),
        ([*LOAD, "--header", "x a: b"], "--header"),
        ([*LOAD, "--lane", "a\tb"], "lane"),
        (["--workload", "."], "is a folder"),
    ],
)
def test_wrong_options_are_one_line_and_exit_status_1(
    shell: CliRunner, server: TruthServer, arguments: list[str], message: str
) -> None:
    failed = run(shell, server, *arguments)
    assert failed.exit_code == 1, failed.output
    line = failed.stderr.removeprefix("asking the target how long its words are\n")
    assert line.startswith("error: ") and line.count("\n") == 1
    assert message in line


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


def test_only_shipped_workloads_are_printed(shell: CliRunner) -> None:
    Path("own.yaml").write_text("private")
    refused = shell.invoke(main, ["bench", "workloads", "own.yaml"])
    assert refused.exit_code == 1
    assert "private" not in refused.output
    assert "none of the name 'own.yaml' comes with headrace" in refused.stderr


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
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert read_run(records).info.interrupted
    assert (tmp_path / "out" / "report.html").exists()


def test_ctrl_c_in_a_sweep_reports_the_measurements_that_were_whole(tmp_path: Path, server: TruthServer) -> None:
    """Pressed in the second one: sweep.json and the report have the first."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "bench", "sweep", "--target", f"http://127.0.0.1:{server.port}",
         "--model", "truth", "--start", "20", "--duration", "2", "--output-length", "2", "--attainment", "0.5",
         "--output", "out"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        second = [file for file in tmp_path.glob("out/records-02-*") if file.read_bytes().count(b"\n") > 5]
        if second:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert "The search was interrupted." in " ".join(output.split())  # a narrow terminal wraps it
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert found["reason"] == "interrupted" and len(found["trials"]) == 1
    assert (tmp_path / "out" / "report.html").exists()


def written(folder: Path, info: RunInfo, records: list[RequestRecord]) -> Path:
    folder.mkdir()
    lines = [msgspec.json.encode(item) for item in (info, *records)]
    (folder / "records.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def shell_line(command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    headrace = f"{sys.executable} -m headrace"
    return subprocess.run(
        ["bash", "-c", command.replace("headrace", headrace)],
        cwd=folder, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60, check=False,
    )  # fmt: skip


SMALL = [answered(i, i * 100.0, ttft_ms=20, gaps_ms=(5,), class_name="grün") for i in range(5)]


def test_what_is_added_to_requests_is_in_the_results_and_secrets_are_not(shell: CliRunner, server: TruthServer) -> None:
    done = run(shell, server, *LOAD, "--output", "out", "--header", "X-Secret: hush-hush", "--body",
               '{"top_p": 0.5, "stream_options": {"include_usage": true, "continuous_usage_stats": true}}')  # fmt: skip
    assert done.exit_code == 0, done.output
    requests = read_run(Path("out/records.jsonl")).info.source["requests"]
    assert isinstance(requests, dict)
    assert requests["header_names"] == ["x-secret"]
    assert requests["body"]["top_p"] == 0.5
    assert not [file for file in Path("out").iterdir() if "hush-hush" in file.read_text()]


def test_rows_of_a_trace_that_are_left_out_are_told(shell: CliRunner, server: TruthServer) -> None:
    rows = [(0, 5, 1), (100, 0, 3), (200, 7, 0), (300, 5, 1)]
    Path("t.jsonl").write_text(
        "".join(f'{{"timestamp": {at}, "input_length": {i}, "output_length": {o}}}\n' for at, i, o in rows)
    )
    done = run(shell, server, "--arrivals", "trace(t.jsonl)", "--output", "out")
    assert "warning: 2 rows of the trace have no input or no output tokens and were left out" in done.stderr
    assert read_run(Path("out/records.jsonl")).info.source["trace_rows_left_out"] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ["--attainment", "1"], ["--confidence", "nan"], ["--confidence", "2"], ["--tolerance", "0"],
        ["--start", "-1"], ["--start", "nan"], ["--duration", "inf"], ["--most-trials", "0"], ["--warmup", "60"],
    ],
)  # fmt: skip
def test_a_sweep_out_of_range_sends_nothing_and_leaves_no_folder(shell: CliRunner, wrong: list[str]) -> None:
    failed = shell.invoke(
        main, ["bench", "sweep", "--target", "http://127.0.0.1:1", "--model", "m", "--output", "out", *wrong]
    )
    assert failed.exit_code in (1, 2) and wrong[0] in failed.stderr, failed.output
    assert not Path("out").exists()


@pytest.mark.parametrize("confidence", ["2", "0", "nan", "-inf"])
def test_a_comparison_out_of_range_is_one_line(shell: CliRunner, tmp_path: Path, confidence: str) -> None:
    written(tmp_path / "a", run_info(), SMALL)
    failed = shell.invoke(main, ["bench", "compare", "a", "a", "--confidence", confidence])
    assert failed.exit_code == 1
    assert failed.stderr.startswith("error: --confidence: ") and failed.stderr.count("\n") == 1


def test_a_run_that_ended_in_its_warm_up_is_reported_as_invalid(shell: CliRunner, tmp_path: Path) -> None:
    written(tmp_path / "a", run_info(warmup_s=10, duration_s=2.5, interrupted=True), SMALL)
    told = shell.invoke(main, ["bench", "report", "a"])
    assert told.exit_code == 3
    assert told.stdout.startswith("invalid: the run was interrupted after 2.5 s, before its warm-up of 10 s")
    assert told.stdout.count("\n") == 1
    assert [file.name for file in Path("a").iterdir()] == ["records.jsonl"]


def test_a_full_disk_does_not_take_the_summary_with_it(
    shell: CliRunner, server: TruthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(writer: RecordWriter, data: bytes) -> None:
        writer._failure = OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "_append", full)
    done = run(shell, server, *LOAD, "--output", "out")
    assert done.exit_code == 1
    assert "attained" in done.stdout
    assert done.stderr.endswith("records.jsonl: cannot be written: No space left on device\n")


def test_a_report_that_cannot_be_written_is_printed_and_leaves_the_old_files(
    shell: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "a", run_info(), SMALL)
    assert shell.invoke(main, ["bench", "report", "a"]).exit_code == 0
    before = (folder / "summary.json").read_bytes()

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    failed = shell.invoke(main, ["bench", "report", "a", "--send-lag-limit", "7"])
    assert failed.exit_code == 1
    assert "attained" in failed.stdout
    assert failed.stderr.endswith("cannot be written: No space left on device\n")
    assert (folder / "summary.json").read_bytes() == before
    assert not list(folder.glob("*.new"))


def test_a_full_a_closed_and_an_ascii_output_end_without_a_traceback(tmp_path: Path) -> None:
    written(tmp_path / "a", run_info(), SMALL)
    full = shell_line("headrace bench report a >/dev/full", tmp_path)
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1] == "error: standard output: cannot be written: No space left on device"
    assert "Traceback" not in full.stderr and "Exception" not in full.stderr
    closed = shell_line("headrace bench report a | true; exit ${PIPESTATUS[0]}", tmp_path)
    assert (closed.returncode, closed.stderr) == (0, "")
    plain = shell_line("headrace bench report a", tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert plain.returncode == 0, plain.stderr
    assert "gr?n" in plain.stdout


@pytest.mark.parametrize("missing", ["aiohttp", "matplotlib"])
def test_a_missing_package_is_named_with_its_remedy(
    shell: CliRunner, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    failed = shell.invoke(main, ["bench", "run", "--target", "http://127.0.0.1:1", "--model", "m", *LOAD])
    assert failed.exit_code == 1
    assert failed.stderr == f"error: headrace bench needs {missing}; pip install 'headrace[bench]' brings it\n"
