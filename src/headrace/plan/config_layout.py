"""The KV layout that a Hugging Face ``config.json`` describes: what a server that stores no more than it must keeps.

Facts about one architecture's fields are in ``config_windows`` and ``config_states``; here is how they come together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.errors import ModelError
from headrace.kv.entry_types import Row
from headrace.kv.layout import Cache, KvLayout, attention_rows
from headrace.plan.compressed import compressed_layout
from headrace.plan.config_states import kinds_of_layers, states_of
from headrace.plan.config_windows import windows_of
from headrace.plan.described import DescribedModel, UnknownLayout, gathered
from headrace.plan.fields import MOST_LAYERS, MOST_TOKENS, Fields

_MOST_BYTES = 16 << 20
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "max_seq_len")
_TOLD_APART = {
    "gemma4", "gemma4_text", "minimax", "minimax_m3", "nemotron-nas", "glm5_next", "bailing_hybrid", "kimi_k3",
    "mllama", "rwkv", "rwkv6", "rwkv7", "recurrent_gemma", "zamba", "zamba2", "bamba", "plamo2", "t5", "bart",
    "whisper",
}  # fmt: skip
"""Types whose fields do not say all of their memory, or whose memory is of a kind that is not written down here."""


def describe_config(path: Path) -> DescribedModel:
    """Read a ``config.json`` and size it. Raises ModelError; UnknownLayout for what is not known here."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size} bytes: that is no config.json")
        document = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelError(f"the file {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds no JSON object")
    return describe_fields(document, name=path.parent.name or path.name, source=str(path), parameters=None)


def describe_fields(
    document: Mapping[str, object], *, name: str, source: str, parameters: int | None
) -> DescribedModel:
    """The model that the fields of a ``config.json`` describe. A model of several parts (text and images) has its
    language model's fields under ``text_config``."""
    nested = document.get("text_config")
    if isinstance(nested, dict) and not any([document.get(key) is not None for key in _LAYERS]):
        document = nested
    fields = Fields(source, document)
    kind = document.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError(f"{source}: model_type is missing; is this a model's config.json?")
    if kind in _TOLD_APART:
        raise UnknownLayout(f"{source}: how models of type {kind} keep their KV memory is not known to headrace")
    layers = _layers(fields)
    layout = _layout(fields, kind, layers)
    context = [key for key in _CONTEXT if fields.has(key)]
    return DescribedModel(
        name=name,
        architecture=kind,
        source=source,
        layers=layers,
        hidden_entries=fields.one_of(_HIDDEN),
        context_tokens=fields.whole(context[0], most=MOST_TOKENS) if context else None,
        parameters=parameters,
        layout=layout,
    )


def _layers(fields: Fields) -> int:
    if not any([fields.has(key) for key in _LAYERS]) and fields.has("hybrid_override_pattern"):
        return min(MOST_LAYERS, len(str(fields.raw("hybrid_override_pattern"))))
    return fields.one_of(_LAYERS, most=MOST_LAYERS)


def _layout(fields: Fields, kind: str, layers: int) -> KvLayout:
    if fields.has("compress_ratios"):
        return _compressed(fields, layers)
    recurrent, attending = kinds_of_layers(fields, kind, layers)
    states = states_of(fields, kind, len(recurrent)) if recurrent else []
    if not attending:
        return gathered([], states)
    if fields.has("kv_lora_rank"):
        return gathered(_latent(fields, len(attending)), states)
    window_tokens, windowed = windows_of(fields, kind, layers)
    rows = _rows(fields, kind)
    caches = [
        Cache(f"window of {window_tokens} tokens", 1, rows, window_tokens=window_tokens)
        if window_tokens and windowed[layer]
        else Cache("every token", 1, rows)
        for layer in attending
    ]
    return gathered(caches, states)


def _rows(fields: Fields, kind: str) -> tuple[Row, Row]:
    heads = fields.one_of(_HEADS)
    if fields.has("head_dim"):
        head = fields.whole("head_dim")
    else:
        hidden = fields.one_of(_HIDDEN)
        if hidden % heads:
            raise ModelError(f"{fields.source}: hidden_size {hidden} is no multiple of {heads} attention heads")
        head = hidden // heads
    return attention_rows(_kv_heads(fields, heads), head, head)


def _kv_heads(fields: Fields, heads: int) -> int:
    for key in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"):
        if fields.has(key):
            kv_heads = fields.whole(key)
            if heads % kv_heads:
                raise ModelError(f"{fields.source}: {heads} attention heads are no multiple of {key} {kv_heads}")
            return kv_heads
    return 1 if fields.raw("multi_query") is True else heads


def _latent(fields: Fields, layers: int) -> list[Cache]:
    """MLA: one row per token and layer, the latent and the rotary part; with an indexer (V3.2) its keys beside."""
    rank, rope = fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim", least=0, default=0)
    sparse = fields.has("index_head_dim")
    row = Row(rank + rope, rank + rope, "sparse_mla" if sparse else "plain", rope if sparse else 0)
    caches = [Cache("every token (latent)", layers, (row,))]
    if sparse:
        entries = fields.whole("index_head_dim")
        caches.append(Cache("indexer keys", layers, (Row(entries, entries, "index"),)))
    return caches


def _compressed(fields: Fields, layers: int) -> KvLayout:
    return compressed_layout(
        ratios=fields.wholes("compress_ratios", layers, most=MOST_TOKENS),
        drafting_layers=0,
        window_tokens=fields.whole("sliding_window", most=MOST_TOKENS),
        head_entries=fields.whole("head_dim"),
        rope_entries=fields.whole("qk_rope_head_dim", least=0, default=0),
        index_entries=fields.whole("index_head_dim"),
        source=fields.source,
    )
