"""Recurrent layers of a ``config.json``: which they are, and what they keep per sequence, counted in F32."""

from __future__ import annotations

from headrace.errors import ModelError
from headrace.kv.layout import State
from headrace.plan.described import UnknownLayout
from headrace.plan.fields import MOST_LAYERS, Fields

_RECURRENT_NAMES = {"linear_attention", "mamba", "conv", "recurrent"}
_ATTENDING_NAMES = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
_GATED_DELTA = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
_PURE = {"mamba", "mamba2", "falcon_mamba"}


def kinds_of_layers(fields: Fields, kind: str, layers: int) -> tuple[list[int], list[int]]:
    """The recurrent layers and the attending ones (a layer may be both, or neither). Raises ModelError."""
    every = list(range(layers))
    if kind in _PURE:
        return every, []
    if kind == "falcon_h1":
        return every, every
    if kind == "nemotron_h":
        pattern = str(fields.raw("hybrid_override_pattern") or "")
        if len(pattern) < layers:
            raise ModelError(f"{fields.source}: hybrid_override_pattern must have a letter for each of {layers} layers")
        return [i for i in every if pattern[i] == "M"], [i for i in every if pattern[i] == "*"]
    if kind == "jamba":
        period, offset = fields.whole("attn_layer_period", most=MOST_LAYERS), fields.whole("attn_layer_offset", least=0)
        attending = [i for i in every if i % period == offset]
        return [i for i in every if i % period != offset], attending
    if kind == "kimi_linear":
        return _kimi(fields, every)
    if fields.has("layer_types"):
        names = fields.texts("layer_types", layers)
        for name in names:
            if name not in _RECURRENT_NAMES | _ATTENDING_NAMES:
                raise UnknownLayout(f"{fields.source}: layers of the type {name!r} are not known")
        return [i for i in every if names[i] in _RECURRENT_NAMES], [i for i in every if names[i] in _ATTENDING_NAMES]
    if kind in _GATED_DELTA:
        interval = fields.whole("full_attention_interval", most=MOST_LAYERS, default=4)
        return [i for i in every if (i + 1) % interval], [i for i in every if (i + 1) % interval == 0]
    for key in ("mamba_d_state", "ssm_state_size", "linear_key_head_dim", "linear_attn_config", "conv_L_cache"):
        if fields.has(key):
            raise UnknownLayout(f"{fields.source}: {key} says that a {kind} has recurrent layers, but not which")
    return [], every


def states_of(fields: Fields, kind: str, layers: int) -> list[State]:
    """What ``layers`` recurrent layers keep. Raises ModelError, UnknownLayout."""
    if kind in _GATED_DELTA:
        keys = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
        values = fields.whole("linear_num_value_heads") * fields.whole("linear_value_head_dim")
        kernel = fields.whole("linear_conv_kernel_dim")
        return _pair(layers, (kernel - 1) * (2 * keys + values), values * fields.whole("linear_key_head_dim"))
    if kind in ("mamba", "falcon_mamba"):
        width = fields.one_of(("hidden_size", "d_model"))
        inner = fields.whole("intermediate_size", default=fields.whole("expand", default=2) * width)
        kernel = fields.whole("conv_kernel", default=4)
        return _pair(layers, (kernel - 1) * inner, inner * fields.one_of(("state_size", "d_state")))
    if kind == "mamba2":
        inner = fields.whole("num_heads") * fields.whole("head_dim")
        return _ssm(layers, inner, fields.whole("state_size"), fields.whole("n_groups"), fields.whole("conv_kernel"))
    if kind == "nemotron_h":
        inner = fields.whole("mamba_num_heads") * fields.whole("mamba_head_dim")
        groups, kernel = fields.whole("n_groups"), fields.whole("conv_kernel")
        return _ssm(layers, inner, fields.whole("ssm_state_size"), groups, kernel)
    if kind == "jamba":
        inner, kernel = fields.whole("mamba_expand") * fields.whole("hidden_size"), fields.whole("mamba_d_conv")
        return _pair(layers, (kernel - 1) * inner, inner * fields.whole("mamba_d_state"))
    if kind == "falcon_h1":
        inner, groups = fields.whole("mamba_d_ssm"), fields.whole("mamba_n_groups")
        return _ssm(layers, inner, fields.whole("mamba_d_state"), groups, fields.whole("mamba_d_conv"))
    if kind == "granitemoehybrid":
        inner, groups = fields.whole("mamba_n_heads") * fields.whole("mamba_d_head"), fields.whole("mamba_n_groups")
        return _ssm(layers, inner, fields.whole("mamba_d_state"), groups, fields.whole("mamba_d_conv"))
    if kind == "kimi_linear":
        linear = _linear(fields)
        width = linear.whole("num_heads") * linear.whole("head_dim")
        kernel = linear.whole("short_conv_kernel_size", default=4)
        return _pair(layers, 3 * (kernel - 1) * width, width * linear.whole("head_dim"))
    if kind in ("lfm2", "lfm2_moe"):
        return [State("convolution", layers, fields.whole("hidden_size") * (fields.whole("conv_L_cache") - 1))]
    raise UnknownLayout(f"{fields.source}: what the recurrent layers of a {kind} keep is not known")


def _pair(layers: int, convolution: int, state: int) -> list[State]:
    return [State("convolution", layers, convolution), State("recurrent state", layers, state)]


def _ssm(layers: int, inner: int, state: int, groups: int, kernel: int) -> list[State]:
    return _pair(layers, (kernel - 1) * (inner + 2 * groups * state), inner * state)


def _linear(fields: Fields) -> Fields:
    nested = fields.raw("linear_attn_config")
    if not isinstance(nested, dict):
        raise ModelError(f"{fields.source}: linear_attn_config is missing")
    return Fields(f"{fields.source}: linear_attn_config", nested)


def _kimi(fields: Fields, every: list[int]) -> tuple[list[int], list[int]]:
    listed = _linear(fields).raw("full_attn_layers")
    if not isinstance(listed, list):
        raise ModelError(f"{fields.source}: linear_attn_config: full_attn_layers is missing")
    attending = {number - 1 for number in listed if isinstance(number, int)}  # counted from 1 there
    return [i for i in every if i not in attending], [i for i in every if i in attending]
