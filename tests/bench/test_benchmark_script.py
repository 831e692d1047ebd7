"""benchmarks/benchmark.py: the names that operators know, mapped to ``headrace bench run``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.benchmark import command_arguments
from headrace.bench.record_file import read_info, read_records
from tests.bench.truth_server import TruthServer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HERE, A_MINUTE = "--target=http://127.0.0.1:8000", "--duration=60"


def run_script(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmark.py", *options],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        pytest.param(
            ["--model", "m", "--request-distribution", "poisson(200)", "--sequence-length", "uniform(512,16384)"],
            [HERE, "--arrivals=poisson(200)", "--input-length=uniform(512,16384)", A_MINUTE, "--model", "m"],
            id="as operators write it",
        ),
        pytest.param(
            ["--arrivals=poisson(200)", "--input-length=512", "--target=http://h", "--duration=5"],
            ["--target=http://h", "--arrivals=poisson(200)", "--input-length=512", "--duration=5"],
            id="the command's own names",
        ),
        pytest.param(["--base-url", "https://h/v1"], ["--target=https://h/v1", A_MINUTE], id="base URL"),
        pytest.param(["--host", "gpu-7"], ["--target=http://gpu-7:8000", A_MINUTE], id="host"),
        pytest.param(["--port", "9000"], ["--target=http://127.0.0.1:9000", A_MINUTE], id="port"),
        pytest.param(["--host", "::1", "--port=1"], ["--target=http://[::1]:1", A_MINUTE], id="IPv6"),
        pytest.param(
            ["--workload", "mixed-enterprise"],
            [HERE, "--workload=mixed-enterprise"],
            id="a workload says how long",
        ),
        pytest.param(
            ["--workload", "mixed-enterprise", "--duration", "9"],
            [HERE, "--workload=mixed-enterprise", "--duration=9"],
            id="unless the operator does",
        ),
        pytest.param(
            ["--request-distribution", "trace(a.jsonl)"],
            [HERE, "--arrivals=trace(a.jsonl)"],
            id="a trace says how long",
        ),
        pytest.param(
            ["--header", "a:b", "--header", "c:d", "--no-stream", "--output-length", "fixed(8)", "--seed=3"],
            [
                HERE,
                A_MINUTE,
                "--header",
                "a:b",
                "--header",
                "c:d",
                "--no-stream",
                "--output-length",
                "fixed(8)",
                "--seed=3",
            ],
            id="everything else as it is",
        ),
    ],
)
def test_options_are_mapped(given: list[str], passed: list[str]) -> None:
    assert command_arguments(given) == ["bench", "run", *passed]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--base-url=http://h", "--port=1"], "leave --host and --port away"),
        (["--host=http://h:1"], "a URL goes to --base-url"),
        (["--port=many"], "invalid int value: 'many'"),
        (["--request-distribution"], "expected one argument"),
    ],
)
def test_wrong_usage_is_2(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command_arguments(given)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def server() -> Iterator[TruthServer]:
    running = TruthServer()
    try:
        yield running
    finally:
        running.close()


# The generator's own lateness is no matter here, and on a busy machine it would make the run invalid.
ANY_LAG = "--send-lag-limit=100000"


def test_the_load_is_sent_and_reported(server: TruthServer, tmp_path: Path) -> None:
    done = run_script(
        *("--model", "truth", "--request-distribution", "constant(40)", "--sequence-length", "uniform(16,64)"),
        *("--output-length", "fixed(3)", "--duration", "1", "--port", str(server.port), "--seed", "5", ANY_LAG),
        f"--output={tmp_path / 'results'}",
    )
    assert done.returncode == 0, done.stderr
    file = tmp_path / "results" / "records.jsonl"
    info, records = read_info(file), list(read_records(file, pytest.fail))
    assert (info.target, info.model, info.duration_s, info.seed) == (server.url, "truth", 1.0, 5)
    assert len(records) == 40
    assert {(record.outcome, record.output_tokens) for record in records} == {("ok", 3)}
    lengths = [record.input_tokens for record in records]
    assert 16 <= min(lengths) < max(lengths) <= 64
    assert json.loads((tmp_path / "results" / "summary.json").read_bytes())
    assert (tmp_path / "results" / "report.html").exists()


def test_exit_statuses_are_the_commands(server: TruthServer, tmp_path: Path) -> None:
    common = ["--request-distribution", "constant(20)", "--duration", "0.5", "--model", "m"]
    here = ["--port", str(server.port)]
    nobody = run_script(*common, "--port=1", f"--output={tmp_path / '1'}")
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "error: --target: http://127.0.0.1:1 does not answer" in nobody.stderr
    unknown = run_script(*common, *here, "--sequence-lenght=9")
    assert unknown.returncode == 2
    assert "No such option" in unknown.stderr
    # No machine sends within a picosecond.
    invalid = run_script(*common, *here, "--send-lag-limit=1e-9", f"--output={tmp_path / '3'}")
    assert invalid.returncode == 3, invalid.stderr


def test_help_shows_the_mapping_and_the_commands_own_options() -> None:
    done = run_script("--help")
    assert done.returncode == 0
    for text in ("--request-distribution FORM   --arrivals FORM", "--output-length FORM", "--send-lag-limit"):
        assert text in done.stdout
