"""The synthetic GGUF does what tests and load tests need of it."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from headrace.engines.llama import library
from headrace.errors import ModelError
from headrace.models.tiny import IM_END, make_tiny_gguf

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = make_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", vocab=VOCAB)
    library.load()  # takes libllama's log, for good: there is one a process
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    assert model
    yield model
    llama_cpp.llama_model_free(model)


def tokenize(model: Any, text: str) -> list[int]:
    data = text.encode()
    room = len(data) + 1
    tokens = (llama_cpp.llama_token * room)()
    vocab = llama_cpp.llama_model_get_vocab(model)
    count = llama_cpp.llama_tokenize(vocab, data, len(data), tokens, room, False, True)
    return list(tokens[:count])


def detokenize(model: Any, tokens: list[int]) -> bytes:
    vocab = llama_cpp.llama_model_get_vocab(model)
    buffer = ctypes.create_string_buffer(64)
    text = b""
    for token in tokens:
        length = llama_cpp.llama_token_to_piece(vocab, token, buffer, 64, 0, True)
        text += buffer.raw[:length]
    return text


@pytest.mark.parametrize(
    "text",
    [
        "the question is what the answer is",
        "Ünïcödé 漢字 🎉\r\n\t x  y",
        "".join(map(chr, range(1, 1000))),
        "<|im_start|>user\nhello<|im_end|>\n",
    ],
)
def test_any_text_round_trips(text: str, model: Any) -> None:
    assert detokenize(model, tokenize(model, text)).decode() == text


def test_english_takes_fewer_tokens_than_bytes(model: Any) -> None:
    text = "the people who want to know the answer"
    assert len(tokenize(model, text)) < len(text) / 2


def test_it_says_what_it_is_and_has_a_long_context(model: Any) -> None:
    buffer = ctypes.create_string_buffer(200)
    llama_cpp.llama_model_meta_val_str(model, b"general.name", buffer, 200)
    assert b"synthetic, not a model" in buffer.value
    assert llama_cpp.llama_model_n_ctx_train(model) == 131_072
    assert llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)) == VOCAB


def test_greedy_generation_never_ends_by_itself(model: Any) -> None:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads = 512, 1
    context = llama_cpp.llama_init_from_model(model, params)
    try:
        tokens = tokenize(model, "the answer")
        vocab = llama_cpp.llama_model_get_vocab(model)
        produced = []
        for _ in range(200):
            row = (llama_cpp.llama_token * len(tokens))(*tokens)
            assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(row, len(tokens))) == 0
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (VOCAB,))
            assert np.isfinite(logits).all()
            tokens = [int(logits.argmax())]
            produced += tokens
        assert not any(llama_cpp.llama_vocab_is_eog(vocab, token) for token in produced)
        assert len(set(produced)) > 10
    finally:
        llama_cpp.llama_free(context)


def test_end_token_ends(model: Any) -> None:
    vocab = llama_cpp.llama_model_get_vocab(model)
    [end] = tokenize(model, IM_END)
    assert llama_cpp.llama_vocab_is_eog(vocab, end)
    assert llama_cpp.llama_vocab_eos(vocab) == end


def test_same_seed_same_file(tmp_path: Path) -> None:
    a = make_tiny_gguf(tmp_path / "a.gguf", layers=1).read_bytes()
    assert make_tiny_gguf(tmp_path / "b.gguf", layers=1).read_bytes() == a
    assert make_tiny_gguf(tmp_path / "c.gguf", layers=1, seed=1).read_bytes() != a
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf", "c.gguf"]


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="vocab must be at least 259"):
        make_tiny_gguf(tmp_path / "x.gguf", vocab=100)
    with pytest.raises(ModelError, match="multiple"):
        make_tiny_gguf(tmp_path / "x.gguf", embedding=100, heads=3)


def test_the_script_writes_the_file(tmp_path: Path) -> None:
    target = tmp_path / "made.gguf"
    command = [sys.executable, "scripts/make_tiny_gguf.py", str(target), "--layers", "1", "--context", "4096"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "synthetic, not a model" in done.stdout
    assert target.read_bytes()[:4] == b"GGUF"
