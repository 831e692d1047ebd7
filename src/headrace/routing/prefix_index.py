"""What each replica was sent, by prefix: a radix tree over blocks of prompts, within a bound.

A block's key is a hash of itself and all before it, so that one table of keys is the whole tree: a node's parent is
the key before it in any prompt that holds it. What a replica was sent it probably still has; what it has thrown away
since is not known here (``forget`` takes the word of an engine that says so).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

BLOCK_BYTES: Final = 256
MOST_BLOCKS: Final = 1024
"""Of one prompt; what comes after is as good as the same."""


def block_keys(prompt: bytes, salt: str = "") -> tuple[int, ...]:
    """The keys of a prompt's whole blocks. Prompts under another ``salt`` have nothing in common."""
    keys: list[int] = []
    key = hash(salt)
    whole = min(len(prompt) // BLOCK_BYTES, MOST_BLOCKS)
    for start in range(0, whole * BLOCK_BYTES, BLOCK_BYTES):
        key = hash((key, prompt[start : start + BLOCK_BYTES]))
        keys.append(key)
    return tuple(keys)


@dataclass(slots=True)
class _Node:
    parent: int | None
    depth: int
    children: int = 0
    replicas: set[str] = field(default_factory=set)


class PrefixIndex:
    """At most ``most_nodes`` blocks; beyond it the ones used longest ago go, leaves first."""

    def __init__(self, most_nodes: int = 200_000) -> None:
        self._most_nodes = most_nodes
        self._nodes: OrderedDict[int, _Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def sent(self, replica: str, keys: Sequence[int]) -> None:
        """``replica`` got a prompt of these blocks."""
        parent: int | None = None
        for depth, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = _Node(parent, depth)
                if parent is not None:
                    self._nodes[parent].children += 1
            node.replicas.add(replica)
            parent = key
        # From the end to the beginning: a parent is always used later than its children.
        for key in reversed(keys):
            self._nodes.move_to_end(key)
        while len(self._nodes) > self._most_nodes:
            self._drop_oldest()

    def matches(self, keys: Sequence[int]) -> dict[str, int]:
        """For each replica that was sent it, how many blocks from the beginning on."""
        found: dict[str, int] = {}
        holding: set[str] | None = None
        for depth, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is None:
                break
            holding = set(node.replicas) if holding is None else holding & node.replicas
            if not holding:
                break
            for replica in holding:
                found[replica] = depth + 1
        return found

    def forget(self, replica: str, keys: Sequence[int]) -> None:
        """The engine says that it has these blocks no more."""
        for key in keys:
            node = self._nodes.get(key)
            if node is not None:
                node.replicas.discard(replica)

    def forget_replica(self, replica: str) -> None:
        """The replica is gone, or has started anew."""
        for node in self._nodes.values():
            node.replicas.discard(replica)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every node hangs below its parent and the children's counts are right."""
        children: dict[int, int] = {}
        for key, node in self._nodes.items():
            if node.parent is None:
                assert node.depth == 0, f"block {key} has no parent at depth {node.depth}"
            else:
                assert node.parent in self._nodes, f"block {key} has lost its parent"
                assert self._nodes[node.parent].depth == node.depth - 1, f"block {key} is at the wrong depth"
                children[node.parent] = children.get(node.parent, 0) + 1
        for key, node in self._nodes.items():
            assert node.children == children.get(key, 0), f"block {key} counts its children wrong"
        assert len(self._nodes) <= self._most_nodes, "the bound is passed"

    def _drop_oldest(self) -> None:
        _, node = self._nodes.popitem(last=False)
        assert node.children == 0, "a parent is older than its child"
        if node.parent is not None:
            self._nodes[node.parent].children -= 1
