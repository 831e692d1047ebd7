"""Requests as clients send them: types only, ranges are checked in ``sampling`` and ``prompts``.

Every optional field also accepts null, which means its default.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(Struct, frozen=True):
    """One part of a message's content. Only ``text`` (and ``refusal``) parts can be served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Message(Struct, frozen=True):
    """One chat message. ``tool_calls`` go to the chat template as they are."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ResponseFormat(Struct, frozen=True):
    type: str


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """POST /v1/completions. ``prompt`` is a string, a list of strings, a list of token ids or a list of
    lists of token ids."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /tokenize: one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class MetadataUpdate(Struct, frozen=True, kw_only=True):
    """POST /v1/chat/completions/{id}."""

    metadata: dict[str, str] | None
