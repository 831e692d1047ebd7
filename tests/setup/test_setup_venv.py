"""The set-up: silent when all is installed, one clear sentence when it cannot go on, never half done."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import llama_cpp
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the set-up reads, in a folder without .venv."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src/headrace").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "src/headrace/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def setup(clone: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "scripts" / "setup-venv"],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(not (ROOT / ".venv/stamps/project").exists(), reason="installed without `make setup`")
def test_second_setup_says_and_does_nothing_at_once() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        done = setup(ROOT)
        times.append(time.perf_counter() - start)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert min(times) < 0.1


def test_missing_python_is_one_sentence(clone: Path) -> None:
    done = setup(clone, PYTHON="no-such-python")
    assert done.returncode == 1
    assert done.stderr.startswith("set-up: Python 3.11 or newer is needed and was not found. Install it")
    assert done.stderr.count("\n") == 1
    assert not (clone / ".venv").exists()


def test_missing_compiler_is_one_sentence(clone: Path) -> None:
    done = setup(clone, CXX="no-such-compiler")
    assert done.returncode == 1
    assert done.stderr.startswith("set-up: a C++ compiler is needed to build llama.cpp and was not found.")
    assert done.stderr.count("\n") == 1
    assert not (clone / ".venv").exists()


def test_failed_setup_leaves_no_stamp(clone: Path) -> None:
    # Nothing can be installed from an empty index.
    done = setup(clone, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(clone))
    assert done.returncode == 1
    assert "set-up: creating .venv" in done.stdout
    assert "pip install" in done.stderr.splitlines()[-1]
    assert list((clone / ".venv/stamps").iterdir()) == []


def test_llama_uses_the_vector_instructions_of_this_cpu() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or " avx2 " not in cpuinfo.read_text():
        pytest.skip("no AVX2 here")
    assert b"AVX2 = 1" in llama_cpp.llama_print_system_info()
