"""A model's text side: tokens to bytes and back, special tokens, the chat template's source.

Used by the engine process over the full weights and by the gateway over a vocabulary-only load. libllama's
tokenizer only reads the vocabulary, so calls from several threads at once are safe.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.engines.llama.chat_template import ChatTemplate
from headrace.engines.llama.library import Library
from headrace.engines.llama.weights import Weights
from headrace.errors import ModelError, RequestError


class Vocabulary:
    """Implements ``engines.protocol.Tokenizer``."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._api = weights.library.api
        self._vocab = weights.vocab
        self._size = weights.vocab_size
        self._plain: dict[int, bytes] = {}
        self._template: ChatTemplate | None = None

    @classmethod
    def from_file(cls, library: Library, path: Path) -> Vocabulary:
        """Load only the vocabulary and metadata of a GGUF. Raises ModelError."""
        return cls(Weights(library, path, vocab_only=True))

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def context_train_tokens(self) -> int:
        """The context length the model was trained for, from its metadata."""
        architecture = self._weights.metadata("general.architecture") or ""
        value = self._weights.metadata(f"{architecture}.context_length")
        return int(value) if value and value.isdecimal() else 0

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8", "surrogatepass") if not text.isascii() else text.encode()
        capacity = len(data) + 8
        tokens = (self._api.llama_token * capacity)()
        count = self._api.llama_tokenize(self._vocab, data, len(data), tokens, capacity, add_special, parse_special)
        if count < 0:
            tokens = (self._api.llama_token * -count)()
            count = self._api.llama_tokenize(self._vocab, data, len(data), tokens, -count, add_special, parse_special)
            if count < 0:
                raise RequestError(f"the text of {len(data)} bytes cannot be tokenized")
        return list(tokens[:count])

    def token_bytes(self, token_id: int) -> bytes:
        known = self._plain.get(token_id)
        if known is not None:
            return known
        if not 0 <= token_id < self._size:
            raise RequestError(f"token id {token_id} is outside the vocabulary of {self._size}")
        buffer = ctypes.create_string_buffer(64)
        length = self._api.llama_token_to_piece(self._vocab, token_id, buffer, 64, 0, True)
        if length < 0:
            buffer = ctypes.create_string_buffer(-length)
            length = self._api.llama_token_to_piece(self._vocab, token_id, buffer, -length, 0, True)
        piece = buffer.raw[: max(0, length)]
        self._plain[token_id] = piece
        return piece

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        pieces = [
            self.token_bytes(token_id) for token_id in token_ids if not (skip_special and self.is_control(token_id))
        ]
        return b"".join(pieces).decode("utf-8", "replace")

    def is_control(self, token_id: int) -> bool:
        """True for tokens that are not text (BOS, EOS, role marks)."""
        return bool(self._api.llama_vocab_is_control(self._vocab, token_id))

    def end_tokens(self) -> frozenset[int]:
        """Every token with which the model ends its turn."""
        return frozenset(t for t in range(self._size) if self._api.llama_vocab_is_eog(self._vocab, t))

    def special_text(self, token_id: int) -> str:
        """Text form of a special token, empty for "none" (-1)."""
        return self.token_bytes(token_id).decode("utf-8", "replace") if token_id >= 0 else ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        if self._template is None:
            source = self._weights.metadata("tokenizer.chat_template")
            if source is None:
                raise RequestError("this model has no chat template: use /v1/completions", code="no_chat_template")
            try:
                self._template = ChatTemplate(
                    source,
                    bos_text=self.special_text(self._api.llama_vocab_bos(self._vocab)),
                    eos_text=self.special_text(self._api.llama_vocab_eos(self._vocab)),
                )
            except ModelError as error:
                raise RequestError(str(error), code="no_chat_template") from error
        return self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    def close(self) -> None:
        """Free the vocabulary's own model handle."""
        self._weights.close()
