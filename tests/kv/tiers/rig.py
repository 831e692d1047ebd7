"""Stores over a folder of real files, with a clock and a worker that a test moves."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from headrace.kv.tiers.address import Digest, blake2b, root_address
from headrace.kv.tiers.block_file import HEADER_BYTES
from headrace.kv.tiers.codec_rule import CodecRule
from headrace.kv.tiers.disk import BlockFolder, Files
from headrace.kv.tiers.kv_tiers import KvTiers, TierSettings
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from tests.kv.tiers.blocks import KIND, RAW_BYTES, ManualWorker, blocks, kv_of, reader

FILE_BYTES = RAW_BYTES + HEADER_BYTES


class FailingFiles(Files):
    """Writing the ``fail``-th file from now on fails; -1: none."""

    def __init__(self) -> None:
        self.fail = -1

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        self.fail -= 1
        if self.fail == -1:
            raise OSError(28, "no space left")
        super().write(path, parts)


class Rig:
    """Stores over one folder, with a clock and a worker that a test moves."""

    def __init__(
        self,
        path: Path | None,
        *,
        ram_blocks: int = 100,
        disk_blocks: int = 100,
        codec: CodecRule = "none",
        digest: Digest = blake2b,
        most_jobs: int = 1000,
        uids: Iterator[int] | None = None,
        fetched_blocks: int = 100,
    ) -> None:
        self.path = Path() if path is None else path
        self.now_s = 0.0
        self.worker = ManualWorker(most_jobs)
        self.files = FailingFiles()
        self.folder = None if path is None else BlockFolder(path, self.files, digest)
        numbers = itertools.count(1) if uids is None else uids
        self.tiers = KvTiers(
            TierSettings(ram_blocks * RAW_BYTES, disk_blocks * FILE_BYTES, 1000, codec, fetched_blocks * RAW_BYTES),
            self.worker,
            self.folder,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
            new_uid=lambda: next(numbers).to_bytes(16, "little"),
            digest=digest,
            measured=False,
        )
        self.root = root_address(KIND.fingerprint, ("", "all", None), digest)
        self.tiers.open(KIND)

    def settle(self) -> None:
        """Let the worker do everything."""
        self.tiers.advance()
        while self.worker.waiting:
            self.worker.work()
            self.tiers.advance()
        assert self.tiers.check_integrity() is None

    def capture(self, chain: Sequence[int], *, compute_s: float = 1.0, tokens: int = 1, settle: bool = True) -> bool:
        """A stream with these blocks ends."""
        data = blocks(chain)
        taken = self.tiers.capture(
            KIND,
            self.root,
            data,
            reader(data),
            group="lane",
            compute_s=lambda _depth: compute_s,
            context_tokens=tokens,
            held_bytes=1,
        )
        if settle:
            self.settle()
        return taken

    def begin(self, chain: Sequence[int], *, settle: bool = True) -> None:
        """A prompt of these blocks begins."""
        self.tiers.began(self.root, b"".join(blocks(chain)))
        if settle:
            self.settle()

    def load(self, chain: Sequence[int]) -> int:
        """How many blocks come; what comes is right."""
        data = blocks(chain)
        loaded = self.tiers.load(self.root, b"".join(data), len(data) * KV_BLOCK_TOKENS)
        for depth, raw in enumerate(loaded):
            assert raw.tobytes() == kv_of(data[: depth + 1]).tobytes()
        return len(loaded)

    def places(self, chain: Sequence[int]) -> str:
        """A letter a block: r in RAM, d on disk, b in both."""
        nodes = self.tiers.store.tree.stored_prefix(self.root, b"".join(blocks(chain)))
        return "".join([("b" if node.disk else "r") if node.ram else "d" for node in nodes])

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()
