"""What the truth server answers: the pieces of a response, and the pauses between them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

ChunkKind = Literal["content", "reasoning", "tool", "role", "empty", "comment", "error", "error_event", "broken", "raw"]


class Chunk(Struct, forbid_unknown_fields=True):
    """One event. It begins ``gap_ms`` after the one before; ``split`` are byte offsets at which it is cut, with
    ``pause_ms`` before each further part. ``raw``: ``text`` is written as it is."""

    gap_ms: float = 0
    tokens: int = 1
    text: str = "word "
    kind: ChunkKind = "content"
    split: list[int] = []
    pause_ms: float = 0


class Truth(Struct, forbid_unknown_fields=True):
    """What to do. ``chunks``, or ``tokens`` in chunks of ``tokens_per_chunk`` every ``gap_ms``, the first after
    ``first_ms``. ``body`` is an answer that is no stream. ``end``: how it ends after the last chunk: ``whole``
    (with a finish reason and, unless ``done`` is false, ``[DONE]``), or at once with the connection closed, reset,
    or left open for ever; ``silent`` closes before any answer. ``usage``: where the token counts stand."""

    key: str = ""
    status: int = 200
    headers: dict[str, str] = {}
    headers_delay_ms: float = 0
    body: str | None = None
    body_gap_ms: float = 0
    role_first: bool = True
    chunks: list[Chunk] | None = None
    tokens: int | None = None
    tokens_per_chunk: int = 1
    first_ms: float = 0
    gap_ms: float = 0
    usage: Literal["end", "never", "first", "each", "with_last", "after_done"] = "end"
    prompt_tokens: int = 7
    cached_tokens: int = 3
    finish: bool = True
    done: bool = True
    stay_open_ms: float = 0
    end: Literal["whole", "close", "rst", "stall", "silent"] = "whole"
    chunked: bool = True


class Piece(NamedTuple):
    """Bytes written in one go after a pause; ``completes`` says that a chunk with content ends here."""

    pause_s: float
    data: bytes
    completes: bool = False


class Pauses(NamedTuple):
    first_ms: float
    gap_ms: float


CONTENT_KINDS = ("content", "reasoning", "tool")


def plan_chunks(truth: Truth, max_tokens: int, pauses: Pauses, *, chat: bool) -> list[Chunk]:
    """The chunks of a stream, all written out."""
    if truth.chunks is not None:
        chunks = truth.chunks
    else:
        tokens = max_tokens if truth.tokens is None else truth.tokens
        sizes = [min(truth.tokens_per_chunk, tokens - done) for done in range(0, tokens, truth.tokens_per_chunk)]
        first_ms, gap_ms = truth.first_ms or pauses.first_ms, truth.gap_ms or pauses.gap_ms
        chunks = [Chunk(gap_ms if place else first_ms, size, "word " * size) for place, size in enumerate(sizes)]
    return [Chunk(kind="role", tokens=0), *chunks] if truth.role_first and chat else chunks


def stream_pieces(truth: Truth, chunks: list[Chunk], *, chat: bool) -> Iterator[Piece]:
    """A stream's body as it is written."""
    total = sum(chunk.tokens for chunk in chunks if chunk.kind in CONTENT_KINDS)
    tokens = 0
    last = max((place for place, chunk in enumerate(chunks) if chunk.kind in CONTENT_KINDS), default=-1)
    first = min((place for place, chunk in enumerate(chunks) if chunk.kind in CONTENT_KINDS), default=-1)
    for place, chunk in enumerate(chunks):
        content = chunk.kind in CONTENT_KINDS
        tokens += chunk.tokens if content else 0
        usage = None
        if truth.usage == "each" and chunk.kind in (*CONTENT_KINDS, "role", "empty"):
            usage = tokens
        elif content and (
            (truth.usage == "first" and place == first) or (truth.usage == "with_last" and place == last)
        ):
            usage = total
        data = _event(chunk, _usage(truth, usage), chat=chat)
        yield from _parts(chunk, data, content)
    if truth.end != "whole":
        return
    tail = b""
    if truth.finish:
        choice: dict[str, object] = {"index": 0, "finish_reason": "stop", **({"delta": {}} if chat else {"text": ""})}
        tail += _data({"id": "truth-1", "choices": [choice]})
    usage_event = _data({"id": "truth-1", "choices": [], "usage": _usage(truth, total)})
    if truth.usage == "end":
        tail += usage_event
    if truth.done:
        tail += b"data: [DONE]\n\n"
    yield Piece(0, tail)
    if truth.usage == "after_done":
        yield Piece(truth.stay_open_ms / 1e3, usage_event)
    elif truth.stay_open_ms:
        yield Piece(truth.stay_open_ms / 1e3, b"")


def whole_body(truth: Truth, max_tokens: int, *, chat: bool) -> bytes:
    """An answer that is no stream."""
    if truth.body is not None:
        return truth.body.encode()
    tokens = max_tokens if truth.tokens is None else truth.tokens
    text = "word " * tokens
    said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    answer: dict[str, object] = {"id": "truth-1", "choices": [{"index": 0, "finish_reason": "length", **said}]}
    if truth.usage != "never":
        answer["usage"] = _usage(truth, tokens)
    return msgspec.json.encode(answer)


def _usage(truth: Truth, tokens: int | None) -> dict[str, object] | None:
    if tokens is None:
        return None
    return {
        "prompt_tokens": truth.prompt_tokens,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": truth.cached_tokens},
    }


def _event(chunk: Chunk, usage: dict[str, object] | None, *, chat: bool) -> bytes:
    match chunk.kind:
        case "raw":
            return chunk.text.encode()
        case "comment":
            return b": keep-alive\n\n"
        case "error":
            return _data({"error": {"message": chunk.text, "code": 500}})
        case "error_event":
            return b"event: error\n" + _data({"message": chunk.text})
        case "broken":
            return b'data: {"choices": [{]}\n\n'
    delta: dict[str, object] = {}
    if chunk.kind == "role":
        delta = {"role": "assistant", "content": ""}
    elif chunk.kind == "reasoning":
        delta = {"reasoning_content": chunk.text}
    elif chunk.kind == "tool":
        delta = {"tool_calls": [{"index": 0, "function": {"arguments": chunk.text}}]}
    elif chunk.kind == "content":
        delta = {"content": chunk.text}
    choice: dict[str, object] = {"index": 0, "finish_reason": None}
    choice |= {"delta": delta} if chat else {"text": delta.get("content", "")}
    fields: dict[str, object] = {"id": "truth-1", "object": "chat.completion.chunk", "choices": [choice]}
    return _data(fields if usage is None else {**fields, "usage": usage})


def _data(fields: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def _parts(chunk: Chunk, data: bytes, content: bool) -> Iterator[Piece]:
    edges = [0, *chunk.split, len(data)]
    for place, (start, end) in enumerate(pairwise(edges)):
        pause_ms = chunk.pause_ms if place else chunk.gap_ms
        yield Piece(pause_ms / 1e3, data[start:end], content and end == len(data))
