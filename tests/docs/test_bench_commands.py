"""The load generator's commands as the documentation writes them: each is run, shortened where it takes minutes.

A written line stays as it is; what is appended to it shortens it (of an option given twice the last counts), and the
address of a server that answers at once stands for the one that is written.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agreement import __main__ as agreement
from benchmarks.peers import __main__ as peers
from benchmarks.peers import llama_server
from headrace.models.store import resolve
from tests.bench.truth_server import TruthServer
from tests.docs.markdown import ROOT, Block, blocks
from tests.docs.test_docs import DOCUMENTED_BASE, run_block

BENCH = ROOT / "docs" / "bench.md"
AGREEMENT = ROOT / "docs" / "bench-agreement.md"
BIN = Path(sys.executable).parent
SWEPT, DIFFERS = 3, 4
"""Exit statuses of a sweep in which no rate was shown to hold, and of a comparison that found a difference."""


@pytest.fixture(scope="module")
def server() -> Iterator[TruthServer]:
    """Answers at once."""
    one = TruthServer()
    yield one
    one.close()


def written(file: Path, text: str) -> Block:
    """The one block of ``file`` with ``text`` in it."""
    (block,) = [block for block in blocks() if block.file == file and text in block.text]
    return block


def made(target: str, arguments: str = "") -> list[str]:
    """What ``make target ARGS=arguments`` runs after the setup (``make test`` hands its level down)."""
    typed = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}}
    done = subprocess.run(
        ["make", "-n", "-o", "setup", target, f"ARGS={arguments}"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30, env=typed,
    )  # fmt: skip
    program, *rest = shlex.split(done.stdout.strip().splitlines()[-1])
    assert program == ".venv/bin/python"
    return [sys.executable, *rest]


# make bench-peers, make bench-strategies


def documented_arguments() -> list[str]:
    """Every ``ARGS`` of ``make bench-peers`` in docs/bench.md: in the text, and in its table of what to say."""
    text = BENCH.read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|`]+ \| `(--[^`]+)`", text, re.MULTILINE)
    return ["", *re.findall(r"make bench-peers ARGS='([^']*)'", text), *rows]


def test_the_settings_of_bench_peers_are_found() -> None:
    """The bare command, three rounds, and the four rows of the table."""
    assert "--rounds 3" in documented_arguments() and len(documented_arguments()) == 6


@pytest.mark.parametrize("arguments", documented_arguments())
def test_make_bench_peers_takes_what_is_written(arguments: str) -> None:
    """Make passes it on whole, and the module understands it."""
    command = made("bench-peers", arguments)
    assert command[1:3] == ["-m", "benchmarks.peers"]
    assert command[3:] == shlex.split(arguments)
    peers.parse(command[3:])


def test_make_bench_strategies_compares_our_own() -> None:
    """All four, without llama-server, and with what is added."""
    options = peers.parse(made("bench-strategies", "--rounds 3")[3:])
    assert options.strategies == ["hybrid", "static", "dynamic", "continuous"]
    assert not options.llama_server and options.rounds == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["bench-peers", "bench-strategies"])
def test_make_bench_runs_to_its_tables(target: str, tmp_path: Path) -> None:
    """A few seconds of one load with the tiny model: all servers start, and the JSON line comes."""
    if not (llama_server.PLACE / "llama-server").is_file():
        pytest.skip("llama-server is not built here; `make bench-peers` builds it")
    command = made(target, f"--parts tiny --loads 1.0 --seconds 5 --records {tmp_path}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert '"benchmark": "peers"' in done.stdout
    assert list(tmp_path.rglob("*.jsonl"))


# headrace bench sweep, headrace bench compare


def test_the_sweep_runs_as_written(server: TruthServer, tmp_path: Path) -> None:
    """One trial of two seconds at a rate that has requests in them."""
    block = written(BENCH, "headrace bench sweep")
    line = block.text.rstrip().replace(DOCUMENTED_BASE, server.url)
    assert line != block.text.rstrip()
    run_block(block, f"{line} --start 20 --duration 2 --most-trials 1 --output swept || test $? -eq {SWEPT}", tmp_path)
    assert (tmp_path / "swept" / "sweep.json").is_file()


def test_the_comparison_runs_as_written(server: TruthServer, tmp_path: Path) -> None:
    """Of two runs with the names that are written."""
    block = written(BENCH, "headrace bench compare")
    load = f"headrace bench run --target {server.url} --model truth --arrivals 'constant(50)' --duration 2"
    runs = "\n".join([f"{load} --output-length 4 --seed {n} --output {name}" for n, name in enumerate(BEFORE_AFTER)])
    output = run_block(block, f"{runs}\n{block.text.rstrip()} || test $? -eq {DIFFERS}", tmp_path)
    assert "TTFT" in output


BEFORE_AFTER = ("before", "after")


# Locust


def test_the_locust_line_runs_as_written(server: TruthServer, tmp_path: Path) -> None:
    """For three seconds instead of an hour; the file that it names is found from the root of the project."""
    (found,) = re.findall(r"`(locust -f [^`]*)`", BENCH.read_text(encoding="utf-8"))
    line = " ".join(found.split())
    assert DOCUMENTED_BASE in line and "-t 1h" in line
    typed = line.replace(DOCUMENTED_BASE, server.url).replace("benchmarks/", f"{ROOT}/benchmarks/")
    done = subprocess.run(
        [str(BIN / "locust"), *shlex.split(typed)[1:], "-t", "3s"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if not name.startswith("LOCUST")},
    )  # fmt: skip
    assert (tmp_path / "report_stats.csv").is_file(), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


# docs/bench-agreement.md


def options_of(words: list[str]) -> dict[str, str]:
    """``--name value`` pairs, and ``--name`` alone."""
    found: dict[str, str] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = "" if after.startswith("--") else after
    return found


def test_the_agreements_two_commands_are_those_that_it_runs() -> None:
    """Word for word what ``benchmarks.agreement`` builds for round 1 on smollm2."""
    ours, theirs = written(AGREEMENT, "--target URL").text.replace("\\\n", " ").strip().splitlines()
    load, here = agreement.LOADS["smollm2"], Path()
    built = agreement.headrace_command(load, "URL", here, 1)
    assert options_of(shlex.split(ours)) == options_of(built)
    built = agreement.guidellm_command(load, "URL", here, 1, Path("guidellm"), Path("tokenizer"))
    words = shlex.split(theirs)
    assert options_of(words) == options_of(built)
    assert words[:4] == ["HF_HUB_OFFLINE=1", "GUIDELLM__MAX_WORKER_PROCESSES=1", "guidellm", "run"]


def test_the_agreements_load_runs_as_written(server: TruthServer, tmp_path: Path) -> None:
    """headrace's of the two commands, for two seconds."""
    block = written(AGREEMENT, "--target URL")
    line = block.text.replace("\\\n", " ").splitlines()[0].replace("URL", server.url)
    run_block(block, f"{line} --duration 2", tmp_path)
    assert (tmp_path / "headrace" / "summary.json").is_file()


