"""Bytes sorted by their place in a number.

Of KV entries the high bytes (sign and exponent) resemble one another, the low ones are noise. A general compressor
finds that only when the high bytes stand together: ``split`` puts all first bytes of a run's entries before all second
ones and so on, ``join`` undoes it. A run is a part of the data with entries of one width; an incomplete entry at its
end stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Run:
    """``length`` bytes of entries of ``width`` bytes each."""

    length: int
    width: int


def split(data: Bytes, runs: tuple[Run, ...]) -> Bytes:
    """The planes of each run, one run after the other. ``runs`` must cover ``data``: raises ValueError."""
    _check(data, runs)
    out = np.empty_like(data)
    for start, run in _starts(runs):
        rows = run.length // run.width
        whole = rows * run.width
        out[start : start + whole].reshape(run.width, rows)[:] = data[start : start + whole].reshape(rows, run.width).T
        out[start + whole : start + run.length] = data[start + whole : start + run.length]
    return out


def join(data: Bytes, runs: tuple[Run, ...]) -> Bytes:
    """What ``split`` was given. ``runs`` must cover ``data``: raises ValueError."""
    _check(data, runs)
    out = np.empty_like(data)
    for start, run in _starts(runs):
        rows = run.length // run.width
        whole = rows * run.width
        out[start : start + whole].reshape(rows, run.width)[:] = data[start : start + whole].reshape(run.width, rows).T
        out[start + whole : start + run.length] = data[start + whole : start + run.length]
    return out


def _check(data: Bytes, runs: tuple[Run, ...]) -> None:
    if any([run.width < 1 or run.length < 0 for run in runs]) or sum([run.length for run in runs]) != len(data):
        raise ValueError(f"runs {runs} do not cover {len(data)} bytes")


def _starts(runs: tuple[Run, ...]) -> list[tuple[int, Run]]:
    starts, at = [], 0
    for run in runs:
        starts.append((at, run))
        at += run.length
    return starts
