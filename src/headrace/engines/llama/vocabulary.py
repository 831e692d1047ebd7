"""A model's text side: tokens to bytes and back, special tokens, the chat template's source.

Used by the engine process over the full weights and by the gateway over a vocabulary-only load. libllama's
tokenizer only reads the vocabulary, so calls from several threads at once are safe.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.engines.llama.chat_template import ChatTemplate
from headrace.engines.llama.library import Library
from headrace.engines.llama.weights import Weights
from headrace.errors import ContextTooLong, ModelError, RequestError

_PIECE_BYTES = 16 * 1024


class Vocabulary:
    """Implements ``engines.protocol.Tokenizer``."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._api = weights.library.api
        self._vocab = weights.vocab
        self._size = weights.vocab_size
        self._plain: dict[int, bytes] = {}
        self._control: dict[int, bool] = {}
        self._template: ChatTemplate | None = None
        self._special: re.Pattern[bytes] | None = None
        self._longest: int | None = None

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

    def encode(
        self, text: str, *, add_special: bool, parse_special: bool, limit_tokens: int | None = None
    ) -> list[int]:
        data = text.encode("utf-8", "surrogatepass") if not text.isascii() else text.encode()
        if limit_tokens is not None and len(data) > limit_tokens * self._longest_token_bytes():
            raise ContextTooLong(f"{len(data)} bytes of prompt cannot fit a context of {limit_tokens} tokens")
        if not parse_special or len(data) <= _PIECE_BYTES:
            return self._encode_bytes(data, add_special, parse_special)
        tokens: list[int] = []
        pieces = self._pieces(data)
        for index, piece in enumerate(pieces):
            # BOS and EOS belong to the whole text: libllama may add them where the first and last piece end.
            add = add_special and index in (0, len(pieces) - 1)
            encoded = self._encode_bytes(piece, add, parse_special)
            if add and index == 0 and len(pieces) > 1 and self._api.llama_vocab_get_add_eos(self._vocab):
                encoded = encoded[:-1]
            if add and index > 0 and self._api.llama_vocab_get_add_bos(self._vocab):
                encoded = encoded[1:]
            tokens += encoded
            if limit_tokens is not None and len(tokens) > limit_tokens:
                raise ContextTooLong(f"the prompt has more than the {limit_tokens} tokens that the context holds")
        return tokens

    def _pieces(self, data: bytes) -> list[bytes]:
        """``data`` cut right before special tokens, where tokenizing starts afresh anyway, into pieces of about
        ``_PIECE_BYTES``: libllama's time grows with the square of the special tokens in one call."""
        if self._special is None:
            texts = {self.token_bytes(token) for token in range(self._size) if self.is_control(token)} - {b""}
            longest_first = sorted(texts, key=lambda text: (-len(text), text))
            self._special = re.compile(b"|".join(map(re.escape, longest_first)) or b"(?!)")
        cuts = [0]
        for match in self._special.finditer(data):
            if match.start() - cuts[-1] >= _PIECE_BYTES:
                cuts.append(match.start())
        return [data[start:end] for start, end in zip(cuts, [*cuts[1:], len(data)], strict=True)]

    def _longest_token_bytes(self) -> int:
        if self._longest is None:
            self._longest = max(len(self.token_bytes(token)) for token in range(self._size))
        return self._longest

    def _encode_bytes(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        capacity = len(data) + 8
        tokens = (self._api.llama_token * capacity)()
        count = self._api.llama_tokenize(self._vocab, data, len(data), tokens, capacity, add_special, parse_special)
        if count < 0:
            capacity = -count
            tokens = (self._api.llama_token * capacity)()
            count = self._api.llama_tokenize(self._vocab, data, len(data), tokens, capacity, add_special, parse_special)
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
        known = self._control.get(token_id)
        if known is None:
            known = self._control[token_id] = bool(self._api.llama_vocab_is_control(self._vocab, token_id))
        return known

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
