"""The files that make a fresh machine work agree with one another, and hold for every machine."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
# "name==version ; marker \" begins an entry; its hashes follow, indented.
PIN = re.compile(r"^([a-z0-9][a-z0-9.-]*)==([^ ;]+)(?: ; .+)? \\$")


def pins(lock: Path) -> dict[str, str]:
    return {match[1]: match[2] for line in lock.read_text().splitlines() if (match := PIN.match(line))}


def requirements(of: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups: dict[str, list[str]] = {
        "run": project["project"]["dependencies"],
        "llama": project["project"]["optional-dependencies"]["llama"],
        **{f"group {name}": group for name, group in project["dependency-groups"].items()},
    }
    return groups[of]


def package_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def test_there_are_three_locks() -> None:
    assert [lock.name for lock in LOCKS] == ["all.lock", "build.lock", "llama.lock"]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_locks_name_no_host_and_no_place(lock: Path) -> None:
    text = lock.read_text()
    for forbidden in ("://", "index-url", "find-links", "trusted-host", " @ ", "/opt/", "/tmp/", "/home/"):
        assert forbidden not in text


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_locked_package_is_pinned_with_hashes(lock: Path) -> None:
    entries = re.split(r"\n(?=[a-z0-9])", re.sub(r"(?m)^ *#.*\n", "", lock.read_text()))
    assert len(entries) >= 1
    for entry in entries:
        first, *rest = entry.strip().splitlines()
        assert PIN.match(first), first
        assert rest
        assert all(re.match(r" +--hash=sha256:[0-9a-f]{64}( \\)?$", line) for line in rest), first


def test_locks_hold_what_the_project_asks_for() -> None:
    everything = pins(ROOT / "requirements/all.lock")
    build = pins(ROOT / "requirements/build.lock")
    asked = {package_name(line) for group in ("run", "group dev") for line in requirements(group)}
    assert asked - everything.keys() == {"pip"}  # pip comes with the build tools
    assert {package_name(line) for line in requirements("group build")} <= build.keys()
    assert [f"{n}=={v}" for n, v in pins(ROOT / "requirements/llama.lock").items()] == requirements("llama")
    assert requirements("llama") == requirements("group llama")


def test_locks_agree_where_they_overlap() -> None:
    everything = pins(ROOT / "requirements/all.lock")
    for name, version in pins(ROOT / "requirements/build.lock").items():
        assert everything.get(name, version) == version, name


def test_ci_and_readme_use_the_same_command() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert script.read_text().rstrip().endswith("exec make test")
    readme = (ROOT / "README.md").read_text()
    assert "make test" in readme
    assert "make serve" in readme
    assert "pip install 'headrace[llama]'" in readme


def test_license_is_the_one_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
