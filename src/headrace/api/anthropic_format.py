"""Answers of the Messages API: whole bodies and stream events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headrace.api.answer import Answer, usage
from headrace.api.anthropic_errors import in_anthropic_form
from headrace.api.chat_format import message_of
from headrace.api.errors import HttpError
from headrace.api.parts import Part, parts_of
from headrace.api.plan import Plan
from headrace.messages.engine import SequenceOutput

_encode = msgspec.json.Encoder().encode
_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_TEXT_DELTA: Final = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":'
)


class MessagesFormat:
    """Writes one request's answer.

    A block of text or thinking ends where the next begins. Tool calls stay open until the answer ends, since an engine
    may send pieces of several in turn.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._id = "msg_" + plan.id.removeprefix("chatcmpl-")
        self._blocks = 0
        self._open: str | None = None
        self._tools: dict[int, int] = {}
        self._written: tuple[SequenceOutput, bytes] | None = None

    def opening(self) -> bytes:
        """Nothing: the first event needs the first output's counts."""
        return b""

    def chunk(self, index: int, output: SequenceOutput) -> bytes:
        """One engine output as events. Asked again for the same output it gives the same events."""
        if self._written is not None and self._written[0] is output:
            return self._written[1]
        events = self._start(output) if self._written is None else b""
        if self._open == "text" and output.delta is None:
            if output.text:
                events += _TEXT_DELTA % (self._blocks - 1) + _encode(output.text) + b"}}\n\n"
        else:
            events += b"".join([self._part(part) for part in parts_of(output)])
        self._written = output, events
        return events

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """The end of the last blocks, why it ended, and the counts."""
        reason, sequence = _stop(answers[0])
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        end = {"type": "message_delta", "delta": delta, "usage": _usage(self._plan, answers)}
        return self._end_block() + self._end_tools() + _event(end) + _event({"type": "message_stop"})

    def failure(self, error: HttpError) -> bytes:
        """An event that holds the error."""
        return b"event: error\ndata: " + in_anthropic_form(error).body + b"\n\n"

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole ``message`` object."""
        answer = answers[0]
        reason, sequence = _stop(answer)
        return {
            **self._head(),
            "content": _content(answer, self._id),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(self._plan, answers),
        }

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._plan.model}

    def _start(self, output: SequenceOutput) -> bytes:
        prompt_tokens = output.prompt_tokens or self._plan.prompt_tokens
        counts = _counts(prompt_tokens, output.cached_tokens, output.tokens)
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
        return _event({"type": "message_start", "message": message})

    def _part(self, part: Part) -> bytes:
        match part.kind:
            case "text":
                begin = self._begin("text", {"type": "text", "text": ""})
                return begin + self._delta({"type": "text_delta", "text": part.text})
            case "reasoning":
                begin = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return begin + self._delta({"type": "thinking_delta", "thinking": part.text})
            case "tool":
                if part.tool_index in self._tools:
                    return b""
                begin = self._end_block()
                self._tools[part.tool_index] = self._blocks
                tool_id = part.tool_id or _tool_id(self._id, part.tool_index)
                return begin + self._add({"type": "tool_use", "id": tool_id, "name": part.text, "input": {}})
            case "arguments":
                if part.tool_index not in self._tools:
                    return b""
                delta = {"type": "input_json_delta", "partial_json": part.text}
                return self._delta(delta, self._tools[part.tool_index])

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        end = self._end_block()
        self._open = kind
        return end + self._add(block)

    def _add(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})

    def _delta(self, delta: dict[str, Any], index: int | None = None) -> bytes:
        index = self._blocks - 1 if index is None else index
        return _event({"type": "content_block_delta", "index": index, "delta": delta})

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event({"type": "content_block_stop", "index": self._blocks - 1})

    def _end_tools(self) -> bytes:
        return b"".join([_event({"type": "content_block_stop", "index": index}) for index in self._tools.values()])


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), _encode(data))


def _content(answer: Answer, message_id: str) -> list[dict[str, Any]]:
    message = message_of(answer)
    blocks: list[dict[str, Any]] = []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    text = message["content"] or message.get("refusal")
    if text:
        blocks.append({"type": "text", "text": text})
    calls = message.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") or {}
        blocks.append(
            {
                "type": "tool_use",
                "id": call.get("id") or _tool_id(message_id, index),
                "name": function.get("name") or "",
                "input": _input(function.get("arguments") or "{}"),
            }
        )
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. A model may write none, or be cut off within it: then they come as text."""
    try:
        said = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        said = None
    return said if isinstance(said, dict) else {"INVALID_JSON": arguments}


def _tool_id(message_id: str, index: int) -> str:
    return f"toolu_{message_id.removeprefix('msg_')}_{index}"


def _stop(answer: Answer) -> tuple[str, str | None]:
    if answer.finish == "stop" and isinstance(answer.stop_reason, str):
        return "stop_sequence", answer.stop_reason
    return _STOP_REASONS.get(answer.finish, "end_turn"), None


def _usage(plan: Plan, answers: Sequence[Answer]) -> dict[str, int]:
    said: dict[str, Any] = usage(plan, answers)
    return _counts(said["prompt_tokens"], said["prompt_tokens_details"]["cached_tokens"], said["completion_tokens"])


def _counts(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, int]:
    """In this API the tokens of the prompt that were computed and those that were cached are counted apart."""
    return {
        "input_tokens": max(0, prompt_tokens - cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
