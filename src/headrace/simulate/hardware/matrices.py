"""The matrices of a model, from the facts of its ``config.json``: what a token is multiplied with, layer by layer.

Known: dense models with gated or plain feed-forward layers, mixtures of experts (with shared experts and dense first
layers), MLA (DeepSeek-V2 to V3.2, Kimi-K2) and DeepSeek-V4's compressed attention. Norms, biases, rotary positions,
routers' sums and V4's hyper-connections are vectors beside these matrices, and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from headrace.plan.described import UnknownLayout
from headrace.plan.fields import Fields

Part = Literal["attention", "dense", "shared", "expert", "head"]

_PLAIN_FEED_FORWARD: Final = {"opt", "gpt2", "gpt_neox", "falcon", "phi"}
"""One matrix up and one down; all others have a gate beside the first."""
_NOT_KNOWN: Final = {"nemotron_h", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "mamba", "mamba2", "jamba"}
"""Recurrent layers: their arithmetic is not written down here."""


class Matrix(Struct, frozen=True):
    """``inputs`` x ``outputs`` weights, in ``layers`` layers. ``replicated``: tensor parallelism does not divide it
    (latents that all heads share)."""

    name: str
    part: Part
    layers: int
    inputs: int
    outputs: int
    replicated: bool = False

    @property
    def weights(self) -> int:
        """Of one layer."""
        return self.inputs * self.outputs


class Experts(Struct, frozen=True):
    """``layers`` layers with ``count`` routed experts of these ``matrices`` (their ``layers`` are the same); a token
    goes through ``chosen`` of them."""

    layers: int
    count: int
    chosen: int
    matrices: tuple[Matrix, ...]

    @property
    def weights(self) -> int:
        """Of one expert in one layer."""
        return sum([matrix.weights for matrix in self.matrices])


class Matrices(Struct, frozen=True):
    """All matrices of a model. ``dense`` holds all but routed experts, the vocabulary's (``head``) too;
    ``embedding_weights`` are only looked up, and counted where the table is not the head's."""

    dense: tuple[Matrix, ...]
    experts: Experts | None
    embedding_weights: int

    @property
    def parameters(self) -> int:
        """Weights in all."""
        dense = sum([matrix.layers * matrix.weights for matrix in self.dense])
        routed = self.experts.layers * self.experts.count * self.experts.weights if self.experts else 0
        return dense + routed + self.embedding_weights

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with, the embedding's row aside."""
        dense = sum([matrix.layers * matrix.weights for matrix in self.dense])
        return dense + (self.experts.layers * self.experts.chosen * self.experts.weights if self.experts else 0)


def matrices_of(config: Mapping[str, object], source: str) -> Matrices:
    """Raises ModelError for facts that are missing, UnknownLayout for layers that are not known here."""
    fields = Fields(source, config)
    kind = str(config.get("model_type"))
    if kind in _NOT_KNOWN or fields.has("attn_output_gate"):
        raise UnknownLayout(f"{source}: the arithmetic of models of type {kind} is not known to headrace")
    layers, hidden = fields.one_of(("num_hidden_layers",)), fields.one_of(("hidden_size",))
    vocabulary = fields.whole("vocab_size")
    head = Matrix("vocabulary", "head", 1, hidden, vocabulary)
    feed_forward, experts = _feed_forward(fields, kind, layers, hidden)
    tied = fields.raw("tie_word_embeddings") is True
    return Matrices(
        (*_attention(fields, layers, hidden), *feed_forward, head), experts, 0 if tied else hidden * vocabulary
    )


def head_entries(fields: Fields, hidden: int) -> int:
    """The width of one attention head."""
    return fields.whole("head_dim") if fields.has("head_dim") else hidden // fields.whole("num_attention_heads")


def _attention(fields: Fields, layers: int, hidden: int) -> tuple[Matrix, ...]:
    if fields.has("compress_ratios"):
        return _compressed_attention(fields, layers, hidden)
    if fields.has("kv_lora_rank"):
        return _latent_attention(fields, layers, hidden)
    heads = fields.whole("num_attention_heads")
    head = head_entries(fields, hidden)
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    return (
        Matrix("queries, keys, values", "attention", layers, hidden, (heads + 2 * kv_heads) * head),
        Matrix("attention output", "attention", layers, heads * head, hidden),
    )


