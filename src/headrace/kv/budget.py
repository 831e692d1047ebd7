"""From a memory budget to bands: how many sequences of which length fit.

Pure arithmetic. Formula for attention with per-head keys and values (MHA, GQA, MQA): bytes per token =
layers * kv_heads * (key_length + value_length) * bytes per entry, from the model's own metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.errors import ConfigError
from headrace.kv.precision import scaled_bytes
from headrace.scheduling.bands import Band

F16_BYTES = 2
ALLOCATION_TOKENS = 256
"""libllama rounds the cells of a stream up to a multiple of this."""
MIN_CONTEXT_TOKENS = ALLOCATION_TOKENS


def kv_bytes_per_token(
    layers: int, kv_heads: int, key_length: int, value_length: int, entry_bytes: float = F16_BYTES
) -> int:
    """KV bytes that one token of one sequence takes over all layers."""
    return int(layers * kv_heads * (key_length + value_length) * entry_bytes)


@dataclass(frozen=True, slots=True)
class BandBudget:
    """Bands that fit a budget, and in words what had to give way (empty when nothing had). ``bytes_per_token`` is at
    F16; a band's own follows from its precision (``band_token_bytes``)."""

    bands: tuple[Band, ...]
    bytes_per_token: int
    budget_bytes: int
    reductions: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """KV bytes once every band's context exists."""
        return sum(self.band_bytes(index) for index in range(len(self.bands)))

    def band_bytes(self, index: int) -> int:
        """KV bytes of one band's context."""
        return _band_tokens(self.bands[index]) * self.band_token_bytes(index)

    def band_token_bytes(self, index: int) -> int:
        """KV bytes of one token in a band."""
        return scaled_bytes(self.bytes_per_token, self.bands[index].kv_dtype)


def _band_tokens(band: Band) -> int:
    """KV cells that libllama allocates for a band."""
    return -(-band.max_context_tokens // ALLOCATION_TOKENS) * ALLOCATION_TOKENS * band.max_sequences


def fit_bands(wanted: Sequence[Band], bytes_per_token: int, budget_bytes: int, context_train_tokens: int) -> BandBudget:
    """The wanted bands, cut to the model's trained context and to the budget.

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

    def size(band: Band) -> int:
        return _band_tokens(band) * scaled_bytes(bytes_per_token, band.kv_dtype)

    while sum(map(size, bands)) > budget_bytes:
        shrinkable = [i for i, band in enumerate(bands) if band.max_sequences > 1]
        if shrinkable:
            largest = max(shrinkable, key=lambda i: size(bands[i]))
            bands[largest] = replace(bands[largest], max_sequences=bands[largest].max_sequences - 1)
        elif len(bands) > 1:
            gone = bands.pop()
            reductions.append(f"no band up to {gone.max_context_tokens} tokens: one sequence does not fit")
        else:
            token_bytes = scaled_bytes(bytes_per_token, bands[0].kv_dtype)
            tokens = budget_bytes // token_bytes
            if tokens < MIN_CONTEXT_TOKENS:
                raise ConfigError(
                    f"{budget_bytes} bytes hold {tokens} tokens of KV memory ({token_bytes} bytes each); "
                    f"at least {MIN_CONTEXT_TOKENS} are needed",
                    where="engine.memory_budget_bytes",
                )
            tokens -= tokens % ALLOCATION_TOKENS
            reductions.append(f"context cut from {bands[0].max_context_tokens} to {tokens} tokens")
            bands[0] = replace(bands[0], max_context_tokens=tokens, max_sequences=1)
    for before, after in zip(start, bands, strict=False):
        if after.max_sequences < before.max_sequences:
            reductions.append(
                f"band up to {after.max_context_tokens} tokens: {after.max_sequences} sequences at once "
                f"instead of {before.max_sequences}"
            )
    return BandBudget(tuple(bands), bytes_per_token, budget_bytes, tuple(reductions))
