"""Step times for the virtual clock: tables of what was measured, each with its source."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

_TABLE_ROWS: Final = 2048


class MeasuredTimes:
    """``scheduling.step.StepTimes`` from points: milliseconds by rows, linear between them and beyond the last two,
    and so much for each token of context that a decode reads and each pair of a prefill (``cost.Call``). Copying a
    sequence's KV takes ``copy_s_per_token``.
    """

    def __init__(
        self,
        rows_ms: Sequence[tuple[int, float]],
        *,
        context_s: float,
        pair_s: float,
        copy_s_per_token: float,
        source: str,
    ) -> None:
        self.source = source
        self._context_s = context_s
        self._pair_s = pair_s
        self._copy_s_per_token = copy_s_per_token
        self._points = [(0, 0.0), *rows_ms]
        self._table_s = [self._between_s(rows) for rows in range(_TABLE_ROWS + 1)]

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        rows_s = self._table_s[rows] if rows <= _TABLE_ROWS else self._between_s(rows)
        return rows_s + self._context_s * context_tokens + self._pair_s * pairs

    def move_s(self, tokens: int, band: int) -> float:
        return self._copy_s_per_token * tokens

    def _between_s(self, rows: int) -> float:
        pairs = list(pairwise(self._points))
        (low, low_ms), (high, high_ms) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return (low_ms + (high_ms - low_ms) * (rows - low) / (high - low)) / 1000


class Scaled:
    """The same machine ``factor`` times as slow: what a policy believes when it is wrong, or a slower machine."""

    def __init__(self, times: MeasuredTimes, factor: float) -> None:
        self._times = times
        self._factor = factor

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return self._factor * self._times.call_s(rows, context_tokens, pairs)

    def move_s(self, tokens: int, band: int) -> float:
        return self._factor * self._times.move_s(tokens, band)


SMOLLM2_2_THREADS: Final = MeasuredTimes(
    [
        (1, 5.7), (2, 14.0), (3, 17.6), (4, 19.9), (8, 23.4), (16, 27.8), (32, 49.8), (64, 75.0), (128, 136.0),
        (256, 216.0), (512, 430.0),
    ],
    context_s=3e-6,
    pair_s=2e-7,
    copy_s_per_token=1.8e-5,
    source="SmolLM2-135M Q8_0, libllama of llama-cpp-python 0.3.36 on CPU, 2 threads of a 2-core AVX2 machine: medians "
    "of single calls. Decode calls up to 32 rows and prefill chunks of the same rows agree within 1 %, so one curve "
    "holds for both; copying a stream of 1,900 tokens took 35 ms (DESIGN).",
)  # fmt: skip
