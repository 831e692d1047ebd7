"""Which rows share a forward pass: what libllama makes of a batch, and which holes are worth filling.

With one KV stream per sequence, libllama computes tokens together only when their streams are consecutive, and as
many tokens of each as of the shortest one among them (``split_equal`` in its ``llama-batch.cpp``). A hole between two
decoding streams thus costs a whole pass. Pure: streams and predicted times in, groups out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.scheduling.step import StepTimes

ALONE_TOKENS = 64
"""A chunk of so many tokens gains nothing from company (the same tokens/s were measured for chunks of 64 to 512), and
the more urgent one of two would only wait for the other."""

TILE_ROWS = 4
"""libllama's matrix kernels work on so many rows at once and the rest one by one: 13, 14 and 15 rows of SmolLM2 were
measured at 35, 37 and 38 ms, 16 at 30."""


@dataclass(frozen=True, slots=True)
class Run:
    """Decoding streams of one forward pass, ascending and without a hole once the idle streams in ``padding`` take
    part in it."""

    streams: tuple[int, ...]
    padding: tuple[int, ...] = ()


def consecutive(streams: Sequence[int]) -> list[tuple[int, ...]]:
    """Ascending ``streams`` cut where they are not consecutive: what libllama computes together."""
    runs: list[list[int]] = []
    for stream in streams:
        if runs and stream == runs[-1][-1] + 1:
            runs[-1].append(stream)
        else:
            runs.append([stream])
    return [tuple(run) for run in runs]


def decode_runs(
    contexts: Mapping[int, int], fillable: Mapping[int, int], times: StepTimes, *, most_rows: int
) -> tuple[Run, ...]:
    """The passes that decode the streams in ``contexts`` (stream -> its KV cells, ascending) in the shortest predicted
    time. Streams in ``fillable`` (stream -> its KV cells) may take a padding row; a pass has at most ``most_rows``.

    Among all ways to join neighbouring runs, by dynamic programming over the runs: the best way to compute the first
    n of them is the best one for some m < n and one pass for the rest. Quadratic in the number of runs.
    """
    runs = consecutive(list(contexts))
    best_s = [0.0]
    best_start = [0]
    for last in range(len(runs)):
        choice_s, choice_start = float("inf"), last
        rows = cells = 0
        for first in range(last, -1, -1):
            if first < last:
                gap = range(runs[first][-1] + 1, runs[first + 1][0])
                if not all(stream in fillable for stream in gap):
                    break
                rows += len(gap)
                cells += sum([fillable[stream] for stream in gap])
            rows += len(runs[first])
            cells += sum([contexts[stream] for stream in runs[first]])
            if rows > most_rows and first < last:
                break
            total_s = best_s[first] + times.call_s(rows, cells)
            if total_s < choice_s:
                choice_s, choice_start = total_s, first
        best_s.append(choice_s)
        best_start.append(choice_start)
    joined: list[Run] = []
    end = len(runs)
    while end > 0:
        start = best_start[end]
        streams = tuple([stream for run in runs[start:end] for stream in run])
        taken = frozenset(streams)
        padding = tuple([stream for stream in range(streams[0], streams[-1] + 1) if stream not in taken])
        joined.append(Run(streams, padding))
        end = start
    return tuple(reversed(joined))


def widening(run: Run, max_sequences: int) -> tuple[int, ...]:
    """Streams after ``run`` that would bring its rows to a multiple of ``TILE_ROWS``; none when it is one, is too
    small to gain, or the band ends before."""
    rows = len(run.streams) + len(run.padding)
    missing = -rows % TILE_ROWS
    last = max(run.streams[-1], *run.padding, -1)
    if rows <= TILE_ROWS or not missing or last + missing >= max_sequences:
        return ()
    return tuple(range(last + 1, last + 1 + missing))


class _PassesCost:
    """Times by which the fewest passes are best."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return 1.0

    def move_s(self, tokens: int, band: int) -> float:
        return 0.0


def trial_runs(
    chosen: tuple[Run, ...],
    contexts: Mapping[int, int],
    fillable: Mapping[int, int],
    times: StepTimes,
    *,
    most_rows: int,
    at_most: float,
) -> tuple[Run, ...]:
    """The way with the fewest passes, worth trying once although ``chosen`` is predicted to be faster, while it is
    predicted to take at most ``at_most`` times as long; else ``chosen``. A size of batch that is never computed is
    never learned, and a prediction that is too high would keep it so for ever."""
    fewest = decode_runs(contexts, fillable, _PassesCost(), most_rows=most_rows)
    if len(fewest) == len(chosen):
        return chosen
    cells = {**contexts, **fillable}

    def predicted_s(runs: tuple[Run, ...]) -> float:
        return sum(
            [
                times.call_s(len(rows), sum([cells[stream] for stream in rows]))
                for rows in [(*run.streams, *run.padding) for run in runs]
            ]
        )

    return fewest if predicted_s(fewest) <= at_most * predicted_s(chosen) else chosen


def prefill_groups(chunks: Sequence[tuple[int, int]], micro_batch_tokens: int) -> list[list[tuple[int, int]]]:
    """The passes that compute ``chunks`` ((stream, tokens), ascending streams), each as (stream, tokens) pairs.

    Chunks below ``ALONE_TOKENS`` on consecutive streams share passes as libllama forms them: the same number of
    tokens of each, what is left of the longer ones in further passes.
    """
    left = [(stream, tokens) for stream, tokens in chunks if tokens > 0]
    groups: list[list[tuple[int, int]]] = []
    while left:
        together = [left[0]]
        for entry in left[1:]:
            if (
                max(entry[1], together[-1][1]) >= ALONE_TOKENS
                or entry[0] != together[-1][0] + 1
                or len(together) == micro_batch_tokens
            ):
                break
            together.append(entry)
        tokens = min(min([entry[1] for entry in together]), micro_batch_tokens // len(together))
        groups.append([(stream, tokens) for stream, _ in together])
        rest = [(stream, count - tokens) for stream, count in together if count > tokens]
        left = rest + left[len(together) :]
    return groups
