"""The stores at work: blocks come in from streams, go to disk, and come back.

The engine's thread owns all accounts and calls every method. What takes time goes to a worker (``worker``): cutting a
state into blocks, packing, files. Loading is the exception: a sequence waits for it, and nothing is gained by handing
it over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from headrace.kv.group_chance import HALF_LIFE_S
from headrace.kv.sources import StoredPrefix
from headrace.kv.tiers.address import Digest, blake2b
from headrace.kv.tiers.block_file import HEADER_BYTES, ROOT_UID, Bad, BlockHeader, checksum, decode_block, encode_header
from headrace.kv.tiers.block_store import USES_FOR_DISK, BlockStore
from headrace.kv.tiers.block_tree import BlockKind, BlockNode, DiskRecord
from headrace.kv.tiers.codec import Codec, Payload, pack, unpack
from headrace.kv.tiers.codec_choice import CodecSpeed, choose_codec, measure_codecs, measure_disk, sample
from headrace.kv.tiers.codec_rule import CodecRule
from headrace.kv.tiers.disk import BlockFolder, FoundFile
from headrace.kv.tiers.load_times import Form, LoadTimes, form_of
from headrace.kv.tiers.planes import Bytes
from headrace.kv.tiers.worker import Job, Worker
from headrace.kv.token_blocks import KV_BLOCK_TOKENS

WRITE_PAUSE_S: Final = 30.0
"""After a file could not be written (the disk is full, or gone), none is tried for so long."""
COLD_AFTER_S: Final = HALF_LIFE_S
_INFINITE: Final = float("inf")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """``disk_bytes`` matters only with a folder. Contexts of more than ``compress_threshold_tokens`` are packed when
    they come in, others when they are cold."""

    ram_bytes: int
    disk_bytes: int = 0
    compress_threshold_tokens: int = 8192
    codec: CodecRule = "auto"


class KvTiers:
    """Blocks in RAM and, with a ``folder``, on disk. ``clock`` is monotonic; ``new_uid`` makes 16 bytes that no file
    had before."""

    def __init__(
        self,
        settings: TierSettings,
        worker: Worker,
        folder: BlockFolder | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        new_uid: Callable[[], bytes] = lambda: os.urandom(16),
        digest: Digest = blake2b,
        measured: bool = True,
    ) -> None:
        """``measured``: find out at once, beside everything else, how fast codecs and disk are."""
        self._settings = settings
        self._worker = worker
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
        self._kinds: dict[bytes, BlockKind] = {}
        self._scanned: set[bytes] = set()
        self._foreign: list[tuple[Path, int]] = []
        self._speeds: tuple[CodecSpeed, ...] = ()
        self._disk_bytes_per_s: float | None = None
        self._compute_s_per_byte = 0.0
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
            self._speeds, self._disk_bytes_per_s = result
            for speed in self._speeds:
                if speed.codec is Codec.ZSTD_PLANES:
                    self.times.fetch["packed"].s_per_byte = 1 / speed.unpack_bytes_per_s
                    if self._disk_bytes_per_s is not None:
                        self.times.fetch["disk"].s_per_byte = speed.load_s_per_byte(self._disk_bytes_per_s)

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
            self._adopt(kind, found)
            self._scanned.add(kind.fingerprint)

        self._worker.submit(Job(lambda: (folder.scan(kind.fingerprint), folder.others(known)), finish))

    def _adopt(self, kind: BlockKind, found: Sequence[FoundFile]) -> None:
        """Take the files of an earlier run over, parents first. Those that cannot be used are removed."""
        by_address: dict[bytes, BlockNode] = {}
        for file in found:
            header = file.header
            problem = self._adopt_one(kind, header, file, by_address) if isinstance(header, BlockHeader) else header
            if problem is not None:
                self.store.totals.count_bad(problem.reason)
                self._remove_file(file.path)

    def _adopt_one(
        self, kind: BlockKind, header: BlockHeader, file: FoundFile, by_address: dict[bytes, BlockNode]
    ) -> Bad | None:
        store = self.store
        if header.runs != kind.runs:
            return Bad("length")
        if header.depth == 0:
            if header.parent_uid != ROOT_UID:
                return Bad("orphan")
            parent = store.tree.root(kind, header.parent)
        else:
            above = by_address.get(header.parent)
            if above is None or above.disk is None or above.disk.uid != header.parent_uid:
                return Bad("orphan")
            if above.depth + 1 != header.depth:
                return Bad("orphan")
            parent = above
        if store.disk_bytes + file.file_bytes > store.disk_quota_bytes:
            store.totals.disk_evicted += 1
            self._remove_file(file.path)
            store.tree.prune(parent)
            return None
        node = store.found(
            parent,
            header.tokens,
            DiskRecord(header.uid, file.file_bytes),
            compute_s=header.compute_s,
            used_s=self._found_used_s(file),
        )
        if node is None:
            store.tree.prune(parent)
            return Bad("collision")
        by_address[header.address] = node
        return None

    def _found_used_s(self, file: FoundFile) -> float:
        """On this run's clock, when the file was last written: all that is known of its use."""
        return self._clock() - max(0.0, self._wall_clock() - file.changed_s)

    # ------------------------------------------------------------------------------------------------- use

    def stored_tokens(self, root: bytes, data: bytes) -> int:
        """How many of the packed tokens ``data`` can be loaded, in whole blocks."""
        return KV_BLOCK_TOKENS * len(self.store.tree.stored_prefix(root, data))

    def stored(self, root: bytes, data: bytes) -> list[StoredPrefix]:
        """What of the packed tokens ``data`` can be loaded, and at what cost: up to every block after which they come
        from somewhere else."""
        nodes = self.store.tree.stored_prefix(root, data)
        found: list[StoredPrefix] = []
        load_s, from_disk = 0.0, False
        for index, node in enumerate(nodes):
            load_s += self.times.load_s([node])
            from_disk = from_disk or node.ram is None
            following = nodes[index + 1] if index + 1 < len(nodes) else None
            if following is None or (following.ram is None) != (node.ram is None):
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
            if form == "disk":
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
        assert self._folder is not None and node.disk is not None and node.parent is not None
        data = self._folder.read(node.kind.fingerprint, node.address)
        if data is None:
            return Bad("unreadable")
        decoded = decode_block(data, node.kind.fingerprint, runs=node.kind.runs, digest=self._digest)
        if isinstance(decoded, Bad):
            return decoded
        header, raw = decoded
        if header.tokens != node.tokens or header.parent != node.parent.address or header.uid != node.disk.uid:
            return Bad("collision")
        return raw

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
        self._compute_s_per_byte = sum(seconds) / len(seconds) / kind.raw_bytes
        if context_tokens > self._settings.compress_threshold_tokens:
            codec = self._codec(_INFINITE)
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

    def _codec(self, tier_bytes_per_s: float) -> Codec:
        return choose_codec(
            self._settings.codec,
            self._speeds,
            tier_bytes_per_s=tier_bytes_per_s,
            compute_s_per_byte=self._compute_s_per_byte,
        )

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
        uid, kind, node_compute_s = self._new_uid(), node.kind, node.compute_s
        reserved = kind.raw_bytes + HEADER_BYTES
        self._make_room_among_foreign(reserved)
        if not self.store.reserve(node, reserved):
            return
        self._remove_doomed()
        if self.store.doomed:
            self.store.unreserve(node, reserved, "queue_full")
            return  # it might be removed after it was written
        node.pending_uid = uid
        codec = self._codec(self._disk_bytes_per_s or _INFINITE)

        def work() -> object:
            stored = payload
            if codec is not Codec.RAW and payload.codec is Codec.RAW:
                stored = pack(payload.data, codec, kind.runs)
            header = BlockHeader(
                kind.fingerprint,
                above.address,
                node.address,
                uid,
                parent_uid,
                node.depth,
                node.tokens,
                kind.runs,
                stored.codec,
                stored.raw_bytes,
                stored.stored_bytes,
                node_compute_s,
                checksum(stored.data.data),
            )
            written = folder.write(kind.fingerprint, node.address, encode_header(header), stored.data.data)
            return header.file_bytes if written else None

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
        while self._foreign and store.disk_bytes + store.reserved_bytes + foreign + size > store.disk_quota_bytes:
            path, freed = self._foreign.pop(0)
            foreign -= freed
            self._remove_file(path)

    def _remove_file(self, path: Path) -> None:
        """Beside the steps. One that finds no place in the queue is found again by the next run."""
        folder = self._folder
        if folder is not None:
            self._worker.submit(_removal(folder, path))

    def _remove_doomed(self) -> None:
        """Hand over what is off the account, as far as the queue takes it."""
        folder, doomed = self._folder, self.store.doomed
        while doomed and folder is not None:
            path = folder.block_path(*doomed[0])
            if not self._worker.submit(_removal(folder, path)):
                return
            doomed.pop(0)

    # ------------------------------------------------------------------------------------------- between steps

    def advance(self) -> None:
        """Take in what the worker has done, and give it what there is to do. Quick."""
        self._worker.poll()
        self._remove_doomed()
        self._pack_cold()

    def _pack_cold(self) -> None:
        """While RAM is more than half full, pack what nobody has used for a while, one block at a time."""
        if self._worker.waiting or 2 * self.store.ram_bytes < self.store.ram_quota_bytes:
            return
        node = self.store.coldest_raw(self._clock(), COLD_AFTER_S)
        codec = self._codec(_INFINITE)
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
        """Whether the worker has something to do or to hand over."""
        return self._worker.waiting > 0

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
        self._worker.close(timeout_s)
        if self._folder is not None:
            self._folder.close()

    def check_integrity(self) -> str | None:
        """None when every account agrees; else what is wrong."""
        return self.store.check_integrity()


def _removal(folder: BlockFolder, path: Path) -> Job:
    return Job(lambda: folder.remove_file(path), lambda _result: None)
