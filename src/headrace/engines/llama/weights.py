"""One model file opened by libllama: its weights (or only its vocabulary) and what its metadata says."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from headrace.engines.llama.library import Library
from headrace.errors import ModelError
from headrace.kv.budget import kv_bytes_per_token
from headrace.messages.engine import ModelInfo


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

    def kv_bytes_per_token(self) -> int:
        """F16 KV bytes per token, from layers, KV heads and key and value lengths."""
        api = self.library.api
        architecture = self.metadata("general.architecture") or ""
        heads = max(1, api.llama_model_n_head(self.handle))
        head_length = api.llama_model_n_embd(self.handle) // heads
        return kv_bytes_per_token(
            layers=api.llama_model_n_layer(self.handle),
            kv_heads=max(1, api.llama_model_n_head_kv(self.handle)),
            key_length=self._number(f"{architecture}.attention.key_length") or head_length,
            value_length=self._number(f"{architecture}.attention.value_length") or head_length,
        )

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