def _latent_attention(fields: Fields, layers: int, hidden: int) -> tuple[Matrix, ...]:
    heads, rank = fields.whole("num_attention_heads"), fields.whole("kv_lora_rank")
    plain, rotary = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    value = fields.whole("v_head_dim")
    if fields.has("q_lora_rank"):
        q_rank = fields.whole("q_lora_rank")
        queries = [
            Matrix("latents", "attention", layers, hidden, q_rank + rank + rotary, replicated=True),
            Matrix("queries", "attention", layers, q_rank, heads * (plain + rotary)),
        ]
    else:
        queries = [
            Matrix("latents", "attention", layers, hidden, rank + rotary, replicated=True),
            Matrix("queries", "attention", layers, hidden, heads * (plain + rotary)),
        ]
    return (
        *queries,
        Matrix("keys and values of latents", "attention", layers, rank, heads * (plain + value)),
        Matrix("attention output", "attention", layers, heads * value, hidden),
        *_indexer(fields, layers, hidden),
    )


def _compressed_attention(fields: Fields, layers: int, hidden: int) -> tuple[Matrix, ...]:
    """DeepSeek-V4: one key that is the value too, queries through a latent, the output in groups through another."""
    heads, head = fields.whole("num_attention_heads"), fields.whole("head_dim")
    q_rank, o_rank, groups = fields.whole("q_lora_rank"), fields.whole("o_lora_rank"), fields.whole("o_groups")
    ratios = fields.wholes("compress_ratios", layers)
    searched, far = ratios.count(4), sum([ratio > 0 for ratio in ratios])
    return (
        Matrix("latents", "attention", layers, hidden, q_rank + head, replicated=True),
        Matrix("queries", "attention", layers, q_rank, heads * head),
        Matrix("output by groups", "attention", layers, heads * head // groups, groups * o_rank),
        Matrix("attention output", "attention", layers, groups * o_rank, hidden),
        # A compressor projects to entries and to their weights, of two halves where groups overlap (ratio 4).
        Matrix("compressors", "attention", far - searched, hidden, 2 * head, replicated=True),
        Matrix("compressors with overlap", "attention", searched, hidden, 4 * head, replicated=True),
        *_indexer(fields, searched, hidden),
    )


def _indexer(fields: Fields, layers: int, hidden: int) -> tuple[Matrix, ...]:
    if not fields.has("index_n_heads"):
        return ()
    heads, head = fields.whole("index_n_heads"), fields.whole("index_head_dim")
    return (
        Matrix("indexer's queries", "attention", layers, fields.whole("q_lora_rank"), heads * head, replicated=True),
        Matrix("indexer's keys and weights", "attention", layers, hidden, head + heads, replicated=True),
    )


def _feed_forward(fields: Fields, kind: str, layers: int, hidden: int) -> tuple[tuple[Matrix, ...], Experts | None]:
    count = next(
        (fields.whole(key) for key in ("n_routed_experts", "num_experts", "num_local_experts") if fields.has(key)), 0
    )
    gated = kind not in _PLAIN_FEED_FORWARD
    if not count:
        return _gated(fields.one_of(("intermediate_size", "ffn_dim")), hidden, layers, "dense", gated), None
    first_dense = fields.whole("first_k_dense_replace", least=0, default=0)
    if fields.whole("decoder_sparse_step", default=1) != 1 or fields.whole("moe_layer_freq", default=1) != 1:
        raise UnknownLayout(f"{fields.source}: experts in some layers alone are not known to headrace")
    expert_layers = layers - first_dense
    inner = fields.one_of(("moe_intermediate_size", "intermediate_size"))
    dense: tuple[Matrix, ...] = ()
    if first_dense:
        dense += _gated(fields.whole("intermediate_size"), hidden, first_dense, "dense", gated)
    shared = fields.whole("n_shared_experts", least=0, default=0)
    if kind == "llama4_text":
        shared = 1  # the first expert of every layer is everybody's
    if shared:
        dense += _gated(shared * inner, hidden, expert_layers, "shared", gated)
    dense += (Matrix("router", "dense", expert_layers, hidden, count, replicated=True),)
    routed = _gated(inner, hidden, expert_layers, "expert", gated)
    return dense, Experts(expert_layers, count, fields.whole("num_experts_per_tok"), routed)


def _gated(inner: int, hidden: int, layers: int, part: Part, gated: bool) -> tuple[Matrix, ...]:
    ups = 2 if gated else 1
    return (
        Matrix("up and gate" if gated else "up", part, layers, hidden, ups * inner),
        Matrix("down", part, layers, inner, hidden),
    )
