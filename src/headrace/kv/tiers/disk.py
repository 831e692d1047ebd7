"""The folder that block files are in.

    FOLDER/lock                                   held by the one process that uses the folder
    FOLDER/FINGERPRINT/aa/ADDRESS.kv              blocks, by the first byte of their address

A file is written under another name and renamed, so that a name stands for a whole file. Nothing is synced to the
medium: after a power cut a file may hold anything, and the checksums in it tell (``block_file``). What could not be
finished is removed at the next start. Every method may be called from a thread beside the engine's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError
from headrace.kv.tiers.address import Digest, blake2b
from headrace.kv.tiers.block_file import HEADER_BYTES, Bad, BlockHeader, decode_header

SUFFIX: Final = ".kv"
_PARTIAL: Final = ".partial"
_LOCK: Final = "lock"


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


class Files:
    """What is asked of the file system. Each may raise OSError. Tests put one in its place that stops anywhere."""

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        """A new file of ``parts``, or what was there is replaced."""
        with path.open("wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[os.write(file.fileno(), view) :]

    def replace(self, old: Path, new: Path) -> None:
        """Rename a file, over another one if there is one."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def read(self, path: Path, most_bytes: int | None = None) -> bytes:
        """A file's beginning, or all of it. Opening never waits, as it would for a pipe that nobody writes to."""
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(path))
            return file.read() if most_bytes is None else file.read(most_bytes)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file of an earlier run. ``header`` is Bad when it cannot be used."""

    path: Path
    header: BlockHeader | Bad
    file_bytes: int
    changed_s: float


class BlockFolder:
    """One folder, for one process at a time."""

    def __init__(self, path: Path, files: Files | None = None, digest: Digest = blake2b) -> None:
        """Raises ConfigError when the folder cannot be used, or another process uses it."""
        self.path = path
        self._files = Files() if files is None else files
        self._digest = digest
        where = "engine.kv_tiers.disk_path"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be used for KV blocks: {error}", where=where) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"another process keeps its KV blocks in {path}", where=where) from error

    def close(self) -> None:
        """Let other processes use the folder."""
        os.close(self._lock)

    def block_path(self, fingerprint: bytes, address: bytes) -> Path:
        """Where a block's file is."""
        name = address.hex()
        return self.path / fingerprint.hex() / name[:2] / (name + SUFFIX)

    def write(self, fingerprint: bytes, address: bytes, header: bytes, payload: memoryview) -> bool:
        """Write a block; False when that fails, and then nothing of it is left."""
        path = self.block_path(fingerprint, address)
        partial = path.with_suffix(_PARTIAL)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.write(partial, (header, payload))
            self._files.replace(partial, path)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.remove(partial)
            return False
        return True

    def read(self, fingerprint: bytes, address: bytes) -> bytes | None:
        """A whole file; None when it cannot be read."""
        try:
            return self._files.read(self.block_path(fingerprint, address))
        except OSError:
            return None

    def remove_file(self, path: Path) -> None:
        """Remove a file, if it can be."""
        with contextlib.suppress(OSError):
            self._files.remove(path)

    def scan(self, fingerprint: bytes) -> list[FoundFile]:
        """The blocks of one fingerprint, by their headers alone, parents first. What is no block's name is removed."""
        found: list[FoundFile] = []
        for path in self._walk(self.path / fingerprint.hex()):
            if path.suffix != SUFFIX:
                self.remove_file(path)
                continue
            try:
                about = path.stat()
                head = self._files.read(path, HEADER_BYTES)
            except OSError:
                found.append(FoundFile(path, Bad("unreadable"), 0, 0.0))
                continue
            header = decode_header(head, fingerprint, self._digest)
            if isinstance(header, BlockHeader):
                if header.file_bytes != about.st_size:
                    header = Bad("truncated" if about.st_size < header.file_bytes else "length")
                elif header.address.hex() != path.stem:
                    header = Bad("address")
            found.append(FoundFile(path, header, about.st_size, about.st_mtime))
        found.sort(key=lambda file: file.header.depth if isinstance(file.header, BlockHeader) else -1)
        return found

    def others(self, fingerprints: Iterable[bytes]) -> list[tuple[Path, int]]:
        """Files of other models and layouts with their bytes, longest unchanged first."""
        ours = {fingerprint.hex() for fingerprint in fingerprints}
        found: list[tuple[float, Path, int]] = []
        with contextlib.suppress(OSError):
            for folder in self.path.iterdir():
                if folder.is_dir() and folder.name not in ours:
                    for path in self._walk(folder):
                        with contextlib.suppress(OSError):
                            about = path.stat()
                            found.append((about.st_mtime, path, about.st_size))
        return [(path, size) for _, path, size in sorted(found)]

    @staticmethod
    def _walk(folder: Path) -> Iterator[Path]:
        for name, _, files in os.walk(folder):
            for file in files:
                yield Path(name) / file
