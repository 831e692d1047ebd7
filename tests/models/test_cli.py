"""``headrace model``, as a shell sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace import __version__
from headrace.cli.main import main
from headrace.models.catalog import ModelSpec


@pytest.fixture
def shell() -> CliRunner:
    return CliRunner()


def test_pull_path_list_rm(tiny_spec: ModelSpec, cache: Path, shell: CliRunner) -> None:
    where = str(cache / "tiny" / "tiny.Q8_0.gguf")
    pulled = shell.invoke(main, ["model", "pull", "tiny"])
    assert (pulled.exit_code, pulled.stdout) == (0, where + "\n")
    assert "tiny: downloading" in pulled.stderr
    assert "tiny: converting" in pulled.stderr
    assert shell.invoke(main, ["model", "path", "tiny"]).stdout == where + "\n"
    table = shell.invoke(main, ["model", "list"]).stdout.splitlines()
    assert [line.split()[0] for line in table] == ["name", "smollm2", "tiny"]
    listed = json.loads(shell.invoke(main, ["model", "list", "--json"]).stdout)
    assert [(entry["name"], entry["path"]) for entry in listed] == [("smollm2", None), ("tiny", where)]
    removed = shell.invoke(main, ["model", "rm", "tiny"])
    assert removed.exit_code == 0
    assert removed.stdout.startswith("removed tiny: ")


@pytest.mark.parametrize("command", ["pull", "path", "rm"])
def test_unknown_name_is_one_line_and_exit_code_1(command: str, cache: Path, shell: CliRunner) -> None:
    result = shell.invoke(main, ["model", command, "smollm"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: unknown model 'smollm'; did you mean smollm2?\n"


def test_wrong_usage_is_exit_code_2(shell: CliRunner) -> None:
    assert shell.invoke(main, ["model", "pull"]).exit_code == 2
    assert shell.invoke(main, ["modle"]).exit_code == 2


def test_ctrl_c_is_exit_code_130(shell: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.models.store.list_models", interrupt)
    assert shell.invoke(main, ["model", "list"]).exit_code == 130


def test_help_and_version_import_no_subcommand() -> None:
    question = (
        "import sys\nfrom headrace.cli.main import main\n"
        "try: main(['--help'])\n"
        "finally: print([m for m in sys.modules if m.startswith('headrace.cli.') or m == 'numpy'])"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    assert answer.returncode == 0
    assert "Fetch, list and remove models." in answer.stdout
    assert answer.stdout.endswith("['headrace.cli.main']\n")
    version = CliRunner().invoke(main, ["--version"])
    assert version.output == f"headrace, version {__version__}\n"


def test_closed_output_is_quiet(cache: Path) -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "model", "list", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr as stderr:
        assert stderr.read() == b""
    process.wait()
