"""Requests of the Messages API as clients send them: types only. Every optional field also accepts null."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Block(Struct, frozen=True):
    """A content block. ``text``, ``tool_use``, ``tool_result`` and thinking can be served."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class Turn(Struct, frozen=True):
    """One message."""

    role: str
    content: str | list[Block]


class Tool(Struct, frozen=True):
    """A tool of the client's. Those that run on a provider's servers have another ``type`` than ``custom``."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct, frozen=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, frozen=True):
    format: OutputFormat | None = None


class UserMetadata(Struct, frozen=True):
    user_id: str | None = None


class Conversation(Struct, frozen=True, kw_only=True):
    """What a request to generate and one to count have in common."""

    model: str
    messages: list[Turn]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None


class CountRequest(Conversation, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(Conversation, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: UserMetadata | None = None
