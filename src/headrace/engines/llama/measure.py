"""A short measurement of this machine, so that ``serve`` can say which lane targets it can meet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from headrace.engines.llama.context import Context
from headrace.messages.engine import SelfMeasurement

_SHORT_TOKENS = 16
_LONG_TOKENS = 256
_DECODE_STEPS = 16
_REPEATS = 3
_LONG_S = 0.5
_ONE_BY_ONE_MARGIN = 1.05  # a tie goes to separate calls: each output is sent on no later


def measure(context: Context, vocab_size: int, *, clock: Callable[[], float] = time.perf_counter) -> SelfMeasurement:
    """Time a short and a long prefill and single-stream decode steps on an idle, empty context.

    The two prefills give a line, duration = overhead + tokens / rate. Takes well under a second for a small
    model, and about ``_LONG_S`` each for prefill and decode of a large one. The stream is left empty. Raises
    EngineError.
    """
    _prefill(context, _SHORT_TOKENS, vocab_size)  # warms caches and the thread pool
    # The smallest of a few: what the machine can do, not what a passing neighbour left of it.
    short_s = min(_timed_prefill(context, _SHORT_TOKENS, vocab_size, clock) for _ in range(_REPEATS))
    room = context.band.max_context_tokens - _DECODE_STEPS
    affordable = max(2 * _SHORT_TOKENS, int(_SHORT_TOKENS * _LONG_S / short_s))
    long_tokens = min(_LONG_TOKENS, context.capacity_tokens, room, affordable)
    long_s = _timed_prefill(context, long_tokens, vocab_size, clock)
    steps_s: list[float] = []
    while len(steps_s) < _DECODE_STEPS and sum(steps_s) < _LONG_S:
        steps_s.append(_timed_decode(context, long_tokens + len(steps_s), clock))
    decode_s = statistics.median(steps_s)
    context.clear_stream(0)
    slope_s = max(1e-9, (long_s - short_s) / max(1, long_tokens - _SHORT_TOKENS))
    return SelfMeasurement(
        prefill_tokens_per_s=1 / slope_s,
        decode_tokens_per_s=1 / decode_s,
        step_overhead_s=max(0.0, short_s - slope_s * _SHORT_TOKENS),
    )


def one_by_one_limit(context: Context, vocab_size: int, *, clock: Callable[[], float] = time.perf_counter) -> int:
    """Up to how many decoding sequences one thread computes faster one by one than in one call; 1 for none.

    libllama's kernels for a few rows can be slower than as many calls of its kernel for one row: on an
    AVX-512 machine two sequences took 24 ms together and 12 ms in turns, eight 45 ms either way. Streams are
    left empty. Not measured (1) where a single step takes so long that measuring would delay the start.
    """
    threads = context.threads
    context.set_threads(1)
    try:
        _timed_batch(context, 1, clock)
        single_s = min(_timed_batch(context, 1, clock) for _ in range(_REPEATS))
        limit = 1
        for count in (2, 4, 8):
            if count > context.band.max_sequences or count * single_s > _LONG_S / 4:
                break
            together_s = min(_timed_batch(context, count, clock) for _ in range(_REPEATS))
            if count * single_s > together_s * _ONE_BY_ONE_MARGIN:
                break
            limit = count
        return limit
    finally:
        context.set_threads(threads)


def _timed_batch(context: Context, count: int, clock: Callable[[], float]) -> float:
    """One call with a first token of ``count`` streams."""
    context.batch.clear()
    for stream in range(count):
        context.batch.add_one(1 + stream, 0, stream)
    started_s = clock()
    context.decode()
    elapsed_s = clock() - started_s
    for stream in range(count):
        context.clear_stream(stream)
    return elapsed_s


def _timed_decode(context: Context, position: int, clock: Callable[[], float]) -> float:
    started_s = clock()
    context.batch.clear()
    context.batch.add_one(position % 256, position, 0)
    context.decode()
    context.logits(0)
    return clock() - started_s


def _timed_prefill(context: Context, count: int, vocab_size: int, clock: Callable[[], float]) -> float:
    started_s = clock()
    _prefill(context, count, vocab_size)
    return clock() - started_s


def _prefill(context: Context, count: int, vocab_size: int) -> None:
    context.clear_stream(0)
    context.batch.clear()
    tokens = [(7 * index + 11) % vocab_size for index in range(count)]
    last = context.batch.add_chunk(tokens, 0, 0, last_output=True, all_outputs=False)
    context.decode()
    context.logits(last)
