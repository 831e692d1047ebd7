"""Chunks of an OpenAI-compatible stream as outputs. Lenient in what it takes: servers differ."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from headrace.errors import RemoteFailure
from headrace.messages.engine import FinishReason, TokenLogprob

UNKNOWN_TOKEN: Final = -1
_SHOWN_CHARS: Final = 300


class _Delta(Struct, gc=False):
    content: str | None = None
    reasoning_content: Raw | UnsetType = UNSET
    reasoning: Raw | UnsetType = UNSET
    tool_calls: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    refusal: Raw | UnsetType = UNSET


class _Choice(Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    logprobs: Raw | UnsetType = UNSET
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class _Cached(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    """What an engine counted."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Cached | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0


class Chunk(Struct, gc=False):
    """One event of a stream."""

    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Raw | UnsetType = UNSET
    message: Raw | UnsetType = UNSET


_BESIDES_TEXT: Final = ("reasoning_content", "reasoning", "tool_calls", "function_call", "refusal")
_EMPTY: Final = frozenset({b"null", b'""', b"[]"})
_FINISH: Final[dict[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "abort": "error",
    "error": "error",
}
_decode = msgspec.json.Decoder(Chunk).decode


class Piece(NamedTuple):
    """What a chunk added: text, tokens, how it ends."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    delta: bytes | None
    finish: FinishReason | None
    stop_reason: str | int | None


def read_chunk(data: bytes) -> Chunk:
    """One event's data. Raises RemoteFailure: junk, or an error that the engine says in its stream."""
    try:
        chunk = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RemoteFailure("the engine sent an event that is no chunk of an answer", kind="junk") from error
    if chunk.error is not UNSET and bytes(chunk.error) != b"null":
        raise RemoteFailure(f"the engine broke off: {error_message(data)}", kind="cut")
    if chunk.choices is None and chunk.usage is None:
        raise RemoteFailure("the engine sent an event that is no chunk of an answer", kind="junk")
    return chunk


def piece_of(choice: _Choice) -> Piece | None:
    """What one choice says; None when it says nothing (a role, an empty text)."""
    delta, text, extra = choice.delta, choice.text, None
    if delta is not None:
        text = delta.content
        extra = _besides_text(delta)
    token_ids = choice.token_ids or []
    if not (text or extra or choice.finish_reason or token_ids):
        return None
    logprobs = None
    if choice.logprobs is not UNSET and bytes(choice.logprobs) != b"null":
        logprobs = _logprobs(bytes(choice.logprobs), token_ids)
    finish = None
    if choice.finish_reason is not None:
        finish = _FINISH.get(choice.finish_reason, "stop")
    return Piece(text or "", token_ids, logprobs, extra, finish, choice.stop_reason)


def error_message(body: bytes) -> str:
    """The message of an error in one of the forms that servers use; a person may read it."""
    try:
        error = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "no reason given"
    for _ in range(3):
        if not isinstance(error, dict):
            break
        error = error.get("error") or error.get("message") or error.get("detail")
    text = error if isinstance(error, str) else msgspec.json.encode(error).decode() if error else "no reason given"
    return "".join(char if char.isprintable() else " " for char in text[:_SHOWN_CHARS])


def _besides_text(delta: _Delta) -> bytes | None:
    """The members of a delta besides its text, as a JSON object; None when there are none."""
    if (
        delta.reasoning_content is UNSET
        and delta.tool_calls is UNSET
        and delta.reasoning is UNSET
        and delta.refusal is UNSET
        and delta.function_call is UNSET
    ):
        return None
    found: dict[str, Raw] = {}
    for name in _BESIDES_TEXT:
        value = getattr(delta, name)
        if value is not UNSET and bytes(value) not in _EMPTY:
            found[name] = value
    return msgspec.json.encode(found) if found else None


def _logprobs(raw: bytes, token_ids: list[int]) -> list[TokenLogprob] | None:
    """Log-probabilities in the chat form (``content``) or the text form (parallel lists)."""
    try:
        said = msgspec.json.decode(raw)
        entries = _chat_form(said) if isinstance(said.get("content"), list) else _text_form(said)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RemoteFailure("the engine sent log-probabilities that cannot be read", kind="junk") from error
    if len(entries) != len(token_ids):
        return entries or None
    return [
        TokenLogprob(token_id, entry.token_bytes, entry.logprob, entry.top)
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]


def _chat_form(said: dict[str, Any]) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            UNKNOWN_TOKEN,
            _token_bytes(entry),
            float(entry["logprob"]),
            [(UNKNOWN_TOKEN, _token_bytes(top), float(top["logprob"])) for top in entry.get("top_logprobs") or ()],
        )
        for entry in said["content"]
    ]


def _token_bytes(entry: dict[str, Any]) -> bytes:
    exact = entry.get("bytes")
    return bytes(exact) if isinstance(exact, list) else str(entry["token"]).encode()


def _text_form(said: dict[str, Any]) -> list[TokenLogprob]:
    tokens = said.get("tokens") or []
    values = said.get("token_logprobs") or [None] * len(tokens)
    tops = said.get("top_logprobs") or [None] * len(tokens)
    return [
        TokenLogprob(
            UNKNOWN_TOKEN,
            str(token).encode(),
            None if value is None else float(value),
            sorted(
                ((UNKNOWN_TOKEN, str(name).encode(), float(chance)) for name, chance in (top or {}).items()),
                key=lambda item: -item[2],
            ),
        )
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]
