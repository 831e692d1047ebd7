"""Random use of the stores with the process killed anywhere: accounts agree, and no KV is ever that of other tokens.

The KV of a block follows from all tokens before it (``blocks.kv_of``), so each load can be checked. Digests are cut to
a few bits in half of the runs, so that different contents have the same address all the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.kv.tiers.address import Digest, blake2b, root_address
from headrace.kv.tiers.block_file import HEADER_BYTES
from headrace.kv.tiers.codec import Codec, Payload
from headrace.kv.tiers.codec_rule import CodecRule
from headrace.kv.tiers.disk import BlockFolder, Files
from headrace.kv.tiers.kv_tiers import KvTiers, TierSettings
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from tests.kv.tiers.blocks import KIND, OTHER_KIND, RAW_BYTES, ManualWorker, blocks, kv_of, reader

CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
"""Few enough that they meet again."""
KINDS = (KIND, OTHER_KIND)


class Killed(Exception):
    """The process ends here."""


class FaultyFiles(Files):
    """A disk on which a write, a rename or a removal may be where the process ends, or fail because it is full."""

    def __init__(self) -> None:
        self.kill_in: int | None = None
        self.full = False

    def _operation(self) -> None:
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in < 0:
                raise Killed

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        data = b"".join([bytes(part) for part in parts])
        try:
            self._operation()
        except Killed:
            path.write_bytes(data[: len(data) // 2])
            raise
        if self.full:
            path.write_bytes(data[: len(data) // 3])
            raise OSError(28, "no space left")
        path.write_bytes(data)

    def replace(self, old: Path, new: Path) -> None:
        self._operation()
        super().replace(old, new)

    def remove(self, path: Path) -> None:
        self._operation()
        super().remove(path)


def weak(data: bytes) -> bytes:
    """A digest with many collisions."""
    return bytes([hashlib.blake2b(data, digest_size=1).digest()[0] & 3]) + bytes(31)


class StoresMachine(RuleBasedStateMachine):
    """One folder, used by one process after another."""

    @initialize(
        digest=st.sampled_from([blake2b, weak]),
        codec=st.sampled_from(["auto", "zstd", "none"]),
        ram_blocks=st.integers(1, 6),
    )
    def begin(self, digest: Digest, codec: CodecRule, ram_blocks: int) -> None:
        self.digest = digest
        self.ram_bytes = ram_blocks * RAW_BYTES
        self.codec: CodecRule = codec
        self.path = Path(tempfile.mkdtemp(prefix="stores-"))
        self.now_s = 0.0
        self.uids = itertools.count(1)
        self.captured: set[tuple[int, tuple[int, ...]]] = set()
        self.start()

    def start(self) -> None:
        self.files = FaultyFiles()
        self.worker = ManualWorker(most_jobs=200)
        self.folder = BlockFolder(self.path, self.files, self.digest)
        self.tiers = KvTiers(
            TierSettings(self.ram_bytes, 7 * (RAW_BYTES + HEADER_BYTES), 3 * KV_BLOCK_TOKENS, self.codec),
            self.worker,
            self.folder,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
            new_uid=lambda: next(self.uids).to_bytes(16, "little"),
            digest=self.digest,
            measured=False,
        )
        for kind in KINDS:
            self.tiers.open(kind)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.close()
            shutil.rmtree(self.path)

    def root(self, kind: int) -> bytes:
        return root_address(KINDS[kind].fingerprint, ("", "all", None), self.digest)

    @rule(kind=st.integers(0, 1), chain=CHAINS, long=st.booleans())
    def capture(self, kind: int, chain: list[int], long: bool) -> None:
        """A stream with these blocks has ended."""
        data = blocks(chain)
        self.tiers.capture(
            KINDS[kind],
            self.root(kind),
            data,
            reader(data),
            group="lane",
            compute_s=lambda depth: 1.0 + depth,
            context_tokens=KV_BLOCK_TOKENS * (10 if long else 1),
            held_bytes=len(data) * RAW_BYTES,
        )
        self.captured |= {(kind, tuple(chain[: end + 1])) for end in range(len(chain))}

    @rule(kind=st.integers(0, 1), chain=CHAINS)
    def begin_with(self, kind: int, chain: list[int]) -> None:
        """A prompt has these blocks."""
        self.tiers.began(self.root(kind), b"".join(blocks(chain)))

    @rule(kind=st.integers(0, 1), chain=CHAINS)
    def talk(self, kind: int, chain: list[int]) -> None:
        """Three turns of a dialogue with time between them: what was said goes to RAM, then to disk."""
        for _ in range(3):
            self.capture(kind, chain, False)
            self.now_s += 1.0
            self.work(1_000)
            self.begin_with(kind, chain)
            self.work(1_000)

    @rule(kind=st.integers(0, 1), chain=CHAINS)
    def load(self, kind: int, chain: list[int]) -> None:
        """What comes is the KV of exactly these tokens, however little of it there is."""
        data = blocks(chain)
        offered = self.tiers.stored(self.root(kind), b"".join(data))
        loaded = self.tiers.load(self.root(kind), b"".join(data), len(data) * KV_BLOCK_TOKENS)
        assert len(loaded) <= (offered[-1].tokens // KV_BLOCK_TOKENS if offered else 0)
        for depth, raw in enumerate(loaded):
            assert raw.tobytes() == kv_of(data[: depth + 1]).tobytes()
            assert (kind, tuple(chain[: depth + 1])) in self.captured

    @rule(kind=st.integers(0, 1), chain=CHAINS, name=st.sampled_from("abc"))
    def fetch(self, kind: int, chain: list[int], name: str) -> None:
        """A sequence waits for what is on disk, in place of what it may have waited for."""
        self.tiers.fetches.release(name)
        self.tiers.fetch(name, self.root(kind), b"".join(blocks(chain)))

    @rule(name=st.sampled_from("abc"))
    def release(self, name: str) -> None:
        """It has begun, or was given up."""
        self.tiers.fetches.release(name)
        assert self.tiers.fetches.ready(name)

    @rule(jobs=st.integers(1, 10))
    def work(self, jobs: int) -> None:
        """The worker gets on."""
        with contextlib.suppress(Killed):
            self.worker.work(jobs)
            self.tiers.advance()
            return
        self.restart()

    @rule(seconds=st.sampled_from([0.1, 40.0, 500.0]))
    def wait(self, seconds: float) -> None:
        """Blocks become cold; a pause after a full disk ends."""
        self.now_s += seconds
        self.tiers.advance()

    @rule(operations=st.integers(0, 6))
    def kill_soon(self, operations: int) -> None:
        """The process will end at one of its next file operations."""
        self.files.kill_in = operations

    @rule(full=st.booleans())
    def fill_disk(self, full: bool) -> None:
        """No space is left, or some again."""
        self.files.full = full

    @rule()
    def restart(self) -> None:
        """The process ended, whatever it was doing; another one takes the folder over."""
        self.folder.close()
        self.start()

    @rule(kind=st.integers(0, 1), chain=CHAINS)
    def restart_and_load(self, kind: int, chain: list[int]) -> None:
        """What is asked for first after a restart, when the folder has been looked through, comes from there."""
        self.restart()
        self.work(1_000)
        self.load(kind, chain)

    @rule(seed=st.integers(0, 1 << 30), truncate=st.booleans(), in_kv=st.booleans())
    def damage(self, seed: int, truncate: bool, in_kv: bool) -> None:
        """A file loses its end, or one bit of it turns."""
        randomness = random.Random(seed)
        found = sorted(self.path.rglob("*.kv"))
        if found:
            path = randomness.choice(found)
            data = bytearray(path.read_bytes())
            first = HEADER_BYTES if in_kv and len(data) > HEADER_BYTES else 0
            place = randomness.randrange(first, max(1, len(data)))
            if truncate or not data:
                os.truncate(path, place)
            else:
                data[place] ^= 1 << randomness.randrange(8)
                path.write_bytes(data)

    @rule()
    def settle(self) -> None:
        """When all is done, the files that are there are those on the account."""
        self.tiers.advance()
        while self.worker.waiting:
            try:
                self.worker.work()
            except Killed:
                self.restart()
            self.tiers.advance()
        accounted = {
            self.folder.block_path(node.kind.fingerprint, node.address)
            for node in self.tiers.store.tree.nodes()
            if node.disk is not None
        }
        assert set(self.path.rglob("*.kv")) == accounted

    @rule(seed=st.integers(0, 1 << 30), chain=CHAINS)
    def exchange_files(self, seed: int, chain: list[int]) -> None:
        """Two whole files have changed their names, and one of them may be what is asked for."""
        randomness = random.Random(seed)
        found = sorted(self.path.rglob("*.kv"))
        if len(found) > 1:
            one, other = randomness.sample(found, 2)
            first, second = one.read_bytes(), other.read_bytes()
            one.write_bytes(second)
            other.write_bytes(first)
            self.load(0, chain)

    @invariant()
    def sound(self) -> None:
        """Every account agrees at every moment, and quotas hold."""
        if hasattr(self, "tiers"):
            assert self.tiers.check_integrity() is None
            store = self.tiers.store
            assert store.disk_bytes + store.reserved_bytes <= store.disk_quota_bytes


StoresMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)


TestTwelveThousandOperations = StoresMachine.TestCase
"""Crashes among them."""


def test_a_bit_that_turns_in_ram_is_noticed_where_it_can_be() -> None:
    """A packed block that does not unpack is dropped with what follows it, and counted."""
    worker = ManualWorker()
    tiers = KvTiers(TierSettings(1 << 20, codec="zstd"), worker, measured=False)
    data = blocks([1, 2, 3])
    root = root_address(KIND.fingerprint, ("", "all", None))
    tiers.capture(
        KIND, root, data, reader(data), group="", compute_s=lambda _: 1.0, context_tokens=1 << 20, held_bytes=0
    )
    worker.work()
    tiers.advance()
    _, second, _ = tiers.store.tree.stored_prefix(root, b"".join(data))
    assert second.ram is not None and second.ram.codec is Codec.ZSTD_PLANES
    second.ram = Payload(second.ram.codec, np.zeros_like(second.ram.data), second.ram.raw_bytes)
    assert len(tiers.load(root, b"".join(data), 3 * KV_BLOCK_TOKENS)) == 1
    assert tiers.store.totals.bad == {"payload_checksum": 1, "orphan": 1}
    assert tiers.check_integrity() is None
