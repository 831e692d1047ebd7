"""How long stored blocks take to come back, learned from those that did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from headrace.kv.tiers.block_tree import BlockNode

Form = Literal["raw", "packed", "disk"]
"""A block in memory as it is, in RAM packed, or in a file."""

_MEMORY: Final = 0.3


@dataclass(slots=True)
class Rate:
    """Seconds for a raw byte."""

    s_per_byte: float

    def learn(self, size: int, took_s: float) -> None:
        """It took ``took_s`` for ``size`` raw bytes."""
        if size > 0 and took_s > 0:
            self.s_per_byte += _MEMORY * (took_s / size - self.s_per_byte)


def form_of(node: BlockNode) -> Form:
    """How a stored block would come."""
    if node.ram is not None:
        return "packed" if node.ram.codec else "raw"
    return "disk" if node.fetched is None else "raw"


@dataclass(slots=True)
class LoadTimes:
    """``fetch`` makes raw bytes of a block, ``join`` puts them into a stream. The priors are a slow disk's, and half of
    what one core of the machine that this was written on does; a few loads correct them."""

    fetch: dict[Form, Rate] = field(
        default_factory=lambda: {"raw": Rate(0.0), "packed": Rate(1 / 700e6), "disk": Rate(1 / 300e6)}
    )
    join: Rate = field(default_factory=lambda: Rate(1 / 1500e6))
    beside: Rate = field(default_factory=lambda: Rate(1 / 100e6))
    """A file, read beside steps by a thread that they come before."""

    def load_s(self, nodes: Sequence[BlockNode]) -> float:
        """Predicted time for all of ``nodes``."""
        return sum(
            [node.kind.raw_bytes * (self.fetch[form_of(node)].s_per_byte + self.join.s_per_byte) for node in nodes]
        )

    def block_from_disk_s(self, raw_bytes: int) -> float:
        """Predicted time for one block from its file."""
        return raw_bytes * (self.fetch["disk"].s_per_byte + self.join.s_per_byte)
