"""Lengths drawn from a file: rows as they are, or a cumulative distribution; pairs from the same row."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.bench.load.distribution_text import call_text
from headrace.bench.load.length_files import CdfPoints, read_length_file
from headrace.bench.load.length_model import Bounds, Lengths


@dataclass(frozen=True, slots=True)
class EmpiricalLengths:
    """Each draw is the length of a row of the file, every row as likely as any other, then clamped."""

    path: Path
    column: str | None
    bounds: Bounds
    values: NDArray[np.int64] = field(compare=False, repr=False)
    """The file's lengths in file order, not clamped."""

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return self.at(rng.integers(0, len(self.values), size=count))

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The lengths of these rows, clamped."""
        return self.bounds.clamp(self.values[rows])

    def mean(self) -> float:
        return float(np.mean(self.bounds.clamp(self.values)))

    def describe(self) -> str:
        column, low, high = self.column, self.bounds.low, self.bounds.high
        return call_text("empirical", str(self.path), column=column, min=low, max=high)


@dataclass(frozen=True, slots=True)
class CdfLengths:
    """Draws from a cumulative distribution: between two points every whole number is equally likely, and the
    first point's share lies in 1..tokens. So the fraction of lengths up to each point is the file's. Then clamped.
    """

    path: Path
    bounds: Bounds
    points: CdfPoints = field(compare=False, repr=False)

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        ends = np.array([tokens for tokens, _ in self.points], dtype=np.int64)
        fractions = np.array([fraction for _, fraction in self.points])
        starts = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1]))
        # random() is below 1, so with side="right" a draw never lands in a bin of no share, nor past the last.
        bins = np.searchsorted(fractions, rng.random(count), side="right")
        return self.bounds.clamp(rng.integers(starts[bins] + 1, ends[bins], endpoint=True))

    def mean(self) -> float:
        total, start, below = 0.0, 0, 0.0
        for tokens, fraction in self.points:
            total += (fraction - below) * self.bounds.mean_of_uniform(start + 1, tokens)
            start, below = tokens, fraction
        return total

    def describe(self) -> str:
        return call_text("empirical", str(self.path), min=self.bounds.low, max=self.bounds.high)


def empirical(path: Path, column: str | None, bounds: Bounds) -> EmpiricalLengths | CdfLengths:
    """The distribution that a file of lengths gives. Raises ConfigError with file and line (``length_files``)."""
    lengths = read_length_file(path, column, zeros=bounds.low is not None)
    if isinstance(lengths, tuple):
        return CdfLengths(path, bounds, lengths)
    return EmpiricalLengths(path, column, bounds, lengths)


def sample_pairs(
    inputs: Lengths, outputs: Lengths, rng: np.random.Generator, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``count`` input lengths and output lengths.

    When both are rows of the same file, a pair comes from one row, so that long prompts keep their own answers'
    lengths; otherwise the two are drawn independently, inputs first.
    """
    if (
        isinstance(inputs, EmpiricalLengths)
        and isinstance(outputs, EmpiricalLengths)
        and inputs.path.resolve() == outputs.path.resolve()
        and len(inputs.values) == len(outputs.values)
    ):
        rows = rng.integers(0, len(inputs.values), size=count)
        return inputs.at(rows), outputs.at(rows)
    return inputs.sample(rng, count), outputs.sample(rng, count)
