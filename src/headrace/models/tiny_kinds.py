"""Synthetic GGUFs of every kind of attention that libllama keeps KV memory for: random weights, tiny, fixed seed.

They are no models (``models/tiny.py``). They show what libllama allocates for each kind, against which
``headrace plan kv`` is held. Each kind is the smallest file of a real architecture: its metadata and its tensors as
the pinned libllama asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError
from headrace.models.tiny import NAME, add_tokenizer, make_tiny_gguf

_VOCAB = 320
_WIDTH = 128
_CONTEXT = 131_072

Metadata = dict[str, int | float | bool | list[int] | list[float] | list[bool]]


@dataclass(frozen=True, slots=True)
class _Parts:
    """An architecture's name, its metadata below that name, and its tensors: name -> shape, the row length first (as
    GGUF and libllama write shapes)."""

    architecture: str
    metadata: Metadata
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, layer: int, **shapes: tuple[int, ...]) -> None:
        """Tensors of one layer: ``attn_norm=(width,)``; two underscores stand for a dot."""
        for name, shape in shapes.items():
            self.tensors[f"blk.{layer}.{name.replace('__', '.')}.weight"] = shape


def kinds() -> tuple[str, ...]:
    """The names that ``make_tiny_kind`` knows."""
    return (*_LLAMA_KINDS, *_OTHER_KINDS)


def make_tiny_kind(kind: str, path: Path, *, seed: int = 0) -> Path:
    """Write the file of ``kind`` (whole or not at all) and return ``path``. Raises ModelError."""
    if kind in _LLAMA_KINDS:
        return make_tiny_gguf(path, heads=4, kv_heads=_LLAMA_KINDS[kind], vocab=_VOCAB, seed=seed)
    if kind not in _OTHER_KINDS:
        raise ModelError(f"unknown kind {kind!r}; known: {', '.join(kinds())}")
    try:
        import gguf
    except ImportError:
        raise ModelError("writing a GGUF needs the gguf package: pip install gguf") from None

    parts = _OTHER_KINDS[kind]()
    random = np.random.default_rng(seed)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(str(partial), parts.architecture)
        writer.add_name(NAME)
        writer.add_description(f"Random weights in the form of {parts.architecture}; its output is noise.")
        for key, value in parts.metadata.items():
            name = f"{parts.architecture}.{key}"
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, bool):
                writer.add_bool(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)
        add_tokenizer(writer, _VOCAB)
        for name, shape in parts.tensors.items():
            writer.add_tensor(name, _weights(random, name, shape))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def _weights(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if name.endswith("ssm_a"):
        return -np.ones(shape[::-1], np.float32)  # a state decays; with a positive rate it would grow without bound
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return random.standard_normal(shape[::-1], dtype=np.float32) / np.float32(np.sqrt(shape[0]))


def _common(
    architecture: str, layers: int, **more: int | float | bool | list[int] | list[float] | list[bool]
) -> _Parts:
    """What every architecture has; in ``more``, two underscores stand for a dot."""
    metadata: Metadata = {
        "context_length": _CONTEXT,
        "embedding_length": _WIDTH,
        "block_count": layers,
        "feed_forward_length": 2 * _WIDTH,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    parts = _Parts(architecture, metadata)
    parts.tensors["token_embd.weight"] = (_WIDTH, _VOCAB)
    parts.tensors["output.weight"] = (_WIDTH, _VOCAB)
    parts.tensors["output_norm.weight"] = (_WIDTH,)
    return parts


def _add_feed_forward(parts: _Parts, layer: int) -> None:
    wide = 2 * _WIDTH
    parts.add(layer, ffn_gate=(_WIDTH, wide), ffn_up=(_WIDTH, wide), ffn_down=(wide, _WIDTH))


def _add_qkv(parts: _Parts, layer: int, heads: int, kv_heads: int, head: int, *, q_times: int = 1) -> None:
    parts.add(
        layer,
        attn_q=(_WIDTH, q_times * heads * head),
        attn_k=(_WIDTH, kv_heads * head),
        attn_v=(_WIDTH, kv_heads * head),
        attn_output=(heads * head, _WIDTH),
    )


def _add_experts(parts: _Parts, layer: int, experts: int, wide: int) -> None:
    """A mixture of experts with a shared one."""
    parts.add(
        layer,
        ffn_gate_inp=(_WIDTH, experts),
        ffn_gate_exps=(_WIDTH, wide, experts),
        ffn_up_exps=(_WIDTH, wide, experts),
        ffn_down_exps=(wide, _WIDTH, experts),
        ffn_gate_shexp=(_WIDTH, wide),
        ffn_up_shexp=(_WIDTH, wide),
        ffn_down_shexp=(wide, _WIDTH),
    )


_EXPERTS: Metadata = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 64,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
}


def _window() -> _Parts:
    """gemma3: of four layers one keeps every token, three a window of 512."""
    layers, heads, kv_heads, head = 4, 4, 2, 64
    parts = _common(
        "gemma3", layers, attention__head_count=heads, attention__head_count_kv=kv_heads, attention__key_length=head,
        attention__value_length=head, attention__sliding_window=512,
        attention__sliding_window_pattern=[True, True, True, False],
    )  # fmt: skip
    for layer in range(layers):
        _add_qkv(parts, layer, heads, kv_heads, head)
        _add_feed_forward(parts, layer)
        parts.add(
            layer, attn_norm=(_WIDTH,), post_attention_norm=(_WIDTH,), ffn_norm=(_WIDTH,), post_ffw_norm=(_WIDTH,)
        )
        parts.add(layer, attn_q_norm=(head,), attn_k_norm=(head,))
    return parts


_LATENT, _ROPE, _NOPE = 128, 32, 32


def _latent_parts(architecture: str, layers: int) -> _Parts:
    """MLA: a latent of 128 and 32 rotary entries, for four heads."""
    heads, query = 4, 64
    parts = _common(
        architecture, layers, attention__head_count=heads, attention__head_count_kv=1, attention__q_lora_rank=query,
        attention__kv_lora_rank=_LATENT, attention__key_length=_LATENT + _ROPE, attention__value_length=_LATENT,
        attention__key_length_mla=_NOPE + _ROPE, attention__value_length_mla=_NOPE, rope__dimension_count=_ROPE,
        leading_dense_block_count=1, expert_gating_func=2,
    )  # fmt: skip
    parts.metadata.update(_EXPERTS)
    for layer in range(layers):
        parts.add(
            layer,
            attn_norm=(_WIDTH,),
            attn_q_a=(_WIDTH, query),
            attn_q_a_norm=(query,),
            attn_q_b=(query, heads * (_NOPE + _ROPE)),
            attn_kv_a_mqa=(_WIDTH, _LATENT + _ROPE),
            attn_kv_a_norm=(_LATENT,),
            attn_k_b=(_NOPE, _LATENT, heads),
            attn_v_b=(_LATENT, _NOPE, heads),
            attn_output=(heads * _NOPE, _WIDTH),
            ffn_norm=(_WIDTH,),
        )
        if layer == 0:
            _add_feed_forward(parts, layer)
        else:
            _add_experts(parts, layer, 4, 64)
    return parts


def _latent() -> _Parts:
    return _latent_parts("deepseek2", 2)


def _latent_indexed() -> _Parts:
    """deepseek32: MLA with the keys of an indexer beside."""
    parts, index, index_heads = _latent_parts("deepseek32", 2), 64, 2
    parts.metadata.update({
        "attention.indexer.head_count": index_heads,
        "attention.indexer.key_length": index,
        "attention.indexer.top_k": 64,
    })  # fmt: skip
    for layer in range(2):
        parts.add(
            layer,
            indexer__k_norm=(index,),
            indexer__proj=(_WIDTH, index_heads),
            indexer__attn_k=(_WIDTH, index),
            indexer__attn_q_b=(64, index_heads * index),
        )
        parts.tensors[f"blk.{layer}.indexer.k_norm.bias"] = (index,)
    return parts


def _compressed() -> _Parts:
    """deepseek4: layers of ratio 0, 4, 128 and 4 again."""
    ratios, heads, head, rope, query, groups, output_rank = [0, 4, 128, 4], 4, 128, 32, 64, 2, 32
    index, index_heads, streams, layers = 64, 2, 4, 4
    parts = _common(
        "deepseek4", layers, attention__head_count=heads, attention__head_count_kv=1, attention__key_length=head,
        attention__value_length=head, attention__q_lora_rank=query, attention__sliding_window=128,
        attention__compress_ratios=ratios, attention__compress_rope_freq_base=40_000.0,
        attention__output_group_count=groups, attention__output_lora_rank=output_rank,
        attention__indexer__head_count=index_heads, attention__indexer__key_length=index, attention__indexer__top_k=64,
        rope__dimension_count=rope, hyper_connection__count=streams, hyper_connection__sinkhorn_iterations=2,
        hyper_connection__epsilon=1e-6, hash_layer_count=0, swiglu_clamp_exp=[7.0] * layers, expert_gating_func=4,
    )  # fmt: skip
    parts.metadata.update(_EXPERTS)
    wide, mixed = streams * _WIDTH, (2 + streams) * streams
    parts.tensors.update(
        {
            "output_hc_fn.weight": (wide, streams),
            "output_hc_base.weight": (streams,),
            "output_hc_scale.weight": (1,),
        }
    )
    for layer, ratio in enumerate(ratios):
        parts.add(
            layer,
            attn_norm=(_WIDTH,),
            attn_sinks=(heads,),
            attn_q_a=(_WIDTH, query),
            attn_q_a_norm=(query,),
            attn_q_b=(query, heads * head),
            attn_kv=(_WIDTH, head),
            attn_kv_a_norm=(head,),
            attn_output_a=(heads * head // groups, output_rank * groups),
            attn_output_b=(groups * output_rank, _WIDTH),
            ffn_norm=(_WIDTH,),
        )
        for part in ("attn", "ffn"):
            parts.tensors[f"blk.{layer}.hc_{part}_fn.weight"] = (wide, mixed)
            parts.tensors[f"blk.{layer}.hc_{part}_base.weight"] = (mixed,)
            parts.tensors[f"blk.{layer}.hc_{part}_scale.weight"] = (3,)
        if ratio:
            _add_compressor(parts, layer, "attn_compressor", head, 2 if ratio == 4 else 1, ratio)
        if ratio == 4:
            parts.add(layer, indexer__proj=(_WIDTH, index_heads), indexer__attn_q_b=(query, index_heads * index))
            _add_compressor(parts, layer, "indexer_compressor", index, 2, ratio)
        _add_experts(parts, layer, 4, 64)
        parts.tensors[f"blk.{layer}.exp_probs_b.bias"] = (4,)
    return parts


def _add_compressor(parts: _Parts, layer: int, name: str, entries: int, halves: int, ratio: int) -> None:
    block = f"blk.{layer}.{name}"
    parts.tensors.update(
        {
            f"{block}_kv.weight": (_WIDTH, halves * entries),
            f"{block}_gate.weight": (_WIDTH, halves * entries),
            f"{block}_ape.weight": (halves * entries, ratio),
            f"{block}_norm.weight": (entries,),
        }
    )


def _recurrent() -> _Parts:
    """mamba2: nothing but states."""
    layers, inner, state, groups, heads, kernel = 2, 256, 64, 2, 4, 4
    parts = _common(
        "mamba2", layers, ssm__conv_kernel=kernel, ssm__inner_size=inner, ssm__state_size=state,
        ssm__group_count=groups, ssm__time_step_rank=heads, attention__head_count=0,
    )  # fmt: skip
    mixed = inner + 2 * groups * state
    for layer in range(layers):
        _add_mixer(parts, layer, inner, mixed, heads, groups, kernel)
        parts.add(layer, attn_norm=(_WIDTH,))
    return parts


def _add_mixer(parts: _Parts, layer: int, inner: int, mixed: int, heads: int, groups: int, kernel: int) -> None:
    parts.add(
        layer,
        ssm_in=(_WIDTH, inner + mixed + heads),
        ssm_conv1d=(kernel, mixed),
        ssm_norm=(inner // groups, groups),
        ssm_out=(inner, _WIDTH),
    )
    block = f"blk.{layer}"
    parts.tensors.update(
        {
            f"{block}.ssm_conv1d.bias": (mixed,),
            f"{block}.ssm_dt.bias": (heads,),
            f"{block}.ssm_a": (1, heads),
            f"{block}.ssm_d": (1, heads),
        }
    )


def _side_by_side() -> _Parts:
    """falcon-h1: attention and a recurrent state in every layer."""
    layers, inner, state, groups, mixers, kernel, heads, kv_heads, head = 2, 256, 64, 2, 4, 4, 4, 2, 32
    parts = _common(
        "falcon-h1", layers, ssm__conv_kernel=kernel, ssm__inner_size=inner, ssm__state_size=state,
        ssm__group_count=groups, ssm__time_step_rank=mixers, attention__head_count=heads,
        attention__head_count_kv=kv_heads, attention__key_length=head, attention__value_length=head,
    )  # fmt: skip
    mixed = inner + 2 * groups * state
    for layer in range(layers):
        _add_mixer(parts, layer, inner, mixed, mixers, groups, kernel)
        _add_qkv(parts, layer, heads, kv_heads, head)
        _add_feed_forward(parts, layer)
        parts.add(layer, attn_norm=(_WIDTH,))
        parts.tensors[f"blk.{layer}.ffn_norm"] = (_WIDTH,)
    return parts


def _linear() -> _Parts:
    """qwen35: three layers of linear attention, then one that keeps every token."""
    layers, heads, kv_heads, head, state, groups, values, kernel = 4, 4, 2, 64, 32, 2, 4, 4
    inner = state * values
    parts = _common(
        "qwen35", layers, attention__head_count=heads, attention__head_count_kv=kv_heads, attention__key_length=head,
        attention__value_length=head, rope__dimension_count=head, rope__dimension_sections=[8, 12, 12, 0],
        ssm__conv_kernel=kernel, ssm__inner_size=inner, ssm__state_size=state, ssm__group_count=groups,
        ssm__time_step_rank=values, full_attention_interval=4,
    )  # fmt: skip
    mixed = 2 * groups * state + inner
    for layer in range(layers):
        parts.add(layer, attn_norm=(_WIDTH,), post_attention_norm=(_WIDTH,))
        _add_feed_forward(parts, layer)
        if (layer + 1) % 4 == 0:
            _add_qkv(parts, layer, heads, kv_heads, head, q_times=2)
            parts.add(layer, attn_q_norm=(head,), attn_k_norm=(head,))
            continue
        parts.add(
            layer,
            attn_qkv=(_WIDTH, mixed),
            attn_gate=(_WIDTH, inner),
            ssm_conv1d=(kernel, mixed),
            ssm_alpha=(_WIDTH, values),
            ssm_beta=(_WIDTH, values),
            ssm_norm=(state,),
            ssm_out=(inner, _WIDTH),
        )
        parts.tensors[f"blk.{layer}.ssm_dt.bias"] = (values,)
        parts.tensors[f"blk.{layer}.ssm_a"] = (values,)
    return parts


_LLAMA_KINDS = {"mha": 4, "gqa": 2, "mqa": 1}
_OTHER_KINDS: dict[str, Callable[[], _Parts]] = {
    "window": _window,
    "latent": _latent,
    "latent-indexed": _latent_indexed,
    "compressed": _compressed,
    "recurrent": _recurrent,
    "side-by-side": _side_by_side,
    "linear": _linear,
}
