"""Reading GGUF metadata: what is there is found; what is cut off or absurd is refused in one sentence."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ModelError
from headrace.kv.layout import CacheType
from headrace.models.tiny_kinds import kinds, make_tiny_kind
from headrace.plan.described import UnknownLayout
from headrace.plan.gguf_layout import describe_gguf
from headrace.plan.gguf_metadata import read_gguf

Value = int | float | bool | str | list[int] | list[bool]


def gguf(entries: dict[str, Value], tensors: tuple[str, ...] = ()) -> bytes:
    """A file of these metadata entries, written by hand so that it can be wrong."""
    out = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))
    for key, value in entries.items():
        out += _text(key)
        if isinstance(value, str):
            out += struct.pack("<I", 8) + _text(value)
        elif isinstance(value, list):
            code, letter = (7, "?") if value and isinstance(value[0], bool) else (4, "I")
            out += struct.pack(f"<IIQ{len(value)}{letter}", 9, code, len(value), *value)
        elif isinstance(value, float):
            out += struct.pack("<If", 6, value)
        else:
            out += struct.pack("<Iq", 11, value)
    for name in tensors:
        out += _text(name) + struct.pack("<IQIQ", 1, 1, 0, 0)
    return out


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


LLAMA: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.embedding_length": 256,
    "llama.context_length": 4096,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
}

Write = Callable[[dict[str, Value]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_one(entries: dict[str, Value]) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(gguf(entries))
        return path

    return write_one


def test_what_is_read(tmp_path: Path) -> None:
    """Values, arrays of numbers, and every tensor with its weights; lists of texts are passed over."""
    path = make_tiny_kind("window", tmp_path / "window.gguf")
    metadata = read_gguf(path)
    assert metadata.architecture == "gemma3"
    assert metadata.values["gemma3.attention.sliding_window_pattern"] == (True, True, True, False)
    assert "tokenizer.ggml.tokens" not in metadata.values
    assert metadata.tensors["token_embd.weight"] == 128 * 320
    assert metadata.parameters == sum(metadata.tensors.values())


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    """Of a real file's beginning every length up to the weights: never a traceback, always the file's name."""
    whole = make_tiny_kind("latent", tmp_path / "whole.gguf").read_bytes()
    end = whole.rindex(b".weight") + 64
    cut = tmp_path / "cut.gguf"
    lengths = [*range(40), *random.Random(0).sample(range(40, end - 100), 200)]
    for length in lengths:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(cut)
    cut.write_bytes(whole[:300])
    with pytest.raises(ModelError, match=r"cut off or broken at byte \d+"):
        read_gguf(cut)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(kinds()), st.integers(24, 3000), st.binary(min_size=1, max_size=9))
def test_flipped_bytes_end_in_a_layout_or_in_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, kind: str, at: int, noise: bytes
) -> None:
    """Nothing else comes out of a damaged file, and nothing huge is computed from it."""
    folder = tmp_path_factory.getbasetemp() / "flipped"
    folder.mkdir(exist_ok=True)
    source = folder / f"{kind}.gguf"
    if not source.exists():
        make_tiny_kind(kind, source)
    data = bytearray(source.read_bytes())
    data[at : at + len(noise)] = noise
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(data)
    try:
        model = describe_gguf(damaged)
    except ModelError:
        return
    assert 0 <= model.layout.sequence_bytes(4096, CacheType.named("f16")) < 1 << 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.block_count": 0}, r"llama\.block_count is 0; it must be a whole number from 1 to 4096"),
        ({"llama.block_count": 1 << 40}, r"llama\.block_count is 1099511627776"),
        ({"llama.block_count": -3}, r"llama\.block_count is -3"),
        ({"llama.attention.head_count_kv": [2, 2]}, r"head_count_kv has 2 entries for 4 layers"),
        ({"llama.embedding_length": 1 << 60}, r"llama\.embedding_length is"),
        ({"llama.attention.key_length": 0}, r"key_length is 0"),
        ({"llama.attention.key_length": "long"}, r"key_length is 'long'"),
        ({"general.architecture": 7}, "does not say its architecture"),
        ({"general.architecture": ""}, "does not say its architecture"),
        ({"general.architecture": "gpt9"}, r"gpt9\.block_count is missing"),
        ({"general.architecture": "bert", "bert.block_count": 2}, "has no KV memory"),
        ({"general.architecture": "glm5-next", "glm5-next.block_count": 2}, "not known to headrace"),
    ],
)
def test_absurd_values_are_named(change: dict[str, Value], message: str, write: Write) -> None:
    with pytest.raises(ModelError, match=message):
        describe_gguf(write(LLAMA | change))


def test_counts_are_not_believed(tmp_path: Path) -> None:
    """A header that announces 2^63 entries, a text of 2^60 bytes or an array of 2^62 numbers costs no memory."""
    path = tmp_path / "huge.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 63))
    with pytest.raises(ModelError, match=r"says that 9223372036854775808 metadata entries follow"):
        read_gguf(path)
    path.write_bytes(struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 60) + bytes(64))
    with pytest.raises(ModelError, match="it ends within a key"):
        read_gguf(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _text("a") + struct.pack("<IIQ", 9, 4, 1 << 62))
    with pytest.raises(ModelError, match="numbers in a follow"):
        read_gguf(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _text("a") + struct.pack("<I", 99))
    with pytest.raises(ModelError, match="a has the type 99"):
        read_gguf(path)


def test_grouped_heads_and_their_variants(write: Write) -> None:
    """KV heads and lengths from the file; without them the heads' number and an even share of the width."""
    f16 = CacheType.named("f16")
    assert describe_gguf(write(LLAMA)).layout.bytes_per_token(f16) == 4 * 2 * (2 * 32) * 2
    plain = {key: value for key, value in LLAMA.items() if "head_count_kv" not in key}
    assert describe_gguf(write(plain)).layout.bytes_per_token(f16) == 4 * 2 * (8 * 32) * 2
    uneven = LLAMA | {"llama.attention.key_length": 48, "llama.attention.value_length": 16}
    assert describe_gguf(write(uneven)).layout.bytes_per_token(f16) == 4 * 2 * (48 + 16) * 2
    by_layer = LLAMA | {"llama.attention.head_count_kv": [8, 0, 2, 2]}
    assert describe_gguf(write(by_layer)).layout.bytes_per_token(f16) == (8 + 2 + 2) * 2 * 32 * 2


