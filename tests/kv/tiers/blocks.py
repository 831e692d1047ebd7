"""Small blocks for the stores' tests: their KV follows from their tokens, so that any mix-up shows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from headrace.kv.tiers.address import root_address
from headrace.kv.tiers.block_file import ROOT_UID, BlockHeader, checksum, encode_header
from headrace.kv.tiers.block_tree import BlockKind
from headrace.kv.tiers.codec import Codec, pack
from headrace.kv.tiers.planes import Bytes, Run
from headrace.kv.tiers.worker import Job
from headrace.kv.token_blocks import KV_BLOCK_TOKENS, packed

RAW_BYTES = 96
KIND = BlockKind(b"f" * 32, RAW_BYTES, (Run(64, 2), Run(32, 1)))
OTHER_KIND = BlockKind(b"g" * 32, RAW_BYTES, (Run(RAW_BYTES, 2),))
ROOT = root_address(KIND.fingerprint, ("", "all", None))


def block(number: int) -> bytes:
    """The packed tokens of a block; every number has its own."""
    return packed([number] * KV_BLOCK_TOKENS)


def blocks(numbers: Sequence[int]) -> list[bytes]:
    """One after the other."""
    return [block(number) for number in numbers]


def kv_of(chain: Sequence[bytes]) -> Bytes:
    """The KV of the last block of a chain: it depends on every token, and packs well."""
    seed = hashlib.blake2b(b"".join(chain), digest_size=8).digest()
    return np.frombuffer((seed * RAW_BYTES)[:RAW_BYTES], np.uint8).copy()


def reader(chain: Sequence[bytes]) -> Callable[[int], Bytes]:
    """What ``capture`` reads a stream with these blocks through."""
    return lambda depth: kv_of(chain[: depth + 1])


def block_bytes(codec: Codec = Codec.ZSTD_PLANES, number: int = 1) -> bytes:
    """A whole, sound file."""
    from headrace.kv.tiers.address import child_address

    tokens = block(number)
    payload = pack(kv_of([tokens]), codec, KIND.runs)
    header = BlockHeader(
        KIND.fingerprint,
        ROOT,
        child_address(ROOT, tokens),
        b"u" * 16,
        ROOT_UID,
        0,
        tokens,
        KIND.runs,
        payload.codec,
        payload.raw_bytes,
        payload.stored_bytes,
        0.5,
        checksum(payload.data.data),
    )
    return encode_header(header) + payload.data.tobytes()


class ManualWorker:
    """Does jobs when it is told to."""

    def __init__(self, most_jobs: int = 1000) -> None:
        self.todo: list[Job] = []
        self._done: list[tuple[Job, object]] = []
        self._most_jobs = most_jobs

    def has_room(self, held_bytes: int) -> bool:
        return self.waiting < self._most_jobs

    def submit(self, job: Job) -> bool:
        if not self.has_room(job.held_bytes):
            return False
        self.todo.append(job)
        return True

    def work(self, jobs: int = 1_000_000) -> None:
        """Do the first ones."""
        for job in self.todo[:jobs]:
            self._done.append((job, job.work()))
        del self.todo[:jobs]

    def poll(self) -> None:
        done, self._done = self._done, []
        for job, result in done:
            job.finish(result)

    @property
    def waiting(self) -> int:
        return len(self.todo) + len(self._done)

    @property
    def held_bytes(self) -> int:
        return sum([job.held_bytes for job in self.todo])

    def close(self, timeout_s: float) -> None:
        self.work()
        self.poll()
