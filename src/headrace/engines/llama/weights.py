"""One model file opened by libllama: its weights (or only its vocabulary) and what its metadata says."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from headrace.engines.llama.library import Library
from headrace.errors import ModelError
from headrace.kv.layout import Cache, KvLayout, attention_rows
from headrace.kv.libllama_memory import bytes_per_token
from headrace.messages.engine import ModelInfo
from headrace.plan.gguf_layout import describe_gguf


class Weights:
    """A loaded model. ``handle`` and ``vocab`` are libllama's pointers; ``close`` frees them."""

    def __init__(self, library: Library, path: Path, *, vocab_only: bool = False, gpu_layers: int = 0) -> None:
        """Raises ModelError when the file is missing, not a GGUF, truncated, or of an unknown architecture."""
        self.library = library
        self.path = path
        api = library.api
        if not path.is_file():
            raise ModelError(f"no model file at {path}")
        params = api.llama_model_default_params()
        params.vocab_only = vocab_only
        params.n_gpu_layers = gpu_layers
        self.handle: Any = api.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise ModelError(f"libllama cannot load {path}: {library.recent_log() or 'no reason given'}")
        self.vocab: Any = api.llama_model_get_vocab(self.handle)
        self.vocab_size: int = api.llama_vocab_n_tokens(self.vocab)
        self._layout: KvLayout | None = None
        self.layout_doubt = ""
        """After ``kv_layout``: why the layout is only an upper bound; empty when it is exact."""

    def close(self) -> None:
        """Free the model. Contexts over it must be closed before."""
        if self.handle:
            self.library.api.llama_model_free(self.handle)
            self.handle = None

    def metadata(self, key: str) -> str | None:
        """A metadata value as text, or None when the file has no such key."""
        size = 4096
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = self.library.api.llama_model_meta_val_str(self.handle, key.encode(), buffer, size)
            if length < 0:
                return None
            if length < size:
                return buffer.raw[:length].decode("utf-8", "replace")
            size = length + 1

    def _number(self, key: str) -> int | None:
        value = self.metadata(key)
        return int(value) if value is not None and value.isdecimal() else None

    def kv_layout(self) -> KvLayout:
        """How the model keeps its KV memory, as ``headrace plan kv`` reads it from the same file."""
        if self._layout is None:
            try:
                self._layout = describe_gguf(self.path).layout
            except ModelError as error:
                self.layout_doubt = str(error)
                self._layout = self._full_attention()
        return self._layout

    def _full_attention(self) -> KvLayout:
        """The most it can be: every layer keeps keys and values of every token."""
        api = self.library.api
        architecture = self.metadata("general.architecture") or ""
        head_length = api.llama_model_n_embd(self.handle) // max(1, api.llama_model_n_head(self.handle))
        rows = attention_rows(
            max(1, api.llama_model_n_head_kv(self.handle)),
            self._number(f"{architecture}.attention.key_length") or head_length,
            self._number(f"{architecture}.attention.value_length") or head_length,
        )
        return KvLayout((Cache("every token", api.llama_model_n_layer(self.handle), rows),))

    def kv_bytes_per_token(self) -> int:
        """F16 KV bytes that libllama takes per token of a stream, states aside."""
        return bytes_per_token(self.kv_layout())

    def info(self, name: str, max_context_tokens: int) -> ModelInfo:
        """What is served, for the API and for people."""
        api = self.library.api
        return ModelInfo(
            name=name,
            path=str(self.path),
            architecture=self.metadata("general.architecture") or "unknown",
            parameters=api.llama_model_n_params(self.handle),
            weight_bytes=api.llama_model_size(self.handle),
            context_train_tokens=api.llama_model_n_ctx_train(self.handle),
            max_context_tokens=max_context_tokens,
            vocab_size=self.vocab_size,
            kv_bytes_per_token=self.kv_bytes_per_token(),
        )
