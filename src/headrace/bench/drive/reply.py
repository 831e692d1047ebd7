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
from headrace.bench.drive.usage import Counts, NotCredible, most_credible_tokens, read_usage

MAX_ERROR_CHARS = 300
"""How much of a text of the server's (an error, an id, a finish reason) a record keeps."""


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


class _Answer(Struct, gc=False):
    id: Any = None
    object: Any = None
    choices: list[_Choice | None] | None = None
    usage: msgspec.Raw = msgspec.Raw()  # read apart: a wrong one does not make the answer wrong
    error: Any = None
    message: Any = None
    detail: Any = None


_decode_answer = msgspec.json.Decoder(_Answer).decode


class Reply:
    """Collects one answer. ``take`` every event of a stream, or ``take_whole`` the one body.

    ``chunk_ns`` holds the time of every chunk with content. ``error`` is the first thing that makes this no
    answer: an error event, or bytes that are not what the API sends. ``done``: ``[DONE]`` came.
    ``asked_tokens``: the limit that the request set to each choice's output; None: not known.
    """

    def __init__(self, *, keep_text: bool = False, asked_tokens: int | None = None) -> None:
        self.asked_tokens = asked_tokens
        self.chunk_ns: list[int] = []
        self.finish_reason: str | None = None
        self.id: str | None = None
        self.error: str | None = None
        self.done = False
        self._keep_text = keep_text
        self._text: list[str] = []
        self._counts = Counts()
        self._doubt: str | None = None
        self._choices = 1
        self._characters = 0
        self._per_chunk: list[int] = []
        self._counted_tokens = 0  # in the chunks so far
        self._last_count = 0
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
        (``continuous_usage_stats``) and its count never went back; else empty. Their sum is at most the answer's
        tokens: the last ones may show no text."""
        total = self.completion_tokens
        return self._per_chunk if self._per_chunk_known and total is not None and self._counted_tokens <= total else []

    @property
    def usage_note(self) -> str | None:
        """Why the server's usage is not believed; None when it is, or when there was none."""
        if self._doubt is not None or self._counts.completion is None or self.asked_tokens is None:
            return self._doubt
        most = most_credible_tokens(
            asked=self.asked_tokens,
            choices=self._choices,
            chunks=len(self.chunk_ns),
            characters=self._characters,
        )
        if self._counts.completion <= most:
            return None
        return (
            f"usage: completion_tokens is {self._counts.completion}; {self.asked_tokens} were asked for and "
            f"{self._characters} characters came in {len(self.chunk_ns)} chunks"
        )

    @property
    def counts(self) -> Counts:
        """The server's counts, as far as they are believed."""
        return self._counts if self.usage_note is None else Counts()

    @property
    def completion_tokens(self) -> int | None:
        return self.counts.completion

    @property
    def prompt_tokens(self) -> int | None:
        return self.counts.prompt

    @property
    def cached_tokens(self) -> int | None:
        return self.counts.cached

    def take(self, event: SseEvent, at_ns: int) -> None:
        """One event of a stream that was complete at ``at_ns``."""
        if event.data == b"[DONE]":
            self.done = True
            return
        if event.type == "error":
            self.fail(error_text(event.data))
            return
        if event.data == b"null":  # says nothing, and so does no harm
            return
        answer = self._decode(event.data, "an event of the stream")
        if answer is None:
            return
        has_content = False
        for choice in answer.choices or ():
            if choice is None:
                continue
            part = choice.delta
            if choice.text or (part is not None and part.has_content):
                has_content = True
            self._finish(choice, part)
        self._take_chunk(answer, at_ns, has_content=has_content)
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
            if choice is None:
                continue
            part = choice.message
            if choice.text or (part is not None and part.has_content):
                has_content = True
            self._finish(choice, part)
        self._take_chunk(answer, at_ns, has_content=has_content)
        self.done = True

    def fail(self, message: str) -> None:
        """This is no answer, because of ``message``; the first reason stays."""
        if self.error is None:
            self.error = message[:MAX_ERROR_CHARS]

    def _decode(self, data: bytes, what: str) -> _Answer | None:
        try:
            return _decode_answer(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.fail(f"{what} is not OpenAI's: {error}: {_shown(data)}")
            return None

    def _finish(self, choice: _Choice, part: _Part | None) -> None:
        if choice.finish_reason is not None:
            self.finish_reason = _reason(choice.finish_reason)
        text = choice.text or (part.content if part is not None else None)
        if self._keep_text and isinstance(text, str):
            self._text.append(text)
        if part is not None:
            text = text or part.reasoning_content or part.reasoning or part.refusal
        if isinstance(text, str):
            self._characters += len(text)

    def _take_common(self, answer: _Answer) -> None:
        if self.id is None and isinstance(answer.id, str):
            self.id = answer.id[:MAX_ERROR_CHARS]
        if answer.error is not None:
            self.fail(_message_of(answer.error))
        elif answer.object == "error":  # SGLang's and older vLLM's shape
            self.fail(_message_of(answer.message))

    def _take_chunk(self, answer: _Answer, at_ns: int, *, has_content: bool) -> None:
        """The chunk's time, and its usage: the last one that came is the server's final word, wherever in the
        stream it stood. Once a count cannot be, none of the answer's is believed."""
        if answer.choices is not None and len(answer.choices) > self._choices:
            self._choices = len(answer.choices)
        if has_content:
            self.chunk_ns.append(at_ns)
        try:
            counts = read_usage(answer.usage)
        except NotCredible as error:
            self._doubt = self._doubt or str(error)[:MAX_ERROR_CHARS]
            counts = None
        if counts is not None:
            self._counts = counts
        if self._per_chunk_known:
            self._count_tokens(None if counts is None else counts.completion, has_content=has_content)

    def _count_tokens(self, counted: int | None, *, has_content: bool) -> None:
        """The tokens since the last chunk with content: some tokens show no text of their own, and belong to
        the chunk that shows them."""
        if counted is None:
            self._per_chunk_known = not has_content
            return
        if counted < self._last_count:
            self._per_chunk_known = False
            return
        self._last_count = counted
        if has_content:
            self._per_chunk.append(counted - self._counted_tokens)
            self._counted_tokens = counted


def error_text(body: bytes) -> str:
    """The message in an error body (OpenAI's, FastAPI's or SGLang's shape), or the body's beginning."""
    try:
        answer = _decode_answer(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _shown(body)
    for value in (answer.error, answer.detail, answer.message):
        if value is not None:
            return _message_of(value)
    return _shown(body)


def _reason(value: Any) -> str:
    """A finish reason is a word; what is something else is shown as JSON."""
    return value[:MAX_ERROR_CHARS] if isinstance(value, str) else _shown(msgspec.json.encode(value))


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
