"""A synthetic GGUF for tests and load tests: random weights, fixed seed, decoded in well under a millisecond.

It is no model: its text is noise. It has what the machinery needs: a byte-level tokenizer through which any
text round-trips, a chat template, a long context. Its end-of-text tokens are never the likeliest, so a
generation goes on until its token limit, which makes load predictable.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ModelError

NAME = "headrace-tiny-random (synthetic, not a model)"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Control tokens come first in the vocabulary.
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CONTROL = (END_OF_TEXT, IM_START, IM_END)

# What the merges are learned from: ordinary words, so that English takes about two bytes a token.
_CORPUS = (
    "the water of the river runs along the channel and through the gates to the turbine where it turns the "
    "wheel that drives the generator and then it returns to the river below the station there are people who "
    "want to know what this is and how it works so they ask a question and the answer comes back in a few "
    "words or in a long text with many sentences and numbers some of them have time to wait and others need "
    "their reply at once this one should not be held up by that one which is large and slow"
)

# GGUF's enum for token types.
_NORMAL, _CONTROL_TYPE, _UNUSED = 1, 3, 5


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 byte values, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = [""] * 256
    for byte in printable:
        symbols[byte] = chr(byte)
    shifted = 0x100
    for byte in range(256):
        if not symbols[byte]:
            symbols[byte] = chr(shifted)
            shifted += 1
    return symbols


def learn_merges(count: int) -> list[tuple[str, str]]:
    """Up to ``count`` byte-pair merges over the corpus, the most frequent pair first."""
    symbols = byte_symbols()
    words = Counter(
        tuple(symbols[byte] for byte in word.encode())
        for word in (_CORPUS[:1] + _CORPUS[1:].replace(" ", "\x00 ")).split("\x00")
    )
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merged(word, best): times for word, times in words.items()})
    return merges


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    position = 0
    while position < len(word):
        if word[position : position + 2] == pair:
            out.append(pair[0] + pair[1])
            position += 2
        else:
            out.append(word[position])
            position += 1
    return tuple(out)


def make_tiny_gguf(
    path: Path,
    *,
    context: int = 131_072,
    layers: int = 2,
    embedding: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    feed_forward: int = 256,
    vocab: int = 512,
    seed: int = 0,
) -> Path:
    """Writes the file (whole or not at all) and returns ``path``.

    ``context`` is the trained context in tokens, ``vocab`` the number of tokens (at least 259: the bytes and
    the control tokens). Raises ``ModelError`` for impossible sizes or when the ``gguf`` package is missing.
    """
    if vocab < 256 + len(_CONTROL):
        raise ModelError(f"vocab must be at least {256 + len(_CONTROL)}, not {vocab}")
    if embedding % heads or (embedding // heads) % 2 or heads % kv_heads:
        raise ModelError("embedding must be an even multiple of heads, and heads a multiple of kv_heads")
    try:
        import gguf
    except ImportError:
        raise ModelError("writing a GGUF needs the gguf package: pip install gguf") from None

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(str(partial), "llama")
        writer.add_name(NAME)
        writer.add_description("Random weights for tests and load tests; its output is noise.")
        writer.add_context_length(context)
        writer.add_embedding_length(embedding)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(feed_forward)
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_rope_dimension_count(embedding // heads)
        writer.add_rope_freq_base(10_000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        add_tokenizer(writer, vocab)
        for name, tensor in _tensors(layers, embedding, heads, kv_heads, feed_forward, vocab, seed).items():
            writer.add_tensor(name, tensor)
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


def add_tokenizer(writer: Any, vocab: int) -> None:
    """Writes the byte-level tokenizer of ``vocab`` tokens and the chat template into a ``gguf.GGUFWriter``."""
    merges = learn_merges(vocab - 256 - len(_CONTROL))
    tokens = [*_CONTROL, *byte_symbols()]
    # Different pairs can spell one token ("a"+"bc", "ab"+"c"): it is listed once.
    tokens += dict.fromkeys("".join(pair) for pair in merges)
    types = [_CONTROL_TYPE] * len(_CONTROL) + [_NORMAL] * (len(tokens) - len(_CONTROL))
    unused = vocab - len(tokens)
    tokens += [f"<|unused{number}|>" for number in range(unused)]
    types += [_UNUSED] * unused
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(_CONTROL.index(END_OF_TEXT))
    writer.add_eos_token_id(_CONTROL.index(IM_END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _tensors(
    layers: int, embedding: int, heads: int, kv_heads: int, feed_forward: int, vocab: int, seed: int
) -> dict[str, NDArray[np.float32]]:
    """All weights, in llama's layout (rows are outputs).

    Dimension 0 of the residual stream is 1 for every token, and no layer writes to it. The output row of each
    control token reads that dimension alone, negatively: so those tokens are never likely.
    """
    random = np.random.default_rng(seed)
    kv = embedding // heads * kv_heads

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        weights = random.standard_normal((rows, columns), dtype=np.float32)
        return weights / np.float32(np.sqrt(columns))

    def writes_residual(rows: int, columns: int) -> NDArray[np.float32]:
        weights = matrix(rows, columns)
        weights[0] = 0.0
        return weights

    ones = np.ones(embedding, dtype=np.float32)
    tokens = random.standard_normal((vocab, embedding), dtype=np.float32)
    tokens[:, 0] = 1.0
    output = matrix(vocab, embedding) * np.float32(4.0)  # spread the logits: greedy text then does not hang on rounding
    output[: len(_CONTROL)] = 0.0
    output[: len(_CONTROL), 0] = -100.0
    tensors = {"token_embd.weight": tokens, "output_norm.weight": ones, "output.weight": output}
    for layer in range(layers):
        block = f"blk.{layer}"
        tensors |= {
            f"{block}.attn_norm.weight": ones,
            f"{block}.attn_q.weight": matrix(embedding, embedding),
            f"{block}.attn_k.weight": matrix(kv, embedding),
            f"{block}.attn_v.weight": matrix(kv, embedding),
            f"{block}.attn_output.weight": writes_residual(embedding, embedding),
            f"{block}.ffn_norm.weight": ones,
            f"{block}.ffn_gate.weight": matrix(feed_forward, embedding),
            f"{block}.ffn_up.weight": matrix(feed_forward, embedding),
            f"{block}.ffn_down.weight": writes_residual(embedding, feed_forward),
        }
    return tensors
