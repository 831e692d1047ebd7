"""What libllama says that it allocates for a context."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.engines.llama.library import Library
from headrace.engines.llama.weights import Weights
from headrace.kv.libllama_memory import ContextShape

_BUFFER = re.compile(r"(?:KV|RS|DSV4 \w+ state) buffer size =\s*([\d.]+) MiB")
_CELLS = re.compile(r"llama_kv_cache: size = .*\(\s*(\d+) cells,\s*(\d+) layers,\s*\d+/(\d+) seqs\)")
_MIB = 1 << 20
_LOG_STEP_BYTES = 0.01 * _MIB


@dataclass(frozen=True)
class Logged:
    """Bytes of all KV and state buffers, and (cells, layers, streams) of every cache that has layers."""

    total_bytes: float
    tolerance_bytes: float
    """The log has two decimals of a MiB per buffer: each figure is off by half of that at most."""
    caches: list[tuple[int, int, int]]


def read_log(text: str) -> Logged:
    """From everything that libllama logged while it created a context."""
    buffers = [float(found) for found in _BUFFER.findall(text)]
    caches = [(int(cells), int(layers), int(streams)) for cells, layers, streams in _CELLS.findall(text)]
    return Logged(
        sum(buffers) * _MIB, _LOG_STEP_BYTES / 2 * len(buffers) + 1, [cache for cache in caches if cache[1] > 0]
    )


@contextmanager
def created(
    library: Library, weights: Weights, context_tokens: int, streams: int, shape: ContextShape
) -> Iterator[tuple[Any, Logged]]:
    """A context of this shape, closed at the end, and what was logged. The handle is None when libllama refuses."""
    params = library.api.llama_context_default_params()
    params.n_ctx = context_tokens * streams
    params.n_seq_max = streams
    params.n_batch = params.n_ubatch = shape.micro_batch_tokens
    params.kv_unified = False
    params.swa_full = shape.full_windows
    params.type_k = params.type_v = shape.types.kv.ggml_type
    pieces: list[str] = []
    with library.listening(pieces.append):
        handle = library.api.llama_init_from_model(weights.handle, params)
    try:
        yield handle, read_log("".join(pieces))
    finally:
        if handle:
            library.api.llama_free(handle)