def test_drafting_layers_are_not_counted(write: Write) -> None:
    """libllama's context for the model itself keeps nothing for the layers that draft tokens."""
    model = describe_gguf(write(LLAMA | {"llama.nextn_predict_layers": 1}))
    assert model.layers == 3 and model.layout.caches[0].layers == 3


def test_a_window_that_libllama_does_not_use_is_said(write: Write) -> None:
    model = describe_gguf(write(LLAMA | {"llama.attention.sliding_window": 1024}))
    assert model.layout.longest_window_tokens == 0
    assert "names a window of 1024 tokens, but libllama keeps all tokens of llama" in model.notes[0]


@pytest.mark.parametrize(
    ("arch", "more", "windowed"),
    [
        ("gemma2", {}, (4096, 3)),
        ("gpt-oss", {"attention.sliding_window": 128}, (128, 3)),
        ("gemma3", {"attention.sliding_window": 1024}, (1024, 5)),
        ("gemma3", {}, (None, 0)),
        ("cohere2", {"attention.sliding_window": 64, "attention.sliding_window_pattern": 3}, (64, 4)),
        ("llama4", {}, (8192, 5)),
        ("llama4", {"attention.sliding_window": 0}, (None, 0)),
        ("smallthinker", {"attention.sliding_window": 7}, (4096, 4)),
        ("exaone4", {"attention.sliding_window": 4096}, (None, 0)),
    ],
)
def test_windows_by_architecture(
    arch: str, more: dict[str, Value], windowed: tuple[int | None, int], write: Write
) -> None:
    """Of six layers: how long the window is and how many have it, as libllama's code has it."""
    entries: dict[str, Value] = {
        "general.architecture": arch, f"{arch}.block_count": 6, f"{arch}.embedding_length": 64,
        f"{arch}.attention.head_count": 2, **{f"{arch}.{key}": value for key, value in more.items()},
    }  # fmt: skip
    caches = describe_gguf(write(entries)).layout.caches
    tokens, count = windowed
    assert [(c.window_tokens, c.layers) for c in caches if c.window_tokens] == ([(tokens, count)] if tokens else [])
    assert sum(cache.layers for cache in caches) == 6


def test_a_ratio_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = make_tiny_kind("compressed", tmp_path / "compressed.gguf")
    data = path.read_bytes()
    key = data.index(b"compress_ratios")
    place = data.index(struct.pack("<I", 128), key)
    path.write_bytes(data[:place] + struct.pack("<I", 64) + data[place + 4 :])
    with pytest.raises(UnknownLayout, match="compression ratio 64 is not known"):
        describe_gguf(path)


def test_the_real_model() -> None:
    """SmolLM2 from its own file: 30 layers, 3 KV heads of 64."""
    from headrace.models.catalog import CATALOG
    from headrace.models.store import installed_path

    path = installed_path(CATALOG["smollm2"])
    if path is None:
        pytest.skip("the real model is not installed")
    model = describe_gguf(path)
    assert model.layout.bytes_per_token() == 23_040
    assert model.parameters == pytest.approx(134.5e6, rel=0.01)
