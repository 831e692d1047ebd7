"""``headrace init`` and ``headrace config``, as a person runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from headrace.cli.config import config, init
from headrace.config.load import load
from headrace.config.schema import Config
from headrace.config.template import template

SECRET = "sk-nobody-may-see"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    # No file of the person who runs the tests may count.
    monkeypatch.setattr("platformdirs.user_config_path", lambda name, **_: tmp_path / "user" / name)
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    yield tmp_path


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    command = init if args[0] == "init" else config
    return CliRunner().invoke(command, args[1:], env=env)


def test_init_writes_a_file_that_checks(folder: Path) -> None:
    result = run("init")
    assert result.exit_code == 0
    assert (folder / "headrace.yaml").read_text() == template()
    assert run("config", "check").output == "headrace.yaml: ok (6 lanes, 0 tenants)\n"
    assert load("headrace.yaml", {}) == Config()


def test_init_replaces_a_file_only_when_told(folder: Path) -> None:
    (folder / "x.yaml").write_text("mine")
    result = run("init", "x.yaml")
    assert (result.exit_code, result.stderr) == (1, "x.yaml is already there; --force replaces it\n")
    assert (folder / "x.yaml").read_text() == "mine"
    assert run("init", "x.yaml", "--force").exit_code == 0
    assert (folder / "x.yaml").read_text() == template()


def test_init_into_a_folder_that_is_not_there_says_so(folder: Path) -> None:
    result = run("init", "no/where.yaml")
    assert (result.exit_code, result.stderr) == (1, "no/where.yaml: cannot be written: No such file or directory\n")


def test_check_without_a_file_checks_the_environment(folder: Path) -> None:
    assert run("config", "check").output == "no configuration file: ok (6 lanes, 0 tenants)\n"
    result = run("config", "check", env={"HEADRACE_SERVER_PORT": "x"})
    assert result.exit_code == 1
    assert result.stderr.startswith("HEADRACE_SERVER_PORT: server.port: ")


def test_check_prints_a_line_per_problem_on_stderr(folder: Path) -> None:
    (folder / "bad.yaml").write_text("server:\n  prt: 1\nlanes: {a: {priority: x}}\n")
    result = run("config", "check", "bad.yaml")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "bad.yaml:2: server.prt: unknown key; did you mean port?",
        'bad.yaml:3: lanes.a.priority: expected a whole number, got "x"',
    ]


def test_wrong_usage_is_2(folder: Path) -> None:
    assert run("config", "check", "--what").exit_code == 2
    assert run("config", "show", "a", "b").exit_code == 2


@pytest.mark.parametrize("form", ["--yaml", "--json"])
def test_show_prints_every_key_in_a_form_that_loads_again(folder: Path, form: str) -> None:
    (folder / "headrace.yaml").write_text("server: {port: 9000}\nlanes: {batch: null}\n")
    result = run("config", "show", form)
    assert result.exit_code == 0
    tree = yaml.safe_load(result.output)
    assert tree["server"]["port"] == 9000
    assert tree["lanes"]["realtime"]["slo"] == {"p99_ttft_s": None, "p99_tpot_s": None, "p99_e2e_s": 0.2}
    # The six default lanes are merged under a file, so the one removed must be removed there too.
    (folder / "again.yaml").write_text(yaml.safe_dump({**tree, "lanes": {**tree["lanes"], "batch": None}}))
    assert load("again.yaml", {}) == load("headrace.yaml", {})


def test_show_says_where_values_came_from(folder: Path) -> None:
    (folder / "headrace.yaml").write_text("server:\n  port: 9000\n")
    output = run("config", "show", "--origin", env={"HEADRACE_LOG_LEVEL": "debug"}).output
    lines = {line.split(":")[0]: line.rpartition("# ")[2] for line in output.splitlines()}
    assert lines["server.port"] == "headrace.yaml:2"
    assert lines["log_level"] == "HEADRACE_LOG_LEVEL"
    assert lines["server.host"] == "default"
    listed = json.loads(run("config", "show", "--origin", "--json").output)
    assert listed["server.port"] == {"value": 9000, "origin": "headrace.yaml:2"}


@pytest.mark.parametrize("options", [[], ["--json"], ["--origin"], ["--origin", "--json"]])
def test_show_masks_keys(folder: Path, options: list[str]) -> None:
    (folder / "headrace.yaml").write_text(
        f"tenants: {{acme: {{api_keys: [{SECRET}, env:ACME]}}}}\nserver: {{admin_keys: [{SECRET}-of-an-admin]}}\n"
    )
    result = run("config", "show", *options, env={"ACME": SECRET + "-too"})
    assert result.exit_code == 0
    assert SECRET not in result.output
    assert "sha256:" not in result.output
    assert result.output.count("********") == 3
