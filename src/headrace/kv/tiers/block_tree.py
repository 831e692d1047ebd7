"""Which blocks there are, where each one's bytes are, and who follows whom.

A node is one block of 128 tokens after everything above it, as in ``kv.prefix_tree``, and is looked up by its tokens
themselves. A node is there while its bytes are in RAM, on disk or on their way (``busy``), or while a block below it
is: a prefix that lacks a block is of no use, so the lower ones go first. Everything about places is decided in
``block_store``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.kv.tiers.address import Digest, blake2b, child_address
from headrace.kv.tiers.codec import Payload
from headrace.kv.tiers.planes import Bytes, Run
from headrace.kv.token_blocks import BLOCK_BYTES, block_at


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What the blocks of one model and layout have in common. ``raw_bytes`` and ``runs`` are a block's size and entry
    widths; ``fingerprint`` is ``address.Fingerprint.digest``."""

    fingerprint: bytes
    raw_bytes: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """A block's file: the identity in its header, and its length."""

    uid: bytes
    file_bytes: int


class BlockNode:
    """One block. A root has no parent, no tokens and no bytes. ``uses`` counts sequences whose prompt had the block,
    the one that computed it among them; ``compute_s`` is what computing the block again takes, predicted."""

    __slots__ = (
        "address",
        "busy",
        "children",
        "compute_s",
        "depth",
        "disk",
        "fetched",
        "fetches",
        "group",
        "kind",
        "pack_tried",
        "parent",
        "pending_uid",
        "ram",
        "tokens",
        "used_s",
        "uses",
    )

    def __init__(self, kind: BlockKind, address: bytes, parent: BlockNode | None, tokens: bytes) -> None:
        self.kind = kind
        self.address = address
        self.parent = parent
        self.tokens = tokens
        self.depth: int = -1 if parent is None else parent.depth + 1
        self.children: dict[bytes, BlockNode] = {}
        self.ram: Payload | None = None
        self.disk: DiskRecord | None = None
        self.fetched: Bytes | None = None
        """Its raw bytes, for those of its ``fetches`` that have not been released."""
        self.fetches = 0
        self.busy = 0
        self.pack_tried = False
        self.pending_uid: bytes | None = None
        """The identity of the file that is being written."""
        self.group = ""
        self.uses = 1
        self.used_s = 0.0
        self.compute_s = 0.0

    @property
    def at_hand(self) -> bool:
        """Whether its bytes are in memory."""
        return self.ram is not None or self.fetched is not None

    @property
    def stored(self) -> bool:
        """Whether its bytes can be had now."""
        return self.ram is not None or self.disk is not None


class BlockTree:
    """The nodes of every root. ``digest`` as in ``address``."""

    def __init__(self, digest: Digest = blake2b) -> None:
        self._roots: dict[bytes, BlockNode] = {}
        self.digest = digest

    def root(self, kind: BlockKind, address: bytes) -> BlockNode:
        """The root at ``address``, made when there is none."""
        found = self._roots.get(address)
        if found is None:
            found = self._roots[address] = BlockNode(kind, address, None, b"")
        return found

    def find_root(self, address: bytes) -> BlockNode | None:
        """The root at ``address``, None when there is none."""
        return self._roots.get(address)

    def roots(self) -> list[BlockNode]:
        """The root of every namespace."""
        return list(self._roots.values())

    def stored_prefix(self, root_address: bytes, data: bytes) -> list[BlockNode]:
        """The blocks of the packed tokens ``data``, from the first on, as far as their bytes can be had."""
        node = self._roots.get(root_address)
        found: list[BlockNode] = []
        while node is not None:
            node = node.children.get(block_at(data, node.depth + 1))
            if node is None or not node.stored:
                break
            found.append(node)
        return found

    def child(self, parent: BlockNode, tokens: bytes) -> BlockNode:
        """The block of packed ``tokens`` after ``parent``, made when there is none. Raises ValueError for tokens that
        are no whole block."""
        found = parent.children.get(tokens)
        if found is None:
            if len(tokens) != BLOCK_BYTES:
                raise ValueError(f"{len(tokens)} bytes of tokens are no whole block")
            address = child_address(parent.address, tokens, self.digest)
            found = parent.children[tokens] = BlockNode(parent.kind, address, parent, tokens)
        return found

    def prune(self, node: BlockNode) -> BlockNode | None:
        """Take ``node`` and what is above it out as far as nothing needs them. Returns the lowest node that stays, None
        when none does."""
        while not node.children and not node.stored and not node.busy:
            parent = node.parent
            if parent is None:
                self._roots.pop(node.address, None)
                return None
            if parent.children.get(node.tokens) is node:
                del parent.children[node.tokens]
            node = parent
        return node

    def nodes(self) -> Iterator[BlockNode]:
        """All blocks, parents first."""
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            if node.parent is not None:
                yield node
            todo.extend(node.children.values())

    def check_integrity(self) -> str | None:
        """None when every node is where its tokens and address say, and something needs it; else what is wrong."""
        for address, root in self._roots.items():
            if root.address != address or root.parent is not None:
                return "a root is not where its address says"
        for node in self.nodes():
            assert node.parent is not None
            if node.parent.children.get(node.tokens) is not node or node.depth != node.parent.depth + 1:
                return f"a block at depth {node.depth} does not follow the one before"
            if child_address(node.parent.address, node.tokens, self.digest) != node.address:
                return f"a block at depth {node.depth} has an address that is not its content's"
            if not node.children and not node.stored and not node.busy:
                return f"a block at depth {node.depth} is nowhere and nothing needs it"
            if node.stored and node.parent.parent is not None and not (node.parent.stored or node.parent.busy):
                return f"a block at depth {node.depth} is stored, the one before is not"
        return None
