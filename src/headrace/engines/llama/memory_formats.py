"""How the installed libllama keeps keys and values at each precision: found out by looking, not assumed.

Before libllama quantises keys and values it may rotate them (``kv.quantise``), depending on its version, the model's
head size and ``LLAMA_ATTN_ROT_DISABLE``; whether V is transposed depends on flash attention. So a few tokens are
computed in two small contexts, F16 and the other precision. The first layer's keys and values come from the tokens
alone and are the same numbers in both: the rotation that turns one into the other is the one in use.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from headrace.engines.llama.context import Context
from headrace.engines.llama.convert_state import MemoryFormat, StreamRows, read_rows
from headrace.engines.llama.library import Library
from headrace.engines.llama.weights import Weights
from headrace.errors import EngineError
from headrace.kv.precision import BLOCK_NUMBERS, KvDtype
from headrace.kv.quantise import Bytes, decoded, encoded, rotated
from headrace.scheduling.bands import Band

_TOKENS: Final = 16
_CELLS: Final = 256
_SAME_SHARE: Final = 0.9
"""Of bytes. F16 has already rounded the numbers, which changes about 1 % of them; a wrong rotation nearly all."""


class MemoryFormats:
    """Formats by precision, each looked up once. Not thread-safe."""

    def __init__(self, library: Library, weights: Weights) -> None:
        self._library = library
        self._weights = weights
        self._rows: dict[KvDtype, StreamRows | None] = {}
        self._formats: dict[KvDtype, MemoryFormat | None] = {}

    def of(self, dtype: KvDtype) -> MemoryFormat | None:
        """The format of contexts of ``dtype``; None when it is not one that can be converted. Raises EngineError when
        libllama cannot keep this model's KV at ``dtype`` at all."""
        if dtype not in self._formats:
            self._formats[dtype] = self._find(dtype)
        return self._formats[dtype]

    def _find(self, dtype: KvDtype) -> MemoryFormat | None:
        rows = self._look(dtype)
        if rows is None:
            return None
        if dtype == "f16":
            return MemoryFormat(dtype, rows.v_transposed)
        plain = self._look("f16")
        if plain is None:
            return None
        k, v = _rotation(plain.k[0], rows.k[0], dtype), _rotation(plain.v[0], rows.v[0], dtype)
        if k is None or v is None:
            return None
        return MemoryFormat(dtype, rows.v_transposed, k, v)

    def _look(self, dtype: KvDtype) -> StreamRows | None:
        if dtype not in self._rows:
            self._rows[dtype] = self._computed(dtype)
        return self._rows[dtype]

    def _computed(self, dtype: KvDtype) -> StreamRows | None:
        context = Context(self._library, self._weights, Band(_CELLS, 1, dtype), step_tokens=_TOKENS, threads=1)
        try:
            tokens = [(7 * index + 11) % self._weights.vocab_size for index in range(_TOKENS)]
            context.batch.clear()
            context.batch.add_chunk(tokens, 0, 0, last_output=True, all_outputs=False)
            context.decode()
            rows = read_rows(context.save_stream(0), stream=0, streams=1, tokens=_TOKENS)
        finally:
            context.close()
        return rows if rows is not None and rows.k else None


def _rotation(plain: Bytes, stored: Bytes, dtype: KvDtype) -> int | None:
    """How many numbers are rotated together between F16 rows and ``stored`` ones; None when no rotation explains
    them."""
    numbers = decoded(plain, "f16")
    width = numbers.shape[1]
    if width % BLOCK_NUMBERS:
        return None
    sizes = [0]
    size = BLOCK_NUMBERS
    while width % size == 0:
        sizes.append(size)
        size *= 2
    for size in sizes:
        expected = encoded(rotated(numbers, size), dtype)
        if expected.shape == stored.shape and np.mean(expected == stored) >= _SAME_SHARE:
            return size
    return None


def check_usable(formats: MemoryFormats, dtype: KvDtype) -> str | None:
    """None when libllama can keep this model's KV at ``dtype``; else why not."""
    try:
        formats.of(dtype)
    except EngineError as error:
        return str(error)
    return None
