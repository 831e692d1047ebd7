"""Parked KV in files, when host memory for it is full: written beside the steps, read back whole, gone at exit.

A folder of this process's own (``parked-PID-…``) lies in the configured one, locked for as long as the process lives.
Its files mean nothing to any other process: whoever starts removes the folders of processes that have died, however
they died. One thread writes; until a state is written it stays in memory (``pending_bytes``). A file is written under
another name and renamed, so that one with its own name is whole; a digest over everything is checked when it is read.
A file that is missing, short, damaged or not this sequence's gives nothing, and the tokens are computed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import queue
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.engines.llama.parking import ParkedState
from headrace.errors import ConfigError
from headrace.kv.precision import KV_DTYPES

_logger = logging.getLogger(__name__)

MAGIC: Final = b"hrparked"
VERSION: Final = 2
_HEAD: Final = struct.Struct("<8sI32s16sIIQQBB")
"""Magic, version, digest of all that follows it; then name, stream, streams, tokens, bytes of the state, and the
numbers of its precision and of the coarsest that it went through."""
_DIGEST_BYTES: Final = 32
_FOLDER_PREFIX: Final = "parked-"
_LOCK_NAME: Final = "lock"
_MEMORY: Final = 0.3
MOST_PENDING_BYTES: Final = 512 * 2**20
"""What may wait in memory to be written, besides one state of any size: a slow disk must not fill memory."""
_READ_PRIOR_BYTES_PER_S: Final = 500e6
"""A slow SSD, until something was read."""


def _name_digest(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(), digest_size=16).digest()


def _head_and_digest(request_id: str, state: ParkedState) -> bytes:
    kinds = (KV_DTYPES.index(state.dtype), KV_DTYPES.index(state.precision))
    tail = (_name_digest(request_id), state.stream, state.streams, state.tokens, len(state.data), *kinds)
    unsigned = _HEAD.pack(MAGIC, VERSION, bytes(_DIGEST_BYTES), *tail)
    return _HEAD.pack(MAGIC, VERSION, _digest(unsigned, state.data), *tail)


def _digest(unsigned_head: bytes, data: bytearray | memoryview) -> bytes:
    digest = hashlib.blake2b(unsigned_head, digest_size=_DIGEST_BYTES)
    digest.update(data)
    return digest.digest()


def write_state(path: Path, request_id: str, state: ParkedState) -> None:
    """Write a state, whole or not at all. Raises OSError."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(_head_and_digest(request_id, state)))
            _write_all(file.fileno(), memoryview(state.data).cast("B"))
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def read_state(path: Path, request_id: str) -> ParkedState | None:
    """The state in a file; None unless it is exactly what ``write_state`` wrote for this request."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return None
            magic, version, digest, name, stream, streams, tokens, size, *kinds = _HEAD.unpack(head)
            if magic != MAGIC or version != VERSION or name != _name_digest(request_id):
                return None
            if os.fstat(file.fileno()).st_size != _HEAD.size + size:
                return None
            data = bytearray(size)
            if file.readinto(data) != size:
                return None
    except OSError:
        return None
    unsigned = _HEAD.pack(magic, version, bytes(_DIGEST_BYTES), name, stream, streams, tokens, size, *kinds)
    if _digest(unsigned, data) != digest or not all(kind < len(KV_DTYPES) for kind in kinds):
        return None
    dtype, precision = [KV_DTYPES[kind] for kind in kinds]
    return ParkedState(data, stream, streams, tokens, dtype, precision)


@dataclass(slots=True)
class SpillTotals:
    """Since the process began: states written, read back, and lost (not written for want of space, or damaged)."""

    written: int = 0
    read: int = 0
    lost: int = 0


class SpillStore:
    """Files of one process. The owner's thread calls everything; a thread of its own writes."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Creates ``folder`` when it is not there, and removes what dead processes left in it. Raises ConfigError when
        it cannot be written."""
        self.limit_bytes = limit_bytes
        self.totals = SpillTotals()
        self.read_bytes_per_s = _READ_PRIOR_BYTES_PER_S
        self._sizes: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._pending: dict[str, ParkedState] = {}
        self._jobs: queue.SimpleQueue[tuple[str, Path, ParkedState] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[str, Path, OSError | None]] = queue.SimpleQueue()
        self._paths: dict[str, Path] = {}
        self._number = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(folder)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=folder))
            self._lock = _locked(self._folder / _LOCK_NAME)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written: {error.strerror}", where="engine.kv_memory.spill_dir"
            ) from error
        self._writer = threading.Thread(target=self._write, name="headrace-spill", daemon=True)
        self._writer.start()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    @property
    def bytes(self) -> int:
        """What files take, those to be written included."""
        return sum(self._sizes.values())

    @property
    def pending_bytes(self) -> int:
        """Of that, what is still in memory."""
        return sum([len(state.data) for state in self._pending.values()])

    def size(self, request_id: str) -> int:
        """Bytes of one state."""
        return self._sizes[request_id]

    def tokens(self, request_id: str) -> int:
        """Tokens of one state; 0 when there is none."""
        return self._tokens.get(request_id, 0)

    def read_s(self, request_id: str) -> float:
        """Predicted time to read a state; 0 while it is still in memory."""
        if request_id in self._pending:
            return 0.0
        return self._sizes[request_id] / self.read_bytes_per_s

    def put(self, request_id: str, state: ParkedState) -> bool:
        """Begin to write a state; False when the limit does not let it, or too much waits to be written."""
        size = _HEAD.size + len(state.data)
        pending = self.pending_bytes
        if self.bytes + size > self.limit_bytes or (pending and pending + size > MOST_PENDING_BYTES):
            return False
        self._number += 1
        path = self._folder / f"{self._number}.kv"
        self._sizes[request_id], self._tokens[request_id] = size, state.tokens
        self._pending[request_id], self._paths[request_id] = state, path
        self._jobs.put((request_id, path, state))
        return True

    def settle(self) -> list[str]:
        """Take note of what was written since the last call. Returns requests whose state could not be: it is lost."""
        lost: list[str] = []
        while True:
            try:
                request_id, path, error = self._done.get_nowait()
            except queue.Empty:
                return lost
            if self._paths.get(request_id) != path:
                _unlink(path)  # it was taken meanwhile
                continue
            del self._pending[request_id]
            if error is None:
                self.totals.written += 1
                continue
            _logger.warning("parked KV of %d tokens was not written: %s", self._tokens[request_id], error.strerror)
            self.totals.lost += 1
            self._forget(request_id)
            lost.append(request_id)

    def take(self, request_id: str) -> ParkedState | None:
        """The state, which is no longer kept; None when there is none, or its file is damaged."""
        if request_id not in self._sizes:
            return None
        state = self._pending.get(request_id)
        path = self._paths[request_id]
        if state is None:
            began_s = time.monotonic()
            state = read_state(path, request_id)
            took_s = time.monotonic() - began_s
            if state is None or state.tokens != self._tokens[request_id]:
                _logger.warning("parked KV of %d tokens is damaged: computing it again", self._tokens[request_id])
                self.totals.lost += 1
                state = None
            else:
                self.totals.read += 1
                if took_s > 0:
                    self.read_bytes_per_s += _MEMORY * (len(state.data) / took_s - self.read_bytes_per_s)
        self.drop(request_id)
        return state

    def drop(self, request_id: str) -> None:
        """Forget a state. Nothing happens when there is none."""
        path = self._paths.get(request_id)
        if path is not None:
            if request_id not in self._pending:
                _unlink(path)
            self._forget(request_id)

    def close(self) -> None:
        """Stop writing and remove everything. Safe to call twice."""
        if self._writer.is_alive():
            self._jobs.put(None)
            self._writer.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def check_integrity(self) -> str | None:
        """None when every state has its file or is about to; else what is wrong."""
        names = set(self._sizes)
        if names != set(self._tokens) or names != set(self._paths):
            return "spilled states are counted differently"
        if not set(self._pending) <= names:
            return "a state is about to be written that nobody has"
        if self.bytes > self.limit_bytes:
            return f"{self.bytes} bytes are spilled, the limit is {self.limit_bytes}"
        return None

    def _forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)
        del self._sizes[request_id], self._tokens[request_id], self._paths[request_id]

    def _write(self) -> None:
        while (job := self._jobs.get()) is not None:
            request_id, path, state = job
            error: OSError | None = None
            try:
                write_state(path, request_id, state)
            except OSError as failed:
                error = failed
            del state, job
            self._done.put((request_id, path, error))


def remove_abandoned(folder: Path) -> int:
    """Remove the folders of processes that are no more; how many there were. Those of living ones stay: they hold
    their lock."""
    removed = 0
    for found in sorted(folder.glob(f"{_FOLDER_PREFIX}*")):
        try:
            descriptor = os.open(found / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            continue  # another process was quicker
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(found, ignore_errors=True)
            removed += 1
        finally:
            os.close(descriptor)
    return removed


def _locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # the folder is removed as a whole in the end
        path.unlink()
