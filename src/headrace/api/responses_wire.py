"""Requests of the Responses API as clients send them: types only. Every optional field also accepts null."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Item(Struct, frozen=True):
    """One item of the input. Messages, function calls and their outputs can be served; reasoning is left out."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None


class ItemPart(Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionTool(Struct, frozen=True):
    """A function of the client's. Tools that run on a provider's servers have another ``type``."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Struct, frozen=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
