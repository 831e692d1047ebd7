"""Who holds the KV of which tokens: a radix tree over whole blocks, with an exact end.

A node is one block of ``KV_BLOCK_TOKENS`` tokens after everything above it. A *holder* (a stream of a band, or
anything else that keeps KV) is in every node of its sequence; its last tokens, fewer than a block, are kept beside
the tree. Children are looked up by the block's tokens themselves, never by a digest alone: a collision of hashes costs
a comparison and cannot give wrong text. Each namespace (model, adapter, tenant: whatever the caller puts into it) has
a root of its own, and nothing crosses from one to another.

A *watch* is a sequence that waits: it rests on the deepest node of its prompt that somebody holds, and is moved when
a node below it appears or its own goes. How much of each waiting prompt is cached is thereby known at every step for
the price of the changes, however many wait.

Nodes live only while somebody holds them: there are at most as many as whole blocks in all the KV memory.
Costs: one decoded token O(1), a completed block one look-up, a truncation or removal one operation a block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace.kv.token_blocks import (
    BLOCK_BYTES,
    KV_BLOCK_TOKENS,
    block_at,
    common_tokens,
    first_tokens,
    packed,
    token_count,
)

H = TypeVar("H", bound=Hashable)


class _Node(Generic[H]):
    """One block of some sequences. A root has no parent and an empty block."""

    __slots__ = ("block", "children", "depth", "holders", "parent", "watchers")

    def __init__(self, block: bytes, parent: _Node[H] | None) -> None:
        self.block = block
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, _Node[H]] = {}
        self.holders: set[H] = set()
        self.watchers: dict[bytes, set[Watch[H]]] = {}
        """Who rests here, by the block that would take it further."""


def _deepest(root: _Node[H], data: bytes) -> _Node[H]:
    """The node of the longest beginning of ``data``, in whole blocks, that somebody holds."""
    node = root
    while (child := node.children.get(block_at(data, node.depth))) is not None:
        node = child
    return node


def _usable_tokens(node: _Node[H], data: bytes) -> int:
    """What of a prompt down to ``node`` need not be computed: its last token always must."""
    return min(node.depth * KV_BLOCK_TOKENS, max(0, token_count(data) - 1))


@dataclass(slots=True)
class _Held(Generic[H]):
    """A holder's place: its root, a node for every whole block, and the packed tokens after them."""

    namespace: Hashable
    root: _Node[H]
    nodes: list[_Node[H]] = field(default_factory=list)
    tail: bytearray = field(default_factory=bytearray)

    @property
    def tokens(self) -> int:
        return len(self.nodes) * KV_BLOCK_TOKENS + token_count(self.tail)


@dataclass(slots=True, eq=False)
class Watch(Generic[H]):
    """A waiting prompt. Made by ``PrefixTree.watch``; ``name`` is the caller's."""

    name: str
    namespace: Hashable
    data: bytes
    node: _Node[H]

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return token_count(self.data)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt in whole blocks that somebody holds now, without the last token, which has to be
        computed for its logits. What is common inside the next block is not counted: ``matches`` finds it."""
        return _usable_tokens(self.node, self.data)

    def block(self, depth: int) -> bytes:
        """The packed block after ``depth`` whole ones; shorter, or empty, at the prompt's end."""
        return block_at(self.data, depth)


@dataclass(frozen=True, slots=True)
class Match(Generic[H]):
    """``holder`` has the KV of the first ``tokens`` tokens of the prompt, and of no more of it."""

    holder: H
    tokens: int


