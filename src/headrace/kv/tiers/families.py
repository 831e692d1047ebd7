"""Stored blocks by the first block of their sequences: what a dialogue, or all with one system prompt, have left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.kv.tiers.block_tree import BlockNode, BlockTree
from headrace.kv.tiers.load_times import LoadTimes

OTHERS = "others"
_NAME_CHARACTERS = 16


@dataclass(slots=True)
class Family:
    """The blocks after one first block that are in ``tier``. ``load_s`` is the predicted time to have them in a stream
    again, ``compute_s`` to compute them."""

    name: str
    tier: Literal["ram", "disk"]
    blocks: int = 0
    bytes: int = 0
    load_s: float = 0.0
    compute_s: float = 0.0


def families(tree: BlockTree, times: LoadTimes) -> Iterator[Family]:
    """Of every first block one for each tier that has something. A block that is in both tiers counts in both."""
    todo: list[BlockNode] = [first for root in tree.roots() for first in root.children.values()]
    for first in todo:
        name = first.address.hex()[:_NAME_CHARACTERS]
        ram, disk = Family(name, "ram"), Family(name, "disk")
        below = [first]
        for node in below:
            if node.ram is not None:
                _add(ram, node, node.ram.stored_bytes, times.load_s([node]))
            if node.disk is not None:
                _add(disk, node, node.disk.file_bytes, times.block_from_disk_s(node.kind.raw_bytes))
            below.extend(node.children.values())
        yield from [family for family in (ram, disk) if family.blocks]


def _add(family: Family, node: BlockNode, size: int, load_s: float) -> None:
    family.blocks += 1
    family.bytes += size
    family.load_s += load_s
    family.compute_s += node.compute_s


def together(some: Sequence[Family]) -> list[Family]:
    """All of ``some``, which are of one tier, as one; nothing for none."""
    if not some:
        return []
    total = Family(OTHERS, some[0].tier)
    for family in some:
        total.blocks += family.blocks
        total.bytes += family.bytes
        total.load_s += family.load_s
        total.compute_s += family.compute_s
    return [total]
