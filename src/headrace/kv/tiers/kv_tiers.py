"""The stores at work: blocks come in from streams, go to disk, and come back.

The engine's thread owns all accounts and calls every method. What takes time goes to workers (``worker``): cutting a
state into blocks, packing, files. ``load`` is for when nobody else waits, or for little; ``fetch`` brings what is on
disk to RAM beside the steps first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from headrace.kv.group_chance import HALF_LIFE_S
from headrace.kv.sources import StoredPrefix
from headrace.kv.tiers.address import Digest, blake2b
from headrace.kv.tiers.adopt import adopt
from headrace.kv.tiers.block_file import HEADER_BYTES, ROOT_UID, Bad
from headrace.kv.tiers.block_store import USES_FOR_DISK, BlockStore
from headrace.kv.tiers.block_tree import BlockKind, BlockNode, DiskRecord
from headrace.kv.tiers.codec import Codec, Payload, pack, unpack
from headrace.kv.tiers.codec_choice import Codecs, measure_codecs, measure_disk, sample
from headrace.kv.tiers.codec_rule import CodecRule
from headrace.kv.tiers.disk import BlockFolder, FoundFile
from headrace.kv.tiers.families import Family, families
from headrace.kv.tiers.fetches import Fetches, read_block
from headrace.kv.tiers.load_times import Form, LoadTimes, form_of
from headrace.kv.tiers.planes import Bytes
from headrace.kv.tiers.worker import Job, Worker
from headrace.kv.tiers.writing import write_block
from headrace.kv.token_blocks import KV_BLOCK_TOKENS

WRITE_PAUSE_S: Final = 30.0
"""After a file could not be written (the disk is full, or gone), none is tried for so long."""
COLD_AFTER_S: Final = HALF_LIFE_S
_INFINITE: Final = float("inf")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """``disk_bytes`` matters only with a folder. Contexts of more than ``compress_threshold_tokens`` are packed when
    they come in, others when they are cold. ``fetched_bytes`` is what may be in memory, or on its way there, for
    sequences that wait for it, besides one of any size."""

    ram_bytes: int
    disk_bytes: int = 0
    compress_threshold_tokens: int = 8192
    codec: CodecRule = "auto"
    fetched_bytes: int = 256 * 2**20


class KvTiers:
    """Blocks in RAM and, with a ``folder``, on disk. ``reader`` does what somebody waits for (None: the ``worker`` does
    that, too). ``clock`` is monotonic; ``new_uid`` makes 16 bytes that no file had before."""

    def __init__(
        self,
        settings: TierSettings,
        worker: Worker,
        folder: BlockFolder | None = None,
        *,
        reader: Worker | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        new_uid: Callable[[], bytes] = lambda: os.urandom(16),
        digest: Digest = blake2b,
        measured: bool = True,
    ) -> None:
        """``measured``: find out at once, beside everything else, how fast codecs and disk are."""
        self._settings = settings
        self._worker = worker
        self._reader = worker if reader is None else reader
        self._folder = folder
        self._clock = clock
        self._wall_clock = wall_clock
        self._new_uid = new_uid
        self._digest = digest
        self.times = LoadTimes()
        self._raw_bytes = 0
        self.store = BlockStore(
            settings.ram_bytes,
            settings.disk_bytes if folder is not None else 0,
            disk_load_s=lambda: self.times.block_from_disk_s(self._raw_bytes),
            digest=digest,
        )
        self.fetches = Fetches(self.store, self._reader, clock, self.times.beside, settings.fetched_bytes)
        self._kinds: dict[bytes, BlockKind] = {}
        self._scanned: set[bytes] = set()
        self._foreign: list[tuple[Path, int]] = []
        self.codecs = Codecs(settings.codec)
        self._pause_until_s = -_INFINITE
        if measured:
            self._measure()

    # ----------------------------------------------------------------------------------------------- beginning

    def _measure(self) -> None:
        folder = None if self._folder is None else self._folder.path

        def work() -> object:
            data, runs = sample(np.random.default_rng(0))
            return measure_codecs(data, runs), None if folder is None else measure_disk(folder)

        def finish(result: object) -> None:
            assert isinstance(result, tuple)
            self.codecs.speeds, self.codecs.disk_bytes_per_s = result
            for speed in self.codecs.speeds:
                if speed.codec is Codec.ZSTD_PLANES:
                    self.times.fetch["packed"].s_per_byte = 1 / speed.unpack_bytes_per_s
                    if self.codecs.disk_bytes_per_s is not None:
                        self.times.fetch["disk"].s_per_byte = speed.load_s_per_byte(self.codecs.disk_bytes_per_s)

        self._worker.submit(Job(work, finish))

    def open(self, kind: BlockKind) -> None:
        """Blocks of ``kind`` will be asked for: what earlier runs left of them on disk is looked through, beside the
        steps. Nothing happens the second time."""
        if kind.fingerprint in self._kinds:
            return
        self._kinds[kind.fingerprint] = kind
        self._raw_bytes = max(self._raw_bytes, kind.raw_bytes)
        folder = self._folder
        if folder is None:
            return
        known = list(self._kinds)

        def finish(result: object) -> None:
            assert isinstance(result, tuple)
            found, others = result
            self._foreign = others
            self._remove_files(adopt(self.store, kind, found, self._found_used_s))
            self._scanned.add(kind.fingerprint)

        self._worker.submit(Job(lambda: (folder.scan(kind.fingerprint), folder.others(known)), finish))

    def _found_used_s(self, file: FoundFile) -> float:
        """On this run's clock, when the file was last written: all that is known of its use."""
        return self._clock() - max(0.0, self._wall_clock() - file.changed_s)

    # ------------------------------------------------------------------------------------------------- use

    def stored_tokens(self, root: bytes, data: bytes) -> int:
        """How many of the packed tokens ``data`` can be loaded, in whole blocks."""
        return KV_BLOCK_TOKENS * len(self.store.tree.stored_prefix(root, data))

    def stored(self, root: bytes, data: bytes, most_disk_s: float = _INFINITE) -> list[StoredPrefix]:
        """What of the packed tokens ``data`` can be loaded, and at what cost: up to every block after which they come
        from somewhere else, and no further than reading files takes ``most_disk_s``."""
        nodes = self.store.tree.stored_prefix(root, data)
        found: list[StoredPrefix] = []
        load_s = disk_s = 0.0
        from_disk = False
        for index, node in enumerate(nodes):
            load_s += self.times.load_s([node])
            if not node.at_hand:
                from_disk = True
                disk_s += self.times.block_from_disk_s(node.kind.raw_bytes)
                if disk_s > most_disk_s:
                    break
            following = nodes[index + 1] if index + 1 < len(nodes) else None
            if following is None or following.at_hand != node.at_hand:
                found.append(StoredPrefix("disk" if from_disk else "ram", (index + 1) * KV_BLOCK_TOKENS, load_s))
        return found

    def load(self, root: bytes, data: bytes, tokens: int) -> list[Bytes]:
        """The raw KV of the blocks that cover the first ``tokens`` of ``data``, or of as many as can be read: what is
        damaged is dropped and counted. What came from disk is in RAM afterwards, if it is worth it."""
        nodes = self.store.tree.stored_prefix(root, data)[: -(-tokens // KV_BLOCK_TOKENS)]
        blocks: list[Bytes] = []
        took_s: dict[Form, tuple[int, float]] = {}
        fetched: list[tuple[BlockNode, Bytes]] = []
        totals = self.store.totals
        for node in nodes:
            form, started_s = form_of(node), self._clock()
            block = self._fetch(node)
            if isinstance(block, Bad):
                self.store.drop_bad(node, block.reason)
                break
            size, so_far_s = took_s.get(form, (0, 0.0))
            took_s[form] = (size + len(block), so_far_s + self._clock() - started_s)
            blocks.append(block)
            if node.ram is None:
                fetched.append((node, block))
                totals.disk_hit_tokens += KV_BLOCK_TOKENS
            else:
                totals.ram_hit_tokens += KV_BLOCK_TOKENS
        for form, (size, spent_s) in took_s.items():
            if form != "raw":
                self.times.fetch[form].learn(size, spent_s)
        for node, block in fetched:
            if node.disk is not None:
                node.used_s = self._clock()
                self.store.put(node, Payload(Codec.RAW, block, len(block)))
        return blocks

    def _fetch(self, node: BlockNode) -> Bytes | Bad:
        if node.ram is not None:
            raw = unpack(node.ram, node.kind.runs)
            return Bad("payload_checksum") if raw is None else raw
        if node.fetched is not None:
            return node.fetched
        assert self._folder is not None
        return read_block(self._folder, node, self._digest)()

    def on_disk(self, root: bytes, data: bytes) -> tuple[int, int]:
        """How many of the packed tokens ``data`` can be loaded, and the raw bytes of their blocks that are on disk
        alone."""
        nodes = self.store.tree.stored_prefix(root, data)
        return len(nodes) * KV_BLOCK_TOKENS, sum([node.kind.raw_bytes for node in nodes if not node.at_hand])

    def fetch(self, name: str, root: bytes, data: bytes) -> bool:
        """Read those blocks beside the steps, for ``name``. False when too much is read for others, or nothing is to be
        read."""
        folder, nodes = self._folder, self.store.tree.stored_prefix(root, data)
        wanted = [node for node in nodes if not node.at_hand]
        if folder is None or not wanted:
            return False
        return self.fetches.begin(name, wanted, [read_block(folder, node, self._digest) for node in wanted])

    def began(self, root: bytes, data: bytes) -> None:
        """A sequence with the packed tokens ``data`` as its prompt has begun. Blocks that are used for the second time
        go to disk."""
        for node in self.store.note_use(root, data, self._clock()):
            if node.uses >= USES_FOR_DISK:
                self._write(node)

    # -------------------------------------------------------------------------------------------------- coming in

    def missing(self, root: bytes, blocks: Sequence[bytes]) -> int:
        """How many of ``blocks``, the last ones, are not stored."""
        return len(blocks) - self.store.known(root, blocks)

    def has_room(self, held_bytes: int) -> bool:
        """Whether the worker would take in work that keeps so much memory."""
        return self._worker.has_room(held_bytes)

    def capture(
        self,
        kind: BlockKind,
        root: bytes,
        blocks: Sequence[bytes],
        read: Callable[[int], Bytes],
        *,
        group: str,
        compute_s: Callable[[int], float],
        context_tokens: int,
        held_bytes: int,
        done: Callable[[], None] = lambda: None,
    ) -> bool:
        """Store what is missing of ``blocks``: ``read``, called beside the steps, gives the KV of the n-th.
        ``compute_s`` predicts computing the n-th again; ``held_bytes`` is the memory that ``read`` keeps alive,
        and ``done`` is called when it is not needed any more. False when too much waits to be stored already."""
        first = self.store.known(root, blocks)
        self.store.totals.deduplicated += first
        if first == len(blocks):
            done()
            return True
        codec = Codec.RAW
        seconds = [compute_s(depth) for depth in range(first, len(blocks))]
        self.codecs.compute_s_per_byte = sum(seconds) / len(seconds) / kind.raw_bytes
        if context_tokens > self._settings.compress_threshold_tokens:
            codec = self.codecs.for_ram()
        nodes = self.store.hold(kind, root, list(blocks), first)
        now_s = self._clock()
        for node, again_s in zip(nodes, seconds, strict=True):
            node.group, node.compute_s, node.used_s = group, again_s, now_s

        def work() -> object:
            return [pack(read(depth), codec, kind.runs) for depth in range(first, first + len(nodes))]

        def finish(result: object) -> None:
            assert isinstance(result, list)
            wanted = True
            for node, payload in zip(nodes, result, strict=True):
                node.pack_tried = codec is not Codec.RAW
                wanted = wanted and self.store.put(node, payload)
            for node in reversed(nodes):
                self.store.release(node)
            done()

        if self._worker.submit(Job(work, finish, held_bytes)):
            return True
        for node in reversed(nodes):
            self.store.release(node)
        done()
        return False

    def beside(self, work: Callable[[], object], finish: Callable[[object], None]) -> None:
        """Have the worker do something of the caller's, if it has room for it."""
        self._worker.submit(Job(work, finish))

    # ------------------------------------------------------------------------------------------------ to disk

    def _write(self, node: BlockNode) -> None:
        folder, above, payload = self._folder, node.parent, node.ram
        if folder is None or above is None or payload is None or self._clock() < self._pause_until_s:
            return
        if node.kind.fingerprint not in self._scanned:
            return  # it may be there
        parent_uid = ROOT_UID
        if above.parent is not None:
            if above.disk is None and above.pending_uid is None:
                return
            parent_uid = above.disk.uid if above.disk is not None else above.pending_uid or ROOT_UID
        uid = self._new_uid()
        reserved = node.kind.raw_bytes + HEADER_BYTES
        self._make_room_among_foreign(reserved)
        if not self.store.reserve(node, reserved):
            return
        self._remove_doomed()
        if self.store.doomed:
            self.store.unreserve(node, reserved, "queue_full")
            return  # it might be removed after it was written
        node.pending_uid = uid
        work = write_block(folder, node, payload, self.codecs.for_disk(), uid=uid, parent_uid=parent_uid)

        def finish(result: object) -> None:
            node.pending_uid = None
            if isinstance(result, int):
                record = DiskRecord(uid, result)
                in_order = above.parent is None or (above.disk is not None and above.disk.uid == parent_uid)
                self.store.wrote(node, reserved, record, in_order=in_order)
            else:
                self._pause_until_s = self._clock() + WRITE_PAUSE_S
                self.store.unreserve(node, reserved, "write_failed")

        if not self._worker.submit(Job(work, finish)):
            node.pending_uid = None
            self.store.unreserve(node, reserved, "queue_full")

    def _make_room_among_foreign(self, size: int) -> None:
        """Files of other models go before any of this one's."""
        store = self.store
        foreign = sum([each for _, each in self._foreign])
        removed: list[Path] = []
        while self._foreign and store.disk_bytes + store.reserved_bytes + foreign + size > store.disk_quota_bytes:
            path, freed = self._foreign.pop(0)
            foreign -= freed
            removed.append(path)
        self._remove_files(removed)

    def _remove_files(self, paths: Sequence[Path]) -> None:
        """Beside the steps. What finds no place in the queue is found again by the next run."""
        if self._folder is not None and paths:
            self._worker.submit(_removal(self._folder, paths))

    def _remove_doomed(self) -> None:
        """Hand over what is off the account, if the queue takes it."""
        folder, doomed = self._folder, self.store.doomed
        if folder is None or not doomed:
            return
        if self._worker.submit(_removal(folder, [folder.block_path(*each) for each in doomed])):
            doomed.clear()

    # ------------------------------------------------------------------------------------------- between steps

    def advance(self) -> None:
        """Take in what the workers have done, and give them what there is to do. Quick."""
        self._worker.poll()
        if self._reader is not self._worker:
            self._reader.poll()
        self._remove_doomed()
        self._pack_cold()

    def _pack_cold(self) -> None:
        """While RAM is more than half full, pack what nobody has used for a while, one block at a time."""
        if self._worker.waiting or 2 * self.store.ram_bytes < self.store.ram_quota_bytes:
            return
        node = self.store.coldest_raw(self._clock(), COLD_AFTER_S)
        codec = self.codecs.for_ram()
        if node is None or node.ram is None or codec is Codec.RAW:
            return
        payload, cold = node.ram, node
        node.pack_tried = True
        node.busy += 1

        def finish(result: object) -> None:
            assert isinstance(result, Payload)
            if cold.ram is payload and result.codec is not Codec.RAW:
                self.store.put(cold, result)
            self.store.release(cold)

        if not self._worker.submit(Job(lambda: pack(payload.data, codec, cold.kind.runs), finish)):
            self.store.release(cold)

    @property
    def working(self) -> bool:
        """Whether the workers have something to do or to hand over."""
        return self._worker.waiting > 0 or self._reader.waiting > 0

    @property
    def queued(self) -> int:
        """Jobs that wait for the worker."""
        return self._worker.waiting

    @property
    def queued_bytes(self) -> int:
        """Memory that they keep."""
        return self._worker.held_bytes

    def close(self, timeout_s: float = 2.0) -> None:
        """Finish what can be in ``timeout_s``, and let the folder go."""
        self.advance()
        if self._reader is not self._worker:
            self._reader.close(timeout_s)
        self._worker.close(timeout_s)
        if self._folder is not None:
            self._folder.close()

    def families(self) -> Iterator[Family]:
        """What is stored, by the first block of its sequences."""
        return families(self.store.tree, self.times)

    def check_integrity(self) -> str | None:
        """None when every account agrees; else what is wrong."""
        return self.store.check_integrity() or self.fetches.check_integrity()


def _removal(folder: BlockFolder, paths: Sequence[Path]) -> Job:
    def work() -> object:
        for path in paths:
            folder.remove_file(path)
        return None

    return Job(work, lambda _result: None)
