"""Which blocks stay where: quotas of RAM and disk, admission, eviction, and the account of it all.

Nothing here does I/O or copies bytes. Blocks come in, room is made for them by letting go what is worth least
(``worth``), and the caller is told which files to delete. A block may leave a tier only when no prefix loses its middle
by it: the other tier has it, or nothing follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from headrace.kv.group_chance import GroupChance
from headrace.kv.tiers.address import Digest, blake2b
from headrace.kv.tiers.block_file import BadReason
from headrace.kv.tiers.block_tree import BlockKind, BlockNode, BlockTree, DiskRecord
from headrace.kv.tiers.codec import Payload
from headrace.kv.tiers.worth import LeastWorth, rank

USES_FOR_DISK = 2
"""A block goes to disk when a second sequence has had it in its prompt: most are never asked for again."""


@dataclass(slots=True)
class TierTotals:
    """Since the start. ``fetched`` counts blocks that were read beside the steps, for sequences that waited; ``bad``
    blocks that were dropped because they could not be used, by reason; ``unsaved`` what never got in, by reason
    (``queue_full``, ``worth_less``, ``no_time``, ``write_failed``), in blocks."""

    ram_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    ram_evicted: int = 0
    disk_evicted: int = 0
    stored: int = 0
    deduplicated: int = 0
    written: int = 0
    fetched: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    unsaved: dict[str, int] = field(default_factory=dict)

    def count_bad(self, reason: BadReason) -> None:
        """A block could not be used."""
        self.bad[reason] = self.bad.get(reason, 0) + 1

    def count_unsaved(self, reason: str, blocks: int = 1) -> None:
        """Blocks were not kept."""
        self.unsaved[reason] = self.unsaved.get(reason, 0) + blocks


class BlockStore:
    """The blocks of both tiers. Not thread-safe. ``disk_load_s`` predicts reading one block back from disk."""

    def __init__(
        self,
        ram_quota_bytes: int,
        disk_quota_bytes: int,
        *,
        disk_load_s: Callable[[], float] = lambda: 0.0,
        digest: Digest = blake2b,
    ) -> None:
        self.ram_quota_bytes = ram_quota_bytes
        self.disk_quota_bytes = disk_quota_bytes
        self.ram_bytes = 0
        self.disk_bytes = 0
        self.reserved_bytes = 0
        """Of the disk, for files that are being written."""
        self.ram_blocks = 0
        self.disk_blocks = 0
        self.totals = TierTotals()
        self.tree = BlockTree(digest)
        self.doomed: list[tuple[bytes, bytes]] = []
        """(fingerprint, address) of files that are off the account and to be deleted; the caller empties it."""
        self._disk_load_s = disk_load_s
        self._groups = GroupChance()
        self._on_disk: dict[bytes, BlockNode] = {}
        self._ram_order = LeastWorth(self._ram_rank)
        self._disk_order = LeastWorth(self._disk_rank)
        self._raw_order = LeastWorth(self._raw_rank)

    # ------------------------------------------------------------------------------------------------- worth

    def _chance(self, node: BlockNode) -> float:
        return self._groups.fresh_chance(node.group, node.uses - 1)

    def _rank(self, node: BlockNode, saved_s: float, stored_bytes: int) -> float:
        return rank(self._chance(node), saved_s, stored_bytes, node.used_s)

    def _ram_rank(self, node: BlockNode) -> float | None:
        if node.ram is None or node.busy or (node.children and node.disk is None):
            return None
        return self._rank(node, self._ram_saves_s(node), node.ram.stored_bytes)

    def _disk_rank(self, node: BlockNode) -> float | None:
        if node.disk is None or node.busy or (node.children and node.ram is None):
            return None
        if any([child.disk is not None or child.busy for child in node.children.values()]):
            return None  # a file names the one that it follows
        return self._rank(node, node.compute_s, node.disk.file_bytes)

    def _ram_saves_s(self, node: BlockNode) -> float:
        """What having it in RAM saves over the next best."""
        return node.compute_s if node.disk is None else min(node.compute_s, self._disk_load_s())

    def _raw_rank(self, node: BlockNode) -> float | None:
        if node.ram is None or node.busy or node.pack_tried:
            return None
        return self._rank(node, node.compute_s, node.ram.stored_bytes)

    def _changed(self, node: BlockNode | None) -> None:
        """It may now go where it could not, must stay, or is worth something else; so may the one before it."""
        for each in (node, None if node is None else node.parent):
            if each is not None and each.parent is not None:
                self._ram_order.push(each)
                self._disk_order.push(each)
                self._raw_order.push(each)

    # --------------------------------------------------------------------------------------------------- use

    def known(self, root: bytes, blocks: Iterable[bytes]) -> int:
        """How many of ``blocks`` (packed tokens), from the first on, are stored or about to be."""
        node = self.tree.find_root(root)
        count = 0
        for block in blocks:
            node = node.children.get(block) if node is not None else None
            if node is None or not (node.stored or node.busy):
                break
            count += 1
        return count

    def note_use(self, root: bytes, data: bytes, now_s: float) -> list[BlockNode]:
        """Another sequence has the packed tokens ``data`` as its prompt. Returns the blocks of it that are due to be
        written to disk, first ones first."""
        due: list[BlockNode] = []
        for node in self.tree.stored_prefix(root, data):
            node.uses += 1
            node.used_s = now_s
            if node.uses == 2:
                self._groups.note_used(node.group)
            self._changed(node)
            if self.disk_quota_bytes and node.disk is None and not node.busy and node.ram is not None:
                due.append(node)
        return due

    # --------------------------------------------------------------------------------------------------- RAM

    def hold(self, kind: BlockKind, root: bytes, blocks: list[bytes], first: int) -> list[BlockNode]:
        """Nodes for ``blocks[first:]``, busy until ``put`` or ``release``. Those before must be known."""
        node = self.tree.root(kind, root)
        for block in blocks[:first]:
            node = node.children[block]
        held: list[BlockNode] = []
        for block in blocks[first:]:
            node = self.tree.child(node, block)
            node.busy += 1
            held.append(node)
        return held

    def release(self, node: BlockNode) -> None:
        """What was on its way is not, or no longer."""
        node.busy -= 1
        self._changed(self.tree.prune(node))

    def put(self, node: BlockNode, payload: Payload) -> bool:
        """Keep ``payload`` in RAM as ``node``'s bytes; False when everything there is worth more."""
        size = payload.stored_bytes
        if node.ram is not None:
            if size >= node.ram.stored_bytes:
                return True
            self.ram_bytes += size - node.ram.stored_bytes  # packed since
            node.ram = payload
            self._changed(node)
            return True
        above = node.parent
        if above is None or (above.parent is not None and not above.stored):
            return False  # the block before it did not get in
        node.busy += 1  # it must not be let go while room is made for it
        room = self._make_room(size, self._rank(node, self._ram_saves_s(node), size))
        node.busy -= 1
        if not room:
            self.totals.count_unsaved("worth_less")
            self._changed(node)
            return False
        node.ram = payload
        self.ram_bytes += size
        self.ram_blocks += 1
        self.totals.stored += 1
        self._changed(node)
        return True

    def _make_room(self, size: int, worth: float) -> bool:
        while self.ram_bytes + size > self.ram_quota_bytes:
            least = self._ram_order.least()
            if least is None or least[0] > worth:
                return False
            self._drop_ram(least[1])
            self.totals.ram_evicted += 1
        return True

    def _drop_ram(self, node: BlockNode) -> None:
        assert node.ram is not None
        self.ram_bytes -= node.ram.stored_bytes
        self.ram_blocks -= 1
        node.ram = None
        if node.disk is None:
            self._groups.note_gone(node.group)
        self._changed(node)
        self._changed(self.tree.prune(node))

    def coldest_raw(self, now_s: float, idle_s: float) -> BlockNode | None:
        """A block that nobody has tried to pack and that was not used for ``idle_s``, of those the one of least worth;
        None when that one was."""
        least = self._raw_order.least()
        if least is None or now_s - least[1].used_s < idle_s:
            return None
        return least[1]

    # -------------------------------------------------------------------------------------------------- disk

    def reserve(self, node: BlockNode, file_bytes: int) -> bool:
        """Make room for ``node``'s file, which is about to be written; what has to go for it is ``doomed``. False when
        everything there is worth more, or another block has its address."""
        if self._on_disk.get(node.address, node) is not node:
            self.totals.count_bad("collision")
            return False
        worth = self._rank(node, node.compute_s, file_bytes)
        node.busy += 1
        while (full := self.disk_bytes + self.reserved_bytes + file_bytes > self.disk_quota_bytes) and (
            least := self._disk_order.least()
        ):
            if least[0] > worth:
                break
            self.drop_file(least[1])
            self.totals.disk_evicted += 1
        node.busy -= 1
        self._changed(node)
        if full:
            self.totals.count_unsaved("worth_less")
            return False
        self.reserved_bytes += file_bytes
        self._on_disk[node.address] = node
        node.busy += 1
        self._changed(node)
        return True

    def unreserve(self, node: BlockNode, reserved_bytes: int, reason: str) -> None:
        """What was reserved could not be written."""
        self.reserved_bytes -= reserved_bytes
        node.busy -= 1
        self._on_disk.pop(node.address, None)
        self.totals.count_unsaved(reason)
        self._changed(self.tree.prune(node))

    def wrote(self, node: BlockNode, reserved_bytes: int, record: DiskRecord, *, in_order: bool) -> None:
        """What was reserved is written, as ``record``. Not ``in_order``: the file that it names as the one before it is
        not there, and it is ``doomed`` at once."""
        self.reserved_bytes -= reserved_bytes
        node.busy -= 1
        if not in_order:
            self._on_disk.pop(node.address, None)
            self.doomed.append((node.kind.fingerprint, node.address))
            self.totals.count_bad("orphan")
        else:
            self._add_file(node, record)
            self.totals.written += 1
        self._changed(self.tree.prune(node))

    def found(
        self, parent: BlockNode, tokens: bytes, record: DiskRecord, *, compute_s: float, used_s: float
    ) -> BlockNode | None:
        """A file of an earlier run is there. None when another block has its address."""
        node = self.tree.child(parent, tokens)
        if self._on_disk.get(node.address, node) is not node:
            self.tree.prune(node)
            return None
        if not node.stored and not node.busy:
            node.compute_s, node.used_s, node.uses = compute_s, used_s, USES_FOR_DISK
        if node.disk is None:
            self._on_disk[node.address] = node
            self._add_file(node, record)
        return node

    def _add_file(self, node: BlockNode, record: DiskRecord) -> None:
        node.disk = record
        self.disk_bytes += record.file_bytes
        self.disk_blocks += 1
        self._changed(node)

    def drop_file(self, node: BlockNode) -> None:
        """``node``'s file is ``doomed``."""
        assert node.disk is not None
        self.disk_bytes -= node.disk.file_bytes
        self.disk_blocks -= 1
        node.disk = None
        self._on_disk.pop(node.address, None)
        self.doomed.append((node.kind.fingerprint, node.address))
        if node.ram is None:
            self._groups.note_gone(node.group)
        self._changed(node)
        self._changed(self.tree.prune(node))

    def drop_bad(self, node: BlockNode, reason: BadReason) -> None:
        """The bytes that ``node`` would be loaded from (RAM's, else its file's) cannot be used. What is left without
        the block before it goes, too."""
        self.totals.count_bad(reason)
        in_ram = node.ram is not None
        alone = node.ram is None or node.disk is None
        below = [node]
        for each in below:
            below.extend(each.children.values())
        node.busy += 1
        for each in reversed(below[1:]):  # lowest first
            lost_file = each.disk is not None and (alone or not in_ram)
            if (alone and each.ram is not None) or lost_file:
                self.totals.count_bad("orphan")
            if alone and each.ram is not None:
                self._drop_ram(each)
            if lost_file:
                self.drop_file(each)
        if in_ram:
            self._drop_ram(node)
        else:
            self.drop_file(node)
        self.release(node)

    # ---------------------------------------------------------------------------------------------- accounts

    def check_integrity(self) -> str | None:
        """None when the tree is sound, and bytes and blocks are those of the nodes and within the quotas; else what is
        wrong."""
        problem = self.tree.check_integrity()
        if problem is not None:
            return problem
        nodes = list(self.tree.nodes())
        payloads = [node.ram for node in nodes if node.ram is not None]
        records = [node.disk for node in nodes if node.disk is not None]
        for name, counted, there in (
            ("bytes in RAM", self.ram_bytes, sum([payload.stored_bytes for payload in payloads])),
            ("blocks in RAM", self.ram_blocks, len(payloads)),
            ("bytes on disk", self.disk_bytes, sum([record.file_bytes for record in records])),
            ("blocks on disk", self.disk_blocks, len(records)),
        ):
            if counted != there:
                return f"{counted} {name} counted, {there} there"
        if self.ram_bytes > self.ram_quota_bytes:
            return f"{self.ram_bytes} bytes in RAM, {self.ram_quota_bytes} allowed"
        for node in nodes:
            if node.disk is not None and self._on_disk.get(node.address) is not node:
                return f"a file at depth {node.depth} is not known by its address"
            above = node.parent
            if node.disk is not None and above is not None and above.parent is not None and above.disk is None:
                return f"a file at depth {node.depth} follows one that is not there"
        return None
