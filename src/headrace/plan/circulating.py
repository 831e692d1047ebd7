"""Two formulas in circulation, computed as they are written, to show how far they are from the layout's answer.

1. ``2*n_layers*d_model*n_ctx*batch*dtype``: KV bytes if every attention head had keys and values of its own in every
   layer, for every token.
2. ``max_num_seqs = int(gpu_mem*0.8/(2*model_size*precision))``: a number of sequences without a length in it.
"""

from __future__ import annotations

from fractions import Fraction

from headrace.kv.entry_types import EntryType


def multi_head_bytes_per_token(layers: int, hidden_entries: int, kind: EntryType) -> Fraction:
    """Formula 1 for one token; ``dtype`` is what an entry takes on average."""
    return 2 * layers * hidden_entries * Fraction(kind.block_bytes, kind.block_entries)


def multi_head_sequences(memory_bytes: int, bytes_per_token: Fraction, context_tokens: int) -> int:
    """Formula 1 solved for ``batch``."""
    return int(memory_bytes / (bytes_per_token * context_tokens))


def memory_over_weights(gpu_bytes: int, parameters: int, bytes_per_parameter: float) -> int:
    """Formula 2. Both memories in the same unit."""
    return int(gpu_bytes * 0.8 / (2 * parameters * bytes_per_parameter))
