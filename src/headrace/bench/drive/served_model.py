"""Which model a server serves, and how long its context is, as far as the server says it.

Read from ``GET /v1/models`` (headrace, vLLM and SGLang: ``max_model_len``; llama-server: ``meta.n_ctx``, the context
of one slot), else from ``GET /props`` (older llama-servers). A model's training context (``n_ctx_train``) is not
looked at: a server may hold less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec import Struct

from headrace.errors import ConfigError

Get = Callable[[str], tuple[int, bytes]]
"""GET a path of the target: status and body. Raises what the client raises when there is no answer."""


class ServedModel(NamedTuple):
    """``context_tokens`` None: the server does not say."""

    name: str
    context_tokens: int | None


class _Meta(Struct):
    n_ctx: int | None = None


class _Model(Struct):
    id: str
    max_model_len: int | None = None
    meta: _Meta | None = None


class _Models(Struct):
    data: list[_Model]


class _Settings(Struct):
    n_ctx: int | None = None


class _Props(Struct):
    default_generation_settings: _Settings | None = None


def served_model(get: Get, wanted: str | None = None) -> ServedModel:
    """The model named ``wanted``, or the first that the server lists.

    Raises ConfigError when no name is wanted and the server lists none, and what ``get`` raises.
    """
    status, body = get("/v1/models")
    models = _listed(body) if status == 200 else []
    if wanted is None and not models:
        message = f"GET /v1/models lists no model (HTTP status {status}); say which one to ask for"
        raise ConfigError(message, where="--model")
    found = next((model for model in models if wanted in (None, model.id)), None)
    context_tokens = None
    if found is not None:
        context_tokens = found.max_model_len or (found.meta and found.meta.n_ctx)
    return ServedModel(wanted or models[0].id, context_tokens or _context_of_slots(get))


def _listed(body: bytes) -> list[_Model]:
    try:
        return msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []


def _context_of_slots(get: Get) -> int | None:
    status, body = get("/props")
    if status != 200:
        return None
    try:
        settings = msgspec.json.decode(body, type=_Props).default_generation_settings
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return None if settings is None else settings.n_ctx or None
