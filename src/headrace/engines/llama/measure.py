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


def measure(context: Context, vocab_size: int, *, clock: Callable[[], float] = time.perf_counter) -> SelfMeasurement:
    """Time a short and a long prefill and single-stream decode steps on an idle, empty context.

    The two prefills give a line, duration = overhead + tokens / rate. Takes well under a second for a small
    model. The stream is left empty. Raises EngineError.
    """
    _prefill(context, _SHORT_TOKENS, vocab_size)  # warms caches and the thread pool
    # The smallest of a few: what the machine can do, not what a passing neighbour left of it.
    short_s = min(_timed_prefill(context, _SHORT_TOKENS, vocab_size, clock) for _ in range(_REPEATS))
    room = context.band.max_context_tokens - _DECODE_STEPS
    long_tokens = min(_LONG_TOKENS, context.capacity_tokens, room)
    long_s = _timed_prefill(context, long_tokens, vocab_size, clock)
    steps_s: list[float] = []
    for step in range(_DECODE_STEPS):
        steps_s.append(_timed_decode(context, long_tokens + step, clock))
    decode_s = statistics.median(steps_s)
    context.clear_stream(0)
    slope_s = max(1e-9, (long_s - short_s) / max(1, long_tokens - _SHORT_TOKENS))
    return SelfMeasurement(
        prefill_tokens_per_s=1 / slope_s,
        decode_tokens_per_s=1 / decode_s,
        step_overhead_s=max(0.0, short_s - slope_s * _SHORT_TOKENS),
    )


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
