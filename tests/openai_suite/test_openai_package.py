"""The ``openai`` package's own tests for models, completions and chat completions, against headrace."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.openai_suite.conftest import RunningServer

FILES = ["test_models.py", "test_completions.py", "chat/test_completions.py"]
_UNREACHABLE = re.compile(
    r"NewConnectionError|ConnectTimeout|Max retries exceeded|Temporary failure in name resolution|"
    r"No matching distribution|Network is unreachable|Could not fetch URL"
)


@pytest.fixture(scope="session")
def package_source(request: pytest.FixtureRequest) -> Path:
    """The extracted source distribution of the installed ``openai``, which ships its tests."""
    name = f"openai-{version('openai')}"
    cache = os.environ.get("HEADRACE_CACHE_DIR")
    config = request.config
    assert config.cache is not None
    folder = Path(cache) / "openai" if cache else Path(config.cache.mkdir("openai"))
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / name
    if not (source / "tests").is_dir():
        archive = folder / f"{name}.tar.gz"
        if not archive.is_file():
            _download(name, folder)
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return source


def _download(name: str, folder: Path) -> None:
    requirement = name.replace("openai-", "openai==")
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0 or (folder / f"{name}.tar.gz").is_file():
        # pip may fail on the package's metadata after it has the archive, which is all that is wanted.
        return
    if _UNREACHABLE.search(done.stdout + done.stderr):
        pytest.skip(f"the package index is not reachable, so {requirement} could not be fetched")
    raise AssertionError(done.stderr[-4000:])


@pytest.mark.parametrize("file", FILES)
def test_the_package_accepts_every_answer(running_server: RunningServer, package_source: Path, file: str) -> None:
    environment = {
        **os.environ,
        "TEST_API_BASE_URL": running_server.base_url,
        "HEADRACE_SUITE_STORE": str(running_server.store),
        "HEADRACE_SUITE_PID": str(running_server.pid),
        "PYTHONPATH": str(Path(__file__).parent),
        "NO_PROXY": "127.0.0.1",
    }
    options = ["-o", "addopts=", "-p", "plugin", "-p", "no:cacheprovider", "-q", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/api_resources/{file}"]
    done = subprocess.run(command, cwd=package_source, env=environment, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert last and re.fullmatch(r"\d+ passed in .*", last[0]), f"not every test ran: {last}"
