"""llama-server, built from the same llama.cpp sources that the installed bindings carry.

The sources come from the source distribution that requirements/llama.lock pins (checked by its hash). They are
built with the bindings' own kernels options, so both sides compute with the same code. Once built it stays in
``.venv/peers``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "llama.lock"
OPTIONS = Path(__file__).with_name("llama-server.cmake")
PLACE = ROOT / ".venv" / "peers"


class BuildError(Exception):
    """The peer cannot be built; the text says why and where the log is."""


def llama_server(say: Callable[[str], None]) -> Path:
    """The program, built when it is not there or was built from something else. Raises BuildError."""
    program, stamp = PLACE / "llama-server", PLACE / "llama-server.key"
    key = f"{zlib.crc32(LOCK.read_bytes()):08x} {zlib.crc32(OPTIONS.read_bytes()):08x}\n"
    if program.is_file() and stamp.is_file() and stamp.read_text() == key:
        return program
    PLACE.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    say("building llama-server from the bindings' llama.cpp sources (some minutes, once)")
    with tempfile.TemporaryDirectory(prefix="headrace-peer-") as scratch:
        built = _build(_sources(Path(scratch)), Path(scratch) / "build")
        partial = PLACE / "llama-server.partial"
        shutil.copy2(built, partial)
        partial.replace(program)
    stamp.write_text(key)
    return program


def _sources(scratch: Path) -> Path:
    """llama.cpp's source folder, unpacked from the pinned source distribution."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    command += ["--no-build-isolation", "--require-hashes", "-r", str(LOCK), "-d", str(scratch)]
    _run(command, "downloading the sources")
    (archive,) = scratch.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    (folder,) = scratch.glob("llama_cpp_python-*/vendor/llama.cpp")
    return folder


def _build(sources: Path, build: Path) -> Path:
    configure = ["cmake", "-S", str(sources), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={OPTIONS}"]
    _run(configure, "configuring llama-server")
    _run(["cmake", "--build", str(build), "--target", "llama-server"], "building llama-server")
    return build / "bin" / "llama-server"


def _run(command: list[str], what: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cmake and ninja are in .venv
    log = PLACE / "llama-server.log"
    with log.open("a") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env={**os.environ, "PATH": path})
    if done.returncode:
        raise BuildError(f"{what} failed (exit {done.returncode}); the log is {log}")
