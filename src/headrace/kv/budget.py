"""From a memory budget to bands: how many sequences of which length fit.

Pure arithmetic. What a stream takes is computed elsewhere: ``kv/layout.py`` knows the model's layout,
``kv/libllama_memory.py`` what libllama allocates for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.errors import ConfigError
from headrace.kv.libllama_memory import ALLOCATION_TOKENS, padded
from headrace.kv.precision import KvDtype, scaled_bytes
from headrace.scheduling.bands import Band

MIN_CONTEXT_TOKENS = ALLOCATION_TOKENS
MOST_STORE_BYTES = 8 * 2**30

StreamBytes = Callable[[int, KvDtype], int]
"""Bytes of one stream of so many context tokens at a precision, as libllama allocates it; never falls with the
tokens."""


@dataclass(frozen=True, slots=True)
class BandBudget:
    """Bands that fit a budget, and in words what had to give way (empty when nothing had). ``bytes_per_token`` is at
    F16; a band's own follows from its precision (``band_token_bytes``)."""

    bands: tuple[Band, ...]
    bytes_per_token: int
    budget_bytes: int
    reductions: tuple[str, ...]
    stream_bytes: StreamBytes

    @property
    def total_bytes(self) -> int:
        """KV bytes once every band's context exists."""
        return sum(self.band_bytes(index) for index in range(len(self.bands)))

    def band_bytes(self, index: int) -> int:
        """KV bytes of one band's context."""
        band = self.bands[index]
        return self.stream_bytes(band.max_context_tokens, band.kv_dtype) * band.max_sequences

    def band_token_bytes(self, index: int) -> int:
        """KV bytes of one token in a band."""
        return scaled_bytes(self.bytes_per_token, self.bands[index].kv_dtype)

    @property
    def most_token_bytes(self) -> int:
        """KV bytes of one token in the band where it takes most."""
        return max(self.band_token_bytes(index) for index in range(len(self.bands)))


def fit_bands(
    wanted: Sequence[Band],
    bytes_per_token: int,
    budget_bytes: int,
    context_train_tokens: int,
    *,
    stream_bytes: StreamBytes | None = None,
) -> BandBudget:
    """The wanted bands, cut to the model's trained context and to the budget.

    ``stream_bytes`` says what a stream takes; without it, every token takes ``bytes_per_token`` and nothing else does.
    Bands beyond the model's context are dropped and the last one ends at it. While the sum is over budget,
    the band that takes most bytes gives up one sequence; when every band is down to one, the longest band
    goes. The shortest band keeps at least one sequence of ``MIN_CONTEXT_TOKENS``. Raises ConfigError when
    not even that fits.
    """
    reductions: list[str] = []
    bands: list[Band] = []
    longest = 0
    for band in wanted:
        if band.max_context_tokens > longest >= context_train_tokens:
            break
        longest = band.max_context_tokens
        bands.append(replace(band, max_context_tokens=min(longest, context_train_tokens)))
    start = list(bands)

    def linear(context_tokens: int, dtype: KvDtype) -> int:
        return padded(context_tokens) * scaled_bytes(bytes_per_token, dtype)

    stream = stream_bytes or linear

    def size(band: Band) -> int:
        return stream(band.max_context_tokens, band.kv_dtype) * band.max_sequences

    while sum(map(size, bands)) > budget_bytes:
        shrinkable = [i for i, band in enumerate(bands) if band.max_sequences > 1]
        if shrinkable:
            largest = max(shrinkable, key=lambda i: size(bands[i]))
            bands[largest] = replace(bands[largest], max_sequences=bands[largest].max_sequences - 1)
        elif len(bands) > 1:
            gone = bands.pop()
            reductions.append(f"no band up to {gone.max_context_tokens} tokens: one sequence does not fit")
        else:
            dtype = bands[0].kv_dtype
            tokens = _longest_context(stream, dtype, budget_bytes, bands[0].max_context_tokens)
            if tokens == 0:
                each = scaled_bytes(bytes_per_token, dtype)
                fixed = stream(MIN_CONTEXT_TOKENS, dtype) - MIN_CONTEXT_TOKENS * each
                held = max(0, budget_bytes - fixed) // max(1, each)
                and_more = f" and {fixed} per sequence" if fixed > 0 else ""
                raise ConfigError(
                    f"{budget_bytes} bytes hold {held} tokens of KV memory ({each} bytes each{and_more}); "
                    f"at least {MIN_CONTEXT_TOKENS} are needed",
                    where="engine.memory_budget_bytes",
                )
            reductions.append(f"context cut from {bands[0].max_context_tokens} to {tokens} tokens")
            bands[0] = replace(bands[0], max_context_tokens=tokens, max_sequences=1)
    for before, after in zip(start, bands, strict=False):
        if after.max_sequences < before.max_sequences:
            reductions.append(
                f"band up to {after.max_context_tokens} tokens: {after.max_sequences} sequences at once "
                f"instead of {before.max_sequences}"
            )
    return BandBudget(tuple(bands), bytes_per_token, budget_bytes, tuple(reductions), stream)


def default_store_bytes(free_bytes: int, bands_bytes: int) -> int:
    """What stored KV blocks (``kv.tiers``) may take of host memory where nothing is configured: a quarter of what bands
    leave of the ``free_bytes``, as parked KV takes a quarter of all, at most ``MOST_STORE_BYTES``."""
    return min(MOST_STORE_BYTES, max(0, free_bytes - bands_bytes) // 4)


def _longest_context(stream: StreamBytes, dtype: KvDtype, budget_bytes: int, most_tokens: int) -> int:
    """The most tokens, in whole allocations, of which one stream fits the budget; 0 when not even the least does."""
    low, high = 0, padded(most_tokens) // ALLOCATION_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if stream(middle * ALLOCATION_TOKENS, dtype) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low * ALLOCATION_TOKENS
