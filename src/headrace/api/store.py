"""Completions asked for with ``store: true``: one JSON file each, in one folder, at most so many.

A file named ``ID.json`` holds ``{"tenant": ..., "completion": {...}, "messages": [...]}``. Whatever writes
such a file into the folder has stored a completion: nothing is kept in memory.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from headrace.errors import NotFound

_logger = logging.getLogger(__name__)
_SANE_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


class StoredCompletion(Struct, kw_only=True):
    """``completion`` is the ``chat.completion`` object, ``messages`` what it answered, ``tenant`` whose it is."""

    tenant: str | None = None
    completion: dict[str, Any]
    messages: list[dict[str, Any]] = []

    @property
    def id(self) -> str:
        return str(self.completion.get("id", ""))

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: when it was created, then its id."""
        created = self.completion.get("created", 0)
        return (created if isinstance(created, int) else 0, self.id)

    @property
    def metadata(self) -> dict[str, str]:
        metadata = self.completion.get("metadata")
        return metadata if isinstance(metadata, dict) else {}


class CompletionStore:
    """The folder. Every method does disk work: call them in a thread. A tenant sees its own only."""

    def __init__(self, folder: Path, max_completions: int) -> None:
        self._folder = folder
        self._max_completions = max_completions
        self._decoder = msgspec.json.Decoder(StoredCompletion)

    def beside(self, name: str) -> CompletionStore:
        """Another store, of the same size, in a folder within this one's."""
        return CompletionStore(self._folder / name, self._max_completions)

    def put(self, stored: StoredCompletion) -> None:
        """Write or replace one completion; the oldest go when there are too many. Raises OSError."""
        path = self._path(stored.id)
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(stored))
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._evict()

    def get(self, completion_id: str, tenant: str | None) -> StoredCompletion:
        """Raises NotFound when there is none of that id that the tenant may see."""
        stored = self._read(self._path(completion_id))
        if stored is None or stored.tenant != tenant:
            raise _not_found(completion_id)
        return stored

    def delete(self, completion_id: str, tenant: str | None) -> None:
        """Raises NotFound as ``get`` does."""
        self.get(completion_id, tenant)
        self._path(completion_id).unlink(missing_ok=True)

    def all(self, tenant: str | None) -> list[StoredCompletion]:
        """Every completion of a tenant, oldest first."""
        readable = (self._read(path) for path in self._files())
        return sorted((s for s in readable if s is not None and s.tenant == tenant), key=lambda s: s.order)

    def _path(self, completion_id: str) -> Path:
        # The id becomes a file name, so it may hold nothing that a path gives a meaning to.
        if not _SANE_ID.fullmatch(completion_id):
            raise _not_found(completion_id)
        return self._folder / f"{completion_id}.json"

    def _files(self) -> Iterator[Path]:
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries]
        except FileNotFoundError:
            return
        for name in names:
            if name.endswith(".json") and not name.startswith("."):
                yield self._folder / name

    def _read(self, path: Path) -> StoredCompletion | None:
        try:
            return self._decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            _logger.warning("stored completion %s cannot be read: %s", path.name, error)
            return None

    def _evict(self) -> None:
        dated: list[tuple[float, Path]] = []
        for path in self._files():
            try:
                dated.append((path.stat().st_mtime, path))
            except FileNotFoundError:
                continue
        for _, path in sorted(dated)[: max(0, len(dated) - self._max_completions)]:
            path.unlink(missing_ok=True)


def _not_found(completion_id: str) -> NotFound:
    return NotFound(f"there is no stored completion {completion_id[:128]!r}", param="completion_id")
