"""What config.json files say about KV memory, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.kv.layout import CacheType
from headrace.plan.architectures import architectures
from headrace.plan.config_layout import describe_config, describe_fields
from headrace.plan.described import DescribedModel, UnknownLayout

F16 = CacheType.named("f16")
PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def described(fields: dict[str, Any]) -> DescribedModel:
    return describe_fields(fields, name="test", source="config.json", parameters=None)


def per_token(fields: dict[str, Any]) -> float:
    return float(described(fields).layout.bytes_per_token(F16))


def windows(fields: dict[str, Any]) -> list[tuple[int, int]]:
    return [(c.window_tokens, c.layers) for c in described(fields).layout.caches if c.window_tokens is not None]


def test_heads() -> None:
    """GQA, MHA (no number of KV heads), MQA, and a head that is not hidden_size / heads."""
    assert per_token(PLAIN) == 4 * 2 * 2 * 32 * 2
    assert per_token({**PLAIN, "num_key_value_heads": None}) == 4 * 2 * 8 * 32 * 2
    assert per_token({**PLAIN, "num_key_value_heads": 1}) == 4 * 2 * 32 * 2
    assert per_token({**PLAIN, "num_key_value_heads": None, "multi_query": True}) == 4 * 2 * 32 * 2
    assert per_token({**PLAIN, "head_dim": 128}) == 4 * 2 * 2 * 128 * 2
    old = {"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 1024}
    assert per_token(old) == 4 * 2 * 256 * 2 and described(old).context_tokens == 1024


def test_a_model_of_text_and_images_is_sized_by_its_text_part() -> None:
    nested = {"model_type": "qwen3_vl", "text_config": PLAIN, "vision_config": {"num_hidden_layers": 99}}
    assert per_token(nested) == per_token(PLAIN)


def test_latent_attention() -> None:
    """kv_lora_rank and the rotary part, once per layer; with an indexer its keys too."""
    latent = {**PLAIN, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert per_token(latent) == 4 * 576 * 2
    assert per_token({**latent, "index_head_dim": 128}) == 4 * (576 + 128) * 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [(4096, 4)]),
        ({"model_type": "mistral", "sliding_window": None}, []),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, []),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, [(64, 1)]),
        ({"model_type": "gemma2", "sliding_window": 4096}, [(4096, 2)]),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 4}, [(512, 3)]),
        (
            {"model_type": "x", "sliding_window": 8, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
            [(8, 3)],
        ),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, [(8192, 3)]),
        ({"model_type": "llama4_text", "no_rope_layers": [0, 1, 1, 0]}, [(8192, 2)]),
    ],
)
def test_windows(more: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    assert windows({**PLAIN, **more}) == expected


def states(fields: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {state.name: (state.layers, state.entries) for state in described(fields).layout.states}


def test_linear_attention() -> None:
    """Every fourth layer keeps tokens; the others a convolution's last 3 inputs and a matrix per value head."""
    gated = {
        **PLAIN, "model_type": "qwen3_next", "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    assert per_token(gated) == 1 * 2 * 2 * 32 * 2
    assert states(gated) == {"convolution": (3, 3 * (2 * 64 + 64)), "recurrent state": (3, 64 * 32)}


def test_state_space_models() -> None:
    """Pure and mixed, in the fields of each."""
    pure = {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64, "num_heads": 4, "head_dim": 32,
            "state_size": 16, "n_groups": 2, "conv_kernel": 4}  # fmt: skip
    assert described(pure).layout.caches == ()
    assert states(pure) == {"convolution": (2, 3 * (128 + 2 * 2 * 16)), "recurrent state": (2, 128 * 16)}
    first = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "state_size": 16, "conv_kernel": 4}
    assert states(first) == {"convolution": (2, 3 * 128), "recurrent state": (2, 128 * 16)}
    jamba = {**PLAIN, "model_type": "jamba", "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4,
             "mamba_expand": 2, "mamba_d_conv": 4, "mamba_d_state": 16}  # fmt: skip
    assert states(jamba)["recurrent state"] == (7, 512 * 16) and described(jamba).layout.caches[0].layers == 1
    both = {**PLAIN, "model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_d_state": 8,
            "mamba_d_conv": 4}  # fmt: skip
    assert states(both)["convolution"] == (4, 3 * (64 + 16)) and described(both).layout.caches[0].layers == 4
    nemotron = {**PLAIN, "model_type": "nemotron_h", "hybrid_override_pattern": "M*E-", "mamba_num_heads": 2,
                "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 4, "conv_kernel": 4}  # fmt: skip
    assert states(nemotron)["recurrent state"] == (1, 16 * 4) and described(nemotron).layout.caches[0].layers == 1
    granite = {**PLAIN, "model_type": "granitemoehybrid", "layer_types": ["mamba", "mamba", "mamba", "attention"],
               "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4,
               "mamba_d_conv": 4}  # fmt: skip
    assert states(granite)["convolution"] == (3, 3 * (16 + 8))
    lfm = {**PLAIN, "model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
    assert states(lfm) == {"convolution": (3, 256 * 2)}
    kimi = {**PLAIN, "model_type": "kimi_linear", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "linear_attn_config": {
        "full_attn_layers": [4], "num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4}}  # fmt: skip
    assert states(kimi) == {"convolution": (3, 3 * 3 * 32), "recurrent state": (3, 32 * 16)}
    assert per_token(kimi) == 576 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "gemma4"}, "not known to headrace"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number from 1 to 4096"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": 2.5}, "hidden_size is 2.5"),
        ({"hidden_size": 257}, "hidden_size 257 is no multiple of 8 attention heads"),
        ({"num_key_value_heads": 3}, "8 attention heads are no multiple of num_key_value_heads 3"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"head_dim": 1e300}, "head_dim is 1"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"sliding_window": 128}, "which layers of a llama have it is not known"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 4 texts"),
        ({"layer_types": ["odd"] * 4}, "layers of the type 'odd' are not known"),
        ({"mamba_d_state": 16}, "mamba_d_state says that a llama has recurrent layers, but not which"),
        ({"compress_ratios": [4, 4]}, "compress_ratios has 2 entries for 4 layers"),
    ],
)
def test_what_is_missing_or_absurd_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        described({**PLAIN, **change})
    assert str(refused.value).startswith("config.json")


def test_layers_of_unknown_kinds_are_not_guessed() -> None:
    with pytest.raises(UnknownLayout, match="what the recurrent layers of a llama keep is not known"):
        described({**PLAIN, "layer_types": ["mamba"] * 4})


def test_files(tmp_path: Path) -> None:
    """A file that is no JSON, no object, or of absurd numbers, and one that is right."""
    path = tmp_path / "some-model" / "config.json"
    path.parent.mkdir()
    for text, message in (
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "holds no JSON object"),
        ('{"model_type": "llama", "num_hidden_layers": ' + "9" * 5000 + "}", "num_hidden_layers|is not JSON"),
        ('{"model_type": "llama", "num_hidden_layers": 1e999}', "num_hidden_layers|is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ModelError, match=message):
            describe_config(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match="is not JSON"):
        describe_config(path)
    path.write_text(json.dumps(PLAIN))
    assert describe_config(path).name == "some-model"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({key for item in architectures().values() for key in item.config})


@given(st.sampled_from(sorted(architectures())), st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=3))
def test_any_junk_ends_in_a_layout_or_in_a_model_error(name: str, junk: dict[str, Any]) -> None:
    try:
        model = described({**architectures()[name].config, **junk})
    except ModelError:
        return
    assert model.layout.sequence_bytes(1024, F16) >= 0