class PrefixTree(Generic[H]):
    """The tokens of every holder. Not thread-safe."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[H]] = {}
        self._held: dict[H, _Held[H]] = {}
        self._watches: set[Watch[H]] = set()
        self._moved: dict[Watch[H], None] = {}
        self._blocks = 0

    # ----------------------------------------------------------------------------------------------- holders

    def __contains__(self, holder: H) -> bool:
        return holder in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def blocks(self) -> int:
        """Distinct whole blocks that are held."""
        return self._blocks

    def holders(self) -> list[H]:
        """Everybody who holds something, or an empty sequence."""
        return list(self._held)

    def tokens(self, holder: H) -> int:
        """Length of what ``holder`` holds. Raises KeyError for a stranger, as every method here does."""
        return self._held[holder].tokens

    def namespace(self, holder: H) -> Hashable:
        """The namespace that ``holder`` belongs to."""
        return self._held[holder].namespace

    def whole_blocks(self, holder: H) -> list[bytes]:
        """The packed tokens of every whole block that ``holder`` holds."""
        return [node.block for node in self._held[holder].nodes]

    def shared_tokens(self, holder: H) -> int:
        """Of what ``holder`` holds, tokens in whole blocks that others hold too: they outlive it."""
        nodes = self._held[holder].nodes
        # Downwards, holders only become fewer.
        return bisect_left(nodes, True, key=lambda node: len(node.holders) == 1) * KV_BLOCK_TOKENS

    def add(self, holder: H, namespace: Hashable, tokens: Iterable[int] = ()) -> None:
        """``holder`` begins a sequence with ``tokens``. Raises ValueError when it holds one already."""
        self._append(holder, self._begin(holder, namespace), packed(tokens))

    def add_prefix(self, holder: H, watch: Watch[H], tokens: int) -> None:
        """``holder`` begins a sequence with the first ``tokens`` tokens of a watched prompt. Raises ValueError when
        it holds one already or the prompt has fewer."""
        if not 0 <= tokens <= watch.tokens:
            raise ValueError(f"{watch.name} has {watch.tokens} tokens, not {tokens}")
        self._append(holder, self._begin(holder, watch.namespace), first_tokens(watch.data, tokens))

    def extend(self, holder: H, tokens: Iterable[int]) -> None:
        """The KV of ``tokens`` was added to what ``holder`` holds."""
        self._append(holder, self._held[holder], packed(tokens))

    def truncate(self, holder: H, tokens: int) -> None:
        """``holder`` keeps its first ``tokens`` tokens. Raises ValueError when it has fewer."""
        held = self._held[holder]
        if not 0 <= tokens <= held.tokens:
            raise ValueError(f"{holder} holds {held.tokens} tokens, not {tokens}")
        blocks, rest = divmod(tokens, KV_BLOCK_TOKENS)
        kept = held.nodes[blocks].block if blocks < len(held.nodes) else held.tail
        held.tail = bytearray(first_tokens(kept, rest))
        self._leave(holder, held, blocks)

    def remove(self, holder: H) -> None:
        """``holder`` holds nothing any more."""
        held = self._held.pop(holder)
        self._leave(holder, held, 0)
        held.root.holders.discard(holder)
        self._drop_unused_root(held.namespace)

    def rename(self, holder: H, new: H) -> None:
        """What ``holder`` held is now with ``new``. Raises ValueError when that one holds something."""
        if new in self._held:
            raise ValueError(f"{new} holds a sequence already")
        held = self._held[new] = self._held.pop(holder)
        for node in (held.root, *held.nodes):
            node.holders.discard(holder)
            node.holders.add(new)

    def exchange(self, one: H, other: H) -> None:
        """Each of two holders has now what the other had."""
        first, second = self._held[one], self._held[other]
        for held, holder in ((first, one), (second, other)):
            for node in (held.root, *held.nodes):
                node.holders.discard(holder)
        for held, holder in ((first, other), (second, one)):
            for node in (held.root, *held.nodes):
                node.holders.add(holder)
        self._held[one], self._held[other] = second, first

    def _begin(self, holder: H, namespace: Hashable) -> _Held[H]:
        if holder in self._held:
            raise ValueError(f"{holder} holds a sequence already")
        root = self._root(namespace)
        root.holders.add(holder)
        held = self._held[holder] = _Held(namespace, root)
        return held

    def _append(self, holder: H, held: _Held[H], data: bytes) -> None:
        tail = held.tail
        tail += data
        if len(tail) < BLOCK_BYTES:
            return
        blocks = len(tail) // BLOCK_BYTES
        for block in range(blocks):
            self._descend(holder, held, block_at(tail, block))
        del tail[: blocks * BLOCK_BYTES]

    def _descend(self, holder: H, held: _Held[H], block: bytes) -> None:
        parent = held.nodes[-1] if held.nodes else held.root
        child = parent.children.get(block)
        if child is None:
            child = parent.children[block] = _Node(block, parent)
            self._blocks += 1
            for watch in parent.watchers.pop(block, ()):
                self._rest(watch, child)
        child.holders.add(holder)
        held.nodes.append(child)

    def _leave(self, holder: H, held: _Held[H], blocks: int) -> None:
        """Out of every node below the first ``blocks``; those that nobody holds go, lowest first."""
        while len(held.nodes) > blocks:
            node = held.nodes.pop()
            node.holders.discard(holder)
            if node.holders:
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[node.block]
            self._blocks -= 1
            for watches in node.watchers.values():
                for watch in watches:
                    self._rest(watch, parent)

    # ----------------------------------------------------------------------------------------------- watches

    def watch(self, name: str, namespace: Hashable, tokens: Iterable[int]) -> Watch[H]:
        """Follow how much of a waiting prompt is held, until ``unwatch``."""
        data = packed(tokens)
        node = _deepest(self._root(namespace), data)
        watch = Watch(name, namespace, data, node)
        self._watches.add(watch)
        self._rest(watch, node)
        return watch

    def cached_tokens(self, namespace: Hashable, tokens: Iterable[int]) -> int:
        """``Watch.cached_tokens`` of a prompt that nobody follows. Changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        data = packed(tokens)
        return _usable_tokens(_deepest(root, data), data)

    def unwatch(self, watch: Watch[H]) -> None:
        """Stop following. Raises KeyError when it was not followed."""
        self._watches.remove(watch)
        self._moved.pop(watch, None)
        resting = watch.node.watchers[watch.block(watch.node.depth)]
        resting.discard(watch)
        if not resting:
            del watch.node.watchers[watch.block(watch.node.depth)]
        self._drop_unused_root(watch.namespace)

    def take_moved(self) -> list[Watch[H]]:
        """Watches whose ``cached_tokens`` may have changed since the last call, new ones among them."""
        moved = list(self._moved)
        self._moved.clear()
        return moved

    def matches(self, watch: Watch[H]) -> Iterator[Match[H]]:
        """Every holder of the namespace with the exact length of what it has in common with the prompt, longest
        first (those of one length in no particular order). Lazy: take what is needed before the tree changes."""
        node: _Node[H] | None = watch.node
        below: set[H] = set()
        while node is not None:
            rest, depth = watch.block(node.depth), node.depth
            level = [
                Match(holder, depth * KV_BLOCK_TOKENS + self._common(holder, depth, rest))
                for holder in node.holders
                if holder not in below
            ]
            level.sort(key=lambda match: -match.tokens)
            yield from level
            below = node.holders
            node = node.parent

    def _common(self, holder: H, depth: int, rest: bytes) -> int:
        """Tokens of ``rest`` that ``holder`` has after ``depth`` whole blocks."""
        held = self._held[holder]
        return common_tokens(held.nodes[depth].block if depth < len(held.nodes) else held.tail, rest)

    def _rest(self, watch: Watch[H], node: _Node[H]) -> None:
        watch.node = node
        node.watchers.setdefault(watch.block(node.depth), set()).add(watch)
        self._moved[watch] = None

    # ------------------------------------------------------------------------------------------------- roots

    def _root(self, namespace: Hashable) -> _Node[H]:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Node(b"", None)
        return root

    def _drop_unused_root(self, namespace: Hashable) -> None:
        root = self._roots[namespace]
        if not root.holders and not root.watchers:
            del self._roots[namespace]

    def check_integrity(self) -> str | None:
        """None when holders, nodes and watches agree with one another; else what is wrong."""
        for holder, held in self._held.items():
            if held.root is not self._roots.get(held.namespace):
                return f"{holder} hangs on a root that is not its namespace's"
            if len(held.tail) >= BLOCK_BYTES:
                return f"{holder} has a whole block outside the tree"
            above = held.root
            for node in held.nodes:
                if node.parent is not above or above.children.get(node.block) is not node:
                    return f"{holder} has a block that does not follow the one before"
                if holder not in node.holders:
                    return f"{holder} is not among the holders of its block at {node.depth * KV_BLOCK_TOKENS}"
                above = node
        blocks = places = 0
        nodes = list(self._roots.values())
        seen: set[Watch[H]] = set()
        while nodes:
            node = nodes.pop()
            blocks += node.parent is not None
            places += len(node.holders)
            if not node.holders and (node.parent is not None or not node.watchers):
                return f"a block at depth {node.depth} has no holder"
            if node.parent is not None and len(node.block) != BLOCK_BYTES:
                return f"a block at depth {node.depth} has {token_count(node.block)} tokens"
            for block, watches in node.watchers.items():
                if block in node.children or any(
                    watch.node is not node or watch.block(node.depth) != block for watch in watches
                ):
                    return f"a watch at depth {node.depth} does not rest where its prompt ends"
                seen |= watches
            nodes.extend(node.children.values())
        if blocks != self._blocks:
            return f"{self._blocks} blocks counted, {blocks} there"
        if places != sum([1 + len(held.nodes) for held in self._held.values()]):
            return "a block has a holder that does not know it"
        return None if seen == self._watches else f"{len(self._watches)} watches counted, {len(seen)} there"
