"""The models on this machine: one folder each in the user's cache, and any GGUF the user points at."""

from __future__ import annotations

import difflib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from msgspec import Struct

from headrace.errors import ModelError
from headrace.models.catalog import CATALOG, ModelSpec
from headrace.models.gguf_file import check_gguf
from headrace.models.progress import OnProgress, PullProgress, ignore_progress
from headrace.models.pull import discard, fetch, read_record

CACHE_VARIABLE = "HEADRACE_CACHE_DIR"


class ModelStatus(Struct, frozen=True):
    """One line of ``headrace model list``. ``path`` is None while the model is not installed; ``bytes`` is
    then what it will take."""

    name: str
    title: str
    license: str
    quantisation: str
    bytes: int
    path: str | None


def models_folder() -> Path:
    """Where installed models lie: ``$HEADRACE_CACHE_DIR/models``, else in the user's cache folder."""
    override = os.environ.get(CACHE_VARIABLE)
    cache = Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("headrace"))
    return cache.absolute() / "models"


def list_models() -> list[ModelStatus]:
    """Every model of the catalog, installed or not, by name."""
    statuses = []
    for name, spec in sorted(CATALOG.items()):
        path = installed_path(spec)
        statuses.append(
            ModelStatus(
                name=name,
                title=spec.title,
                license=spec.license,
                quantisation=spec.quantisation,
                bytes=path.stat().st_size if path else spec.installed_bytes,
                path=str(path) if path else None,
            )
        )
    return statuses


def find_spec(name: str) -> ModelSpec:
    """The catalog's entry. Raises ``ModelError`` with the nearest names for an unknown one."""
    spec = CATALOG.get(name)
    if spec is None:
        raise ModelError(f"unknown model {name!r}; {_suggestion(name)}")
    return spec


def installed_path(spec: ModelSpec) -> Path | None:
    """The installed file of ``spec``; None when it is not there, is of another version or was cut short."""
    folder = models_folder() / spec.name
    record = read_record(folder)
    if record is None or record.member_sha256 != spec.member_sha256:
        return None
    path = folder / record.file
    try:
        whole = path.stat().st_size == record.file_bytes
    except OSError:
        return None
    return path if whole else None


def path_of(name: str) -> Path:
    """The file of an installed catalog model. Raises ``ModelError`` when there is none."""
    path = installed_path(find_spec(name))
    if path is None:
        raise ModelError(f"model {name!r} is not installed: headrace model pull {name}")
    return path


def pull(spec: ModelSpec, progress: OnProgress = ignore_progress) -> Path:
    """Installs ``spec`` unless it is, and returns its file. Of several pulls at once, one does the work.

    Raises ``ModelError``.
    """
    if path := installed_path(spec):
        return path
    with _locked(spec.name, progress):
        if path := installed_path(spec):
            return path  # another pull was faster
        models = models_folder()
        # With the lock in hand, any temporary folder of this model belongs to a pull that was killed.
        for abandoned in models.glob(f".{spec.name}-*"):
            discard(abandoned)
        work = Path(tempfile.mkdtemp(prefix=f".{spec.name}-", dir=models))
        try:
            fetch(spec, models / spec.name, work, progress)
        finally:
            discard(work)
    if path := installed_path(spec):
        return path
    raise ModelError(f"model {spec.name!r} was removed by somebody else right after it was installed")


def resolve(source: str, progress: OnProgress = ignore_progress) -> Path:
    """The GGUF that ``source`` means: a catalog name (pulled when it is missing) or a path.

    Raises ``ModelError``: unknown name, no such file, not a GGUF, or the pull failed.
    """
    if source in CATALOG:
        return pull(CATALOG[source], progress)
    path = Path(source).expanduser()
    if path.is_dir():
        raise ModelError(f"{path} is a folder; name the GGUF file in it")
    if path.exists() or os.sep in source or source.endswith(".gguf"):
        check_gguf(path)
        return path.absolute()
    raise ModelError(f"{source!r} is neither a known model nor a file; {_suggestion(source)}")


def remove(name: str) -> int:
    """Removes an installed catalog model; the number of bytes freed. Raises ``ModelError`` when not there."""
    spec = find_spec(name)
    folder = models_folder() / spec.name
    if not folder.exists():
        raise ModelError(f"model {name!r} is not installed")
    with _locked(spec.name, ignore_progress):
        freed = sum(file.stat().st_size for file in folder.glob("*"))
        discard(folder)
    return freed


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), CATALOG, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known models: {', '.join(sorted(CATALOG))}; or give the path of a GGUF file"


@contextmanager
def _locked(name: str, progress: OnProgress) -> Iterator[None]:
    """Holds the lock of one model. The kernel frees it when the process ends, however that happens."""
    models = models_folder()
    try:
        models.mkdir(parents=True, exist_ok=True)
        # The file stays: removing it would let two processes hold locks on two files of one name.
        lock = (models / f".{name}.lock").open("ab")
    except OSError as error:
        raise ModelError(f"the model folder {models} cannot be used: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(PullProgress(name, "waiting"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
