"""Random streams: one per purpose and class, all from the run's one seed, none moved by another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

BLOCK: Final = 1024
"""Draws are made this many at a time, always: how many are used changes none of them."""

_TEXT_SEEDS: Final = 2**53
"""Text seeds lie below this: whole numbers up to here survive every JSON reader."""


class Purpose(IntEnum):
    """What a generator is for."""

    ARRIVALS = 0
    CLASSES = 1
    MALFORMED = 2
    INPUT = 3
    OUTPUT = 4
    TEXT = 5
    PREFIX = 6
    TURNS = 7
    THINK = 8


def generator(seed: int, purpose: Purpose, name: str = "") -> Generator:
    """The generator of a purpose (of the class ``name``): a child of ``seed``, independent of all others.

    It is the child that ``SeedSequence(seed).spawn`` would give at a place computed from the name, so that adding a
    class moves no other's.
    """
    digest = blake2b(name.encode(), digest_size=8).digest()
    return Generator(PCG64(SeedSequence(seed, spawn_key=(int(purpose), int.from_bytes(digest)))))


def endless(sample: Callable[[Generator, int], NDArray[np.int64]], random: Generator) -> Iterator[int]:
    """Whole numbers without end."""
    while True:
        yield from sample(random, BLOCK).tolist()


def fractions(random: Generator) -> Iterator[float]:
    """Uniform in [0, 1), without end."""
    while True:
        yield from random.random(BLOCK).tolist()


def text_seeds(seed: int, name: str) -> Iterator[int]:
    """Text seeds of a class: two of a million are the same with a chance of 1 in 18,000."""
    return endless(lambda random, count: random.integers(0, _TEXT_SEEDS, count), generator(seed, Purpose.TEXT, name))


class Choices:
    """Draws among names by weight."""

    def __init__(self, weights: dict[str, float], random: Generator) -> None:
        self._names = list(weights)
        total = sum(weights.values())
        self._edges = np.cumsum([weight / total for weight in weights.values()])
        # Rounding must leave no draw beyond the last name that has any weight.
        self._edges[np.flatnonzero(list(weights.values()))[-1] :] = 1.0
        self._numbers = endless(self._chosen, random)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return self._names[next(self._numbers)]

    def _chosen(self, random: Generator, count: int) -> NDArray[np.int64]:
        return np.searchsorted(self._edges, random.random(count), side="right")