STUB = """#!{bash}
printf '%s\\n' "$(basename "$0") $*" >> {log}
{does}
"""


@pytest.mark.model
def test_the_agreements_steps_run_as_written(tmp_path: Path) -> None:
    """In their order, with stand-ins for what is installed from elsewhere and for the measuring itself, whose options
    are then read by the programs that they are for. The tokenizer is really made."""
    log = tmp_path / "log"
    stubs = {
        "bin/python3": 'mkdir -p "$3/bin" && cp pip "$3/bin/pip"',
        "pip": ":",
        "bin/make": ":",
        ".venv/bin/headrace": f'if [ "$2" = path ]; then echo {shlex.quote(str(resolve("smollm2")))}; fi',
        ".venv/bin/python": (
            f'if [ "$2" = benchmarks.agreement.tokenizer ]; then PYTHONPATH={ROOT} {sys.executable} "$@"; fi'
        ),
    }
    for name, does in stubs.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(STUB.format(bash="/bin/bash", log=log, does=does))
        file.chmod(0o755)
    block = written(AGREEMENT, "guidellm-env")
    run_block(block, f"PATH={tmp_path}/bin:$PATH\n{block.text}", tmp_path)
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()
    calls = [shlex.split(line) for line in log.read_text().splitlines()]
    rounds = [call[3:] for call in calls if call[:3] == ["python", "-m", "benchmarks.agreement"]]
    read = [agreement.parse(words) for words in rounds]
    assert [(one.server, one.round) for one in read] == [(s, n) for s in ("truth", "smollm2") for n in (1, 2, 3)]
    tables = [call[3] for call in calls if call[1:3] == ["-m", "benchmarks.agreement.table"]]
    assert tables == ["agreement-truth", "agreement-smollm2"]
    assert {str(one.output) for one in read} == set(tables)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the tools get a core each, as Linux alone lets them")
def test_a_round_of_the_agreement_runs(tmp_path: Path) -> None:
    """Both halves against the truth server. GuideLLM is not installed here: a stand-in reads its backend's address and
    sends the load with our own tool."""
    stand_in = tmp_path / "guidellm"
    stand_in.write_text(
        "#!/bin/sh\n"
        """target=$(printf '%s' "$*" | sed 's/.*target=\\([^,]*\\),.*/\\1/')\n"""
        f"exec {sys.executable} -m headrace bench run --target $target --model truth --arrivals 'constant(10)'"
        " --duration 2 --output-length 32 --output stand-in\n"
    )
    stand_in.chmod(0o755)
    command = [sys.executable, "-m", "benchmarks.agreement", "truth", "--round", "1", "--output", str(tmp_path / "out")]
    command += ["--guidellm", str(stand_in), "--tokenizer", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    folder = tmp_path / "out" / "round-1"
    assert (folder / "headrace" / "summary.json").is_file() and (folder / "served-headrace.json").is_file()
    assert (folder / "stand-in" / "summary.json").is_file() and (folder / "served-guidellm.json").is_file()
