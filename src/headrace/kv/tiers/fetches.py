"""Blocks on their way from disk to sequences that wait, beside the steps of others.

A fetch is somebody's (by name) until it is released. What it has read is kept for it even where RAM is full of blocks
that are worth more: it is about to be used. All fetches together keep a bounded number of bytes, or one of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.kv.tiers.address import Digest
from headrace.kv.tiers.block_file import Bad, decode_block
from headrace.kv.tiers.block_store import BlockStore
from headrace.kv.tiers.block_tree import BlockNode
from headrace.kv.tiers.disk import BlockFolder
from headrace.kv.tiers.load_times import Rate
from headrace.kv.tiers.planes import Bytes
from headrace.kv.tiers.worker import Job, Worker

Read = Callable[[], "Bytes | Bad"]


def read_block(folder: BlockFolder, node: BlockNode, digest: Digest) -> Read:
    """What reads ``node``'s file, which must be there now; it may be called in another thread."""
    assert node.disk is not None and node.parent is not None
    kind, address, tokens, parent, uid = node.kind, node.address, node.tokens, node.parent.address, node.disk.uid

    def read() -> Bytes | Bad:
        data = folder.read(kind.fingerprint, address)
        if data is None:
            return Bad("unreadable")
        decoded = decode_block(data, kind.fingerprint, runs=kind.runs, digest=digest)
        if isinstance(decoded, Bad):
            return decoded
        header, raw = decoded
        if header.tokens != tokens or header.parent != parent or header.uid != uid:
            return Bad("collision")
        return raw

    return read


@dataclass(slots=True)
class _Fetch:
    nodes: list[BlockNode]
    bytes: int
    ready: bool = False


@dataclass(slots=True)
class Fetches:
    """All of them. ``clock`` is read in the worker's thread, too. ``rate`` learns how quick they are."""

    store: BlockStore
    worker: Worker
    clock: Callable[[], float]
    rate: Rate
    most_bytes: int
    bytes: int = 0
    _by_name: dict[str, _Fetch] = field(default_factory=dict)

    def begin(self, name: str, nodes: Sequence[BlockNode], reads: Sequence[Read]) -> bool:
        """Read ``nodes``, which are on disk, for ``name``. False when too much is kept for others. Raises ValueError
        when ``name`` has a fetch already."""
        if name in self._by_name:
            raise ValueError(f"{name} has a fetch already")
        size = sum([node.kind.raw_bytes for node in nodes])
        if self.bytes and self.bytes + size > self.most_bytes:
            return False
        fetch = _Fetch(list(nodes), size)

        def work() -> object:
            started_s = self.clock()
            blocks: list[Bytes | Bad] = []
            for read in reads:
                blocks.append(read())
                if isinstance(blocks[-1], Bad):
                    break
            return blocks, self.clock() - started_s

        def finish(result: object) -> None:
            assert isinstance(result, tuple)
            if self._by_name.get(name) is fetch:
                self._read(fetch, *result)

        if not self.worker.submit(Job(work, finish)):
            return False
        self._by_name[name] = fetch
        self.bytes += size
        for node in nodes:
            node.busy += 1
            node.fetches += 1
        return True

    def _read(self, fetch: _Fetch, blocks: Sequence[Bytes | Bad], took_s: float) -> None:
        fetch.ready = True
        size = 0
        for node, block in zip(fetch.nodes, blocks, strict=False):
            if isinstance(block, Bad):
                if not node.at_hand and node.disk is not None:
                    self.store.drop_bad(node, block.reason)
            elif node.disk is not None:
                node.fetched = block
                size += len(block)
                self.store.totals.fetched += 1
        self.rate.learn(size, took_s)

    def ready(self, name: str) -> bool:
        """Whether all that can be read for ``name`` is there, or it has no fetch."""
        fetch = self._by_name.get(name)
        return fetch is None or fetch.ready

    def release(self, name: str) -> None:
        """``name`` needs its fetch no longer. Nothing happens when it has none."""
        fetch = self._by_name.pop(name, None)
        if fetch is None:
            return
        self.bytes -= fetch.bytes
        for node in reversed(fetch.nodes):
            node.fetches -= 1
            if not node.fetches:
                node.fetched = None
            self.store.release(node)

    def check_integrity(self) -> str | None:
        """None when bytes and counts are those of the fetches; else what is wrong."""
        if self.bytes != sum([fetch.bytes for fetch in self._by_name.values()]):
            return f"{self.bytes} bytes of fetches counted"
        counts: dict[int, int] = {}
        nodes = [node for fetch in self._by_name.values() for node in fetch.nodes]
        for node in nodes:
            counts[id(node)] = counts.get(id(node), 0) + 1
        if any([node.fetches != counts[id(node)] or node.busy < node.fetches for node in nodes]):
            return "a block does not know who has fetched it"
        return None
