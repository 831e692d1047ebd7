"""The gate's results, in a file beside the model: what was measured, of what, with what.

A result counts only for the same model file, the same build of libllama and the same prompt set. A file is written
under another name, flushed and renamed, so that a gate that is killed leaves the old one or none. A file that is cut,
malformed or of another version is not believed: it counts as no result, and the reason is told.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Final

import msgspec

from headrace.errors import GateError
from headrace.evaluate.kv_gate.scores import PrecisionScores
from headrace.kv.precision import KvDtype

FORMAT: Final = 1
SUFFIX: Final = ".kv-gate.json"
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 1 << 16
_ENDS_BYTES: Final = 1 << 20


class GateKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a result holds for."""

    model: str
    libllama: str
    prompts: str


class GateResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One precision, measured once."""

    key: GateKey
    dtype: KvDtype
    scores: PrecisionScores
    measured_at: str
    took_s: float


class GateFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in a file."""

    format: int
    results: tuple[GateResult, ...]


def result_path(model: Path) -> Path:
    """Where a model's results lie."""
    return model.with_name(model.name + SUFFIX)


def model_fingerprint(model: Path) -> str:
    """Tells model files apart: a digest of the size, both ends and samples between, so that a file of many gigabytes is
    not read whole at every start. It is no guard against forgery. Raises GateError when the file cannot be read."""
    digest = hashlib.sha256()
    try:
        with model.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            digest.update(file.read(_ENDS_BYTES))
            for sample in range(1, _SAMPLES + 1):
                file.seek(size * sample // (_SAMPLES + 1))
                digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _ENDS_BYTES))
            digest.update(file.read(_ENDS_BYTES))
    except OSError as error:
        raise GateError(f"the model file {model} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:32]


def libllama_build() -> str:
    """The bindings' version and a digest of the libraries that compute: another compiler or processor flags make
    another build. Raises GateError when the bindings are not installed."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise GateError("the llama.cpp bindings are not installed: pip install 'headrace[llama]'")
    digest = hashlib.sha256()
    for library in sorted((Path(found.origin).parent / "lib").glob("lib*")):
        if not library.is_symlink():
            digest.update(library.name.encode() + b"\0" + library.read_bytes())
    return f"{importlib.metadata.version('llama-cpp-python')}+{digest.hexdigest()[:12]}"


def read_results(path: Path) -> tuple[GateResult, ...]:
    """The results in a file; none when there is no file. Raises GateError when what is there cannot be believed."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise GateError(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = msgspec.json.decode(data, type=GateFile)
    except msgspec.DecodeError as error:
        raise GateError(f"{path} is not a result of the KV gate ({error}); remove it and run the gate again") from error
    if found.format != FORMAT:
        raise GateError(f"{path} has format {found.format}, this version reads {FORMAT}; run the gate again")
    return found.results


def write_results(path: Path, new: tuple[GateResult, ...]) -> None:
    """Add results to a file; they replace older ones of the same precision. Results for another model, build or prompt
    set go. Raises GateError when the file cannot be written."""
    try:
        kept = [old for old in read_results(path) if old.key == new[0].key]
    except GateError:
        kept = []  # not to be believed, so nothing is lost with it
    renewed = {result.dtype for result in new}
    results = (*[old for old in kept if old.dtype not in renewed], *new)
    data = msgspec.json.format(msgspec.json.encode(GateFile(FORMAT, results))) + b"\n"
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise GateError(f"the result cannot be written to {path}: {error.strerror}") from error
