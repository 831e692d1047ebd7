"""How many sequences fit a KV memory, so that at a random moment they overflow it with at most a given probability.

With n sequences of independent sizes X (bytes, in whole blocks), the memory M overflows with P(X1 + ... + Xn > M).
The distribution of the sum is computed exactly, as the n-fold convolution of X's own: sizes are multiples of a unit
above the smallest one, powers are taken by squaring, and n is found bit by bit, because the probability rises with n.
Where a memory has more than 2^19 units they are made coarser and sizes are rounded up, so that the answer is never
too high.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, inf, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.kv.layout import CacheType, KvLayout
from headrace.plan.length_pmf import Probabilities, convolved

BLOCK_TOKENS = 128
LEAST_OVERFLOW, MOST_OVERFLOW = 1e-9, 0.5
_MOST_UNITS = 1 << 19
_MOST_SEQUENCES = 1 << 40


@dataclass(frozen=True, slots=True)
class SequenceSizes:
    """Sizes that sequences have, ascending in bytes, with their probabilities."""

    sizes: NDArray[np.int64]
    probabilities: Probabilities

    @property
    def mean(self) -> float:
        """Bytes."""
        return float(self.sizes.astype(np.float64) @ self.probabilities)

    @property
    def variance(self) -> float:
        """Square bytes."""
        return float((self.sizes - self.mean) ** 2 @ self.probabilities)

    @property
    def smallest(self) -> int:
        return int(self.sizes[0])

    @property
    def largest(self) -> int:
        return int(self.sizes[-1])


def sizes_of(blocks: Probabilities, layout: KvLayout, types: CacheType) -> SequenceSizes:
    """``blocks``: probabilities of 0, 1, 2... blocks. Raises ConfigError for a size that does not fit 64 bits."""
    chances: dict[int, float] = {}
    for count in np.flatnonzero(blocks).tolist():
        size = layout.sequence_bytes(count * BLOCK_TOKENS, types)
        chances[size] = chances.get(size, 0.0) + float(blocks[count])
    if max(chances) >= 1 << 62:
        raise ConfigError("a sequence of this model would take more than 2^62 bytes")
    ordered = sorted(chances)
    total = sum(chances.values())
    return SequenceSizes(np.array(ordered, np.int64), np.array([chances[size] / total for size in ordered]))


class MemoryFit:
    """Answers for one distribution of sizes and one memory."""

    def __init__(self, sizes: SequenceSizes, memory_bytes: int) -> None:
        self._sizes = sizes
        self._memory = memory_bytes
        above = [int(size) - sizes.smallest for size in sizes.sizes]
        room = max(0, memory_bytes - sizes.smallest)
        exact = gcd(*above) or 1
        coarse = -(-room // _MOST_UNITS)
        self.unit_bytes = exact if coarse <= exact else coarse
        """Sizes above the smallest are counted in these."""
        self.rounds_up = self.unit_bytes != exact
        """Whether sizes were rounded up to whole units: then fewer sequences may be promised than would do."""
        self._units = room // self.unit_bytes
        steps = np.array([-(-size // self.unit_bytes) for size in above], dtype=np.int64)
        inside = steps <= self._units
        one = np.bincount(steps[inside], weights=sizes.probabilities[inside], minlength=1)
        self._powers: list[Probabilities] = [one.astype(np.float64)]

    @property
    def certain(self) -> int:
        """So many fit whatever their sizes are."""
        return self._memory // self._sizes.largest if self._sizes.largest else _MOST_SEQUENCES

    @property
    def possible(self) -> int:
        """More cannot fit even if all have the smallest size."""
        return self._memory // self._sizes.smallest if self._sizes.smallest else _MOST_SEQUENCES

    def most(self, overflow: float) -> int:
        """The most sequences that overflow with at most this probability."""
        if self._sizes.largest == self._sizes.smallest:
            return self.certain
        top = 0
        while 1 << (top + 1) <= self.possible:
            top += 1
        count, sums = 0, np.ones(1)
        for bit in reversed(range(top + 1)):
            more = count + (1 << bit)
            if more > self.possible:
                continue
            candidate = self._clipped(convolved(sums, self._power(bit)))
            if self._above(candidate, more) <= overflow:
                count, sums = more, candidate
        return count

    def overflow(self, count: int) -> float:
        """The probability that ``count`` sequences take more than the memory."""
        if count <= self.certain:
            return 0.0
        if count > self.possible:
            return 1.0
        sums = np.ones(1)
        for bit in range(count.bit_length()):
            if count >> bit & 1:
                sums = self._clipped(convolved(sums, self._power(bit)))
        return self._above(sums, count)

    def by_normal(self, overflow: float) -> int:
        """The most n with n * mean + z * sqrt(n) * std <= memory: what a normal approximation says."""
        mean, std = self._sizes.mean, sqrt(self._sizes.variance)
        if mean == 0:
            return _MOST_SEQUENCES
        z = NormalDist().inv_cdf(1 - overflow)
        root = (-z * std + sqrt(z * z * std * std + 4 * mean * self._memory)) / (2 * mean)
        return int(root * root) if root < inf else _MOST_SEQUENCES

    def _power(self, bit: int) -> Probabilities:
        """The sum of 2^bit sizes, as far as it fits."""
        while len(self._powers) <= bit:
            last = self._powers[-1]
            self._powers.append(self._clipped(convolved(last, last)))
        return self._powers[bit]

    def _clipped(self, sums: Probabilities) -> Probabilities:
        return sums[: self._units + 1]

    def _above(self, sums: Probabilities, count: int) -> float:
        room = (self._memory - count * self._sizes.smallest) // self.unit_bytes
        return min(1.0, max(0.0, 1.0 - float(sums[: room + 1].sum()))) if room >= 0 else 1.0
