"""What attention costs, from the facts of a model's ``config.json`` and its KV layout.

A term is a set of like layers whose tokens attend to stored rows: to all, to the last of a window, to one per group,
to the best that an indexer chose. Time follows from multiply-adds per (token, row) and from the rows' bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from headrace.kv.entry_types import row_bytes
from headrace.kv.layout import Cache, CacheType, KvLayout
from headrace.plan.fields import Fields
from headrace.simulate.hardware.matrices import head_entries

_SEARCHED_RATIO: Final = 4
"""DeepSeek-V4's indexer searches groups of 4; groups of 128 are attended to all."""


class Attended(Struct, frozen=True):
    """``layers`` layers with a row for every ``every`` tokens, of which at most ``most`` are attended to.

    ``decode_flops`` and ``prefill_flops``: of one token and one row, all heads together (they differ where latents
    are attended to as they are, or expanded first). ``row_bytes``: of one row in one layer. ``heads``: how many ranks
    can share the arithmetic, ``row_parts`` how many the rows.
    """

    name: str
    layers: int
    decode_flops: float
    prefill_flops: float
    row_bytes: float
    heads: int
    row_parts: int
    every: int = 1
    most: float = math.inf

    def rows(self, context_tokens: float) -> float:
        """Rows that a token with so many tokens before it (itself included) attends to."""
        return min(context_tokens / self.every, self.most)

    def pairs(self, done: int, tokens: int) -> float:
        """(token, row) of a chunk, summed."""
        last = done + tokens
        knee = self.most * self.every  # from this token on each attends to ``most``
        if last <= knee:
            return (_triangle(last) - _triangle(done)) / self.every
        if done >= knee:
            return tokens * self.most
        turn = math.floor(knee)
        return (_triangle(turn) - _triangle(done)) / self.every + (last - turn) * self.most

    def rows_read(self, done: int, tokens: int) -> float:
        """Rows that a chunk reads at least once: those before it and its own, of a window those in reach. What an
        indexer chooses differs from token to token, so that all are read."""
        total = (done + tokens) / self.every
        return total if self.most == math.inf else min(total, self.most + tokens / self.every)


def attended_of(config: Mapping[str, object], layout: KvLayout, types: CacheType, source: str) -> tuple[Attended, ...]:
    """The terms of a model. Raises ModelError for facts that are missing."""
    fields = Fields(source, config)
    heads = fields.whole("num_attention_heads")
    chosen = fields.whole("index_topk") if fields.has("index_topk") else None
    if fields.has("compress_ratios"):
        flops, kv_heads = (4.0 * heads * fields.whole("head_dim"),) * 2, 1
    elif fields.has("kv_lora_rank"):
        rank, rotary = fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim")
        expanded = fields.whole("qk_nope_head_dim") + rotary + fields.whole("v_head_dim")
        flops, kv_heads = (2.0 * heads * (2 * rank + rotary), 2.0 * heads * expanded), 1
    else:
        head = head_entries(fields, fields.one_of(("hidden_size",)))
        flops, kv_heads = (4.0 * heads * head,) * 2, fields.whole("num_key_value_heads", default=heads)
    return tuple([_term(fields, cache, types, flops, heads, kv_heads, chosen) for cache in layout.caches])


def _term(
    fields: Fields,
    cache: Cache,
    types: CacheType,
    flops: tuple[float, float],
    heads: int,
    row_parts: int,
    chosen: int | None,
) -> Attended:
    size = sum([row_bytes(row, types.index if row.form == "index" else types.kv) for row in cache.rows])
    if cache.rows[0].form == "index":  # scores of all rows, by heads of its own; each rank computes all of them
        own = 2.0 * fields.whole("index_n_heads") * fields.whole("index_head_dim")
        return Attended(f"{cache.name}, searched", cache.layers, own, own, size, 1, 1, cache.every)
    most = math.inf
    if cache.window_tokens is not None:
        most = cache.window_tokens / cache.every
    elif chosen is not None and cache.every <= _SEARCHED_RATIO:
        most = chosen
    return Attended(cache.name, cache.layers, *flops, size, heads, row_parts, cache.every, most)


def _triangle(tokens: int) -> float:
    return tokens * (tokens + 1) / 2
