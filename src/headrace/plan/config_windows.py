"""Which layers of a ``config.json`` keep only a window, and of how many tokens."""

from __future__ import annotations

from headrace.plan.described import UnknownLayout
from headrace.plan.fields import MOST_LAYERS, MOST_TOKENS, Fields

_WINDOWED = {"sliding_attention", "chunked_attention"}
_PERIODS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2, "exaone4": 4}
"""One layer of so many is full, the last: where the file has neither ``layer_types`` nor a pattern."""
_ALL_LAYERS = {"mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
_SWITCHED = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
"""Only with ``use_sliding_window``, and only from layer ``max_window_layers`` on."""


def windows_of(fields: Fields, kind: str, layers: int) -> tuple[int, list[bool]]:
    """The window in tokens (0: none), and for every layer whether it has it. Raises ModelError, UnknownLayout."""
    if kind == "llama4_text":
        return _llama4(fields, layers)
    tokens = fields.whole("sliding_window", least=0, most=MOST_TOKENS, default=0)
    if not tokens or fields.raw("use_sliding_window") is False:
        return 0, []
    if fields.has("layer_types"):
        return tokens, [name in _WINDOWED for name in fields.texts("layer_types", layers)]
    if kind in _ALL_LAYERS:
        return tokens, [True] * layers
    if kind in _SWITCHED:
        if fields.raw("use_sliding_window") is not True:
            return 0, []
        full = fields.whole("max_window_layers", least=0, most=MOST_LAYERS, default=layers)
        return tokens, [layer >= full for layer in range(layers)]
    period = fields.whole("sliding_window_pattern", most=MOST_LAYERS, default=_PERIODS.get(kind, MOST_LAYERS + 1))
    if period > MOST_LAYERS:
        raise UnknownLayout(
            f"{fields.source}: sliding_window is {tokens}, and which layers of a {kind} have it is not known; "
            "layer_types would say it"
        )
    return tokens, [(layer + 1) % period != 0 for layer in range(layers)]


def _llama4(fields: Fields, layers: int) -> tuple[int, list[bool]]:
    tokens = fields.whole("attention_chunk_size", least=0, most=MOST_TOKENS, default=8192)
    if fields.has("layer_types"):
        return tokens, [name in _WINDOWED for name in fields.texts("layer_types", layers)]
    listed = fields.raw("no_rope_layers")
    if isinstance(listed, list) and listed:  # 1: with rotary positions, which is a chunked layer
        return tokens, [flag == 1 for flag in fields.wholes("no_rope_layers", layers, most=1)]
    return tokens, [(layer + 1) % 4 != 0 for layer in range(layers)]
