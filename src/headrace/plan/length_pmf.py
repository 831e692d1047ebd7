"""How many tokens sequences hold, as exact probabilities: index n of an array is the probability of n tokens.

The distributions are those of the load generator (``bench/load/lengths.py``), and the probabilities are of what it
draws: rounded, clamped to ``min=`` and ``max=``.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import erf, sqrt

import numpy as np
from numpy.typing import NDArray

from headrace.bench.load.empirical_lengths import CdfLengths, EmpiricalLengths
from headrace.bench.load.length_model import Bounds
from headrace.bench.load.lengths import FixedLengths, LognormalLengths, NormalLengths, UniformLengths
from headrace.bench.load.lengths import Lengths as Lengths
from headrace.errors import ConfigError

Probabilities = NDArray[np.float64]
MOST_TOKENS = 1 << 22
"""Longest context that is computed token by token."""
_SHORT = 64  # a convolution with so few terms is summed directly


def probabilities(lengths: Lengths, most_tokens: int) -> Probabilities:
    """Of 0..``most_tokens``; what is longer counts as ``most_tokens``. Raises ConfigError for a distribution that is
    not one of the load generator's."""
    counts = np.arange(most_tokens, dtype=np.float64)
    bounds, below = _cumulative(lengths, counts)
    below = np.where(counts < bounds.least, 0.0, np.where(counts >= bounds.most, 1.0, below))
    return np.maximum(np.diff(np.concatenate(([0.0], below, [1.0]))), 0.0)


def _cumulative(lengths: Lengths, counts: Probabilities) -> tuple[Bounds, Probabilities]:
    """The bounds, and the probability of at most so many tokens before they are applied."""
    match lengths:
        case FixedLengths():
            return lengths.bounds, (counts >= lengths.tokens).astype(np.float64)
        case UniformLengths():
            span = lengths.last - lengths.first + 1
            return lengths.bounds, np.clip((counts - lengths.first + 1) / span, 0.0, 1.0)
        case NormalLengths():
            low = _phi((lengths.bounds.least - 0.5 - lengths.mean_tokens) / lengths.std_tokens)
            upto = _phis((counts + 0.5 - lengths.mean_tokens) / lengths.std_tokens)
            return lengths.bounds, np.clip((upto - low) / lengths.share_inside, 0.0, 1.0)
        case LognormalLengths():
            return lengths.bounds, _phis((np.log(counts + 0.5) - lengths.mu) / lengths.sigma)
        case EmpiricalLengths():
            ordered = np.sort(lengths.values)
            return lengths.bounds, np.searchsorted(ordered, counts, side="right") / len(ordered)
        case CdfLengths():
            ends = [0.0, *[float(tokens) for tokens, _ in lengths.points]]
            return lengths.bounds, np.interp(counts, ends, [0.0, *[fraction for _, fraction in lengths.points]])
        case _:
            raise ConfigError(f"the probabilities of {lengths.describe()} are not known")


def total_at_end(inputs: Probabilities, outputs: Probabilities, context_tokens: int) -> Probabilities:
    """Tokens of a finished sequence: prompt and answer, drawn independently, cut to the context."""
    return _cut(convolved(inputs, outputs), context_tokens)


def total_while_running(inputs: Probabilities, outputs: Probabilities, context_tokens: int) -> Probabilities:
    """Tokens of a sequence at a moment at which it generates, when every token takes equally long.

    An answer of n tokens is met n times as often as one of 1, and is at each of its tokens equally often:
    P(u-th token) = P(answer >= u) / E(answer).
    """
    inputs = _cut(inputs, context_tokens - 1)
    at_least = np.cumsum(outputs[::-1])[::-1].copy()
    at_least[0] = 0.0
    weights = convolved(inputs, at_least)[: context_tokens + 1]
    return _scaled(weights)


def rows_at_end(inputs: NDArray[np.int64], outputs: NDArray[np.int64], context_tokens: int) -> Probabilities:
    """As ``total_at_end``, for pairs that belong together, each equally likely."""
    totals = np.minimum(inputs + outputs, context_tokens)
    return np.bincount(totals, minlength=2) / len(totals)


def rows_while_running(inputs: NDArray[np.int64], outputs: NDArray[np.int64], context_tokens: int) -> Probabilities:
    """As ``total_while_running``, for pairs."""
    starts = np.minimum(inputs, context_tokens - 1)
    ends = np.minimum(starts + outputs, context_tokens)
    edges = np.bincount(starts + 1, minlength=context_tokens + 2).astype(np.float64)
    edges -= np.bincount(ends + 1, minlength=context_tokens + 2)
    weights = np.cumsum(edges)[: context_tokens + 1]
    return _scaled(weights)


def pairs_of(rows: Iterable[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Input and output lengths as arrays. Raises ConfigError when there is none."""
    pairs = np.array(list(rows), dtype=np.int64)
    if not len(pairs):
        raise ConfigError("the trace has no request with input and output tokens")
    return pairs[:, 0], pairs[:, 1]


def in_blocks(tokens: Probabilities, block_tokens: int) -> Probabilities:
    """Probabilities of 0, 1, 2... blocks: a block that is begun counts whole."""
    blocks = -(-np.arange(len(tokens)) // block_tokens)
    return np.bincount(blocks, weights=tokens).astype(np.float64)


def convolved(first: Probabilities, second: Probabilities) -> Probabilities:
    """The distribution of a sum. By Fourier transform where both are long; its rounding (about 1e-16 of the whole per
    entry) is far below any overflow probability that may be asked for."""
    first, second = np.trim_zeros(first, "b"), np.trim_zeros(second, "b")
    if not len(first) or not len(second):
        return np.zeros(1)  # all of one of them lies beyond what is looked at
    if min(len(first), len(second)) <= _SHORT:
        return np.convolve(first, second)
    length = len(first) + len(second) - 1
    size = 1 << (length - 1).bit_length()
    product = np.fft.irfft(np.fft.rfft(first, size) * np.fft.rfft(second, size), size)[:length]
    return np.maximum(product, 0.0)


def _cut(tokens: Probabilities, most: int) -> Probabilities:
    if len(tokens) <= most + 1:
        return tokens
    kept = tokens[: most + 1].copy()
    kept[most] += tokens[most + 1 :].sum()
    return kept


def _scaled(weights: Probabilities) -> Probabilities:
    scaled: Probabilities = weights / weights.sum()
    return scaled


def _phi(z: float) -> float:
    return (1 + erf(z / sqrt(2))) / 2


def _phis(z: Probabilities) -> Probabilities:
    return np.fromiter(map(_phi, z.tolist()), np.float64, len(z))
