"""What an OpenAI-compatible server's answer says: content, usage, end, error. Chunks of a stream and whole bodies.

A chunk has *content* when the model generated something that it carries: text, reasoning, a refusal, a piece of
a tool call; in completions, ``text``. A first delta with only a role, an empty delta and a chunk with only
``usage`` have none. Unknown fields are ignored, so that servers may add what they like.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from headrace.bench.drive.sse import SseEvent

MAX_ERROR_CHARS = 300
"""How much of a server's error text a record keeps."""


class _Part(Struct, gc=False):
    """``delta`` of a stream's choice, or ``message`` of a whole one."""

    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None

    @property
    def has_content(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.tool_calls
            or self.refusal
            or self.function_call
        )


class _Choice(Struct, gc=False):
    delta: _Part | None = None
    message: _Part | None = None
    text: str | None = None
    finish_reason: Any = None


class _PromptDetails(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    prompt_cache_hit_tokens: int | None = None


class _Answer(Struct, gc=False):
    id: Any = None
    object: Any = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    message: Any = None
    detail: Any = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class Reply:
    """Collects one answer. ``take`` every event of a stream, or ``take_whole`` the one body.

    ``chunk_ns`` holds the time of every chunk with content. ``error`` is the first thing that makes this no
    answer: an error event, or bytes that are not what the API sends. ``done``: ``[DONE]`` came.
    """

    def __init__(self, *, keep_text: bool = False) -> None:
        self.chunk_ns: list[int] = []
        self.finish_reason: str | None = None
        self.id: str | None = None
        self.error: str | None = None
        self.done = False
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self._keep_text = keep_text
        self._text: list[str] = []
        self._per_chunk: list[int] = []
        self._counted_tokens = 0
        self._per_chunk_known = True

    @property
    def whole(self) -> bool:
        """The model's end was reached: a finish reason or ``[DONE]`` came, and no error."""
        return self.error is None and (self.done or self.finish_reason is not None)

    @property
    def text(self) -> str:
        """The visible text; empty unless ``keep_text``."""
        return "".join(self._text)

    @property
    def chunk_tokens(self) -> list[int]:
        """Tokens of each chunk in ``chunk_ns``, where the server counted in every one of them
        (``continuous_usage_stats``); else empty."""
        return self._per_chunk if self._per_chunk_known else []

    def take(self, event: SseEvent, at_ns: int) -> None:
        """One event of a stream that was complete at ``at_ns``."""
        if event.data == b"[DONE]":
            self.done = True
            return
        if event.type == "error":
            self.fail(error_text(event.data))
            return
        answer = self._decode(event.data, "an event of the stream")
        if answer is None:
            return
        has_content = False
        for choice in answer.choices or ():
            part = choice.delta
            if choice.text or (part is not None and part.has_content):
                has_content = True
            self._finish(choice, part)
        if has_content:
            self.chunk_ns.append(at_ns)
            self._count_chunk(answer.usage)
        self._take_common(answer)

    def take_whole(self, body: bytes, at_ns: int) -> None:
        """A whole body that had arrived at ``at_ns``: its content counts as one chunk."""
        answer = self._decode(body, "the answer")
        if answer is None:
            return
        self._take_common(answer)
        if not answer.choices:
            self.fail("the answer has no choices: " + error_text(body))
            return
        has_content = False
        for choice in answer.choices:
            part = choice.message
            if choice.text or (part is not None and part.has_content):
                has_content = True
            self._finish(choice, part)
        if has_content:
            self.chunk_ns.append(at_ns)
            self._count_chunk(answer.usage)
        self.done = True

    def fail(self, message: str) -> None:
        """This is no answer, because of ``message``; the first reason stays."""
        if self.error is None:
            self.error = message[:MAX_ERROR_CHARS]

    def _decode(self, data: bytes, what: str) -> _Answer | None:
        try:
            return _decode_answer(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.fail(f"{what} is not OpenAI's: {error}: {_shown(data)}")
            return None

    def _finish(self, choice: _Choice, part: _Part | None) -> None:
        if choice.finish_reason is not None:
            self.finish_reason = str(choice.finish_reason)
        if self._keep_text:
            text = choice.text or (part.content if part is not None else None)
            if isinstance(text, str):
                self._text.append(text)

    def _take_common(self, answer: _Answer) -> None:
        if self.id is None and isinstance(answer.id, str):
            self.id = answer.id
        if answer.error is not None:
            self.fail(_message_of(answer.error))
        elif answer.object == "error":  # SGLang's and older vLLM's shape
            self.fail(_message_of(answer.message))
        usage = answer.usage
        if usage is None or usage.completion_tokens is None:
            return
        # The last one that came is the server's final word, wherever in the stream it stood.
        self.completion_tokens = usage.completion_tokens
        self.prompt_tokens = usage.prompt_tokens
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            self.cached_tokens = details.cached_tokens
        elif usage.prompt_cache_hit_tokens is not None:
            self.cached_tokens = usage.prompt_cache_hit_tokens

    def _count_chunk(self, usage: _Usage | None) -> None:
        """The tokens since the last chunk with content: some tokens show no text of their own, and belong to
        the chunk that shows them."""
        if not self._per_chunk_known:
            return
        counted = usage.completion_tokens if usage is not None else None
        if counted is None or counted < self._counted_tokens:
            self._per_chunk_known = False
            return
        self._per_chunk.append(counted - self._counted_tokens)
        self._counted_tokens = counted


def error_text(body: bytes) -> str:
    """The message in an error body (OpenAI's, FastAPI's or SGLang's shape), or the body's beginning."""
    try:
        answer = _decode_answer(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _shown(body)
    for value in (answer.error, answer.detail, answer.message):
        if value is not None:
            return _message_of(value)
    return _shown(body)


def _message_of(value: Any) -> str:
    if isinstance(value, dict):
        message = value.get("message")
        if isinstance(message, str) and message:
            return message[:MAX_ERROR_CHARS]
    if isinstance(value, str):
        return value[:MAX_ERROR_CHARS]
    return _shown(msgspec.json.encode(value))


def _shown(data: bytes) -> str:
    return data[:MAX_ERROR_CHARS].decode("utf-8", "replace")
