"""From what ``--model`` says to a described model: a GGUF file, a ``config.json`` (or its folder), or a name."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ModelError
from headrace.models.catalog import CATALOG
from headrace.models.gguf_file import MAGIC
from headrace.models.store import installed_path
from headrace.plan.architectures import describe_named
from headrace.plan.config_layout import describe_config
from headrace.plan.described import DescribedModel
from headrace.plan.gguf_layout import describe_gguf

_PATH_BEGINNINGS = ("/", "./", "../", "~")


def describe(source: str) -> DescribedModel:
    """Raises ModelError: no such file or name, or a description that cannot be sized. Nothing is fetched."""
    if "\0" in source:
        raise ModelError(f"{source[:64]!a} is no file name")
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ModelError(f"{path} is a folder without a config.json; name the model file in it")
            path = path / "config.json"
        if path.is_file():
            return _describe_file(path)
    except OSError as error:
        raise ModelError(f"{source[:64]!a} cannot be read: {error.strerror}") from error
    if path.exists():
        raise ModelError(f"{path} is no regular file")
    if source.endswith((".gguf", ".json")) or source.startswith(_PATH_BEGINNINGS):
        raise ModelError(f"there is no file {source[:200]}")
    if source in CATALOG and (installed := installed_path(CATALOG[source])) is not None:
        return describe_gguf(installed)
    return describe_named(source.rpartition("/")[2])  # owner/name, as model hubs write it


def _describe_file(path: Path) -> DescribedModel:
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start == MAGIC or path.suffix == ".gguf":
        return describe_gguf(path)
    return describe_config(path)
