"""Chat completions on the wire: whole bodies and stream chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headrace.api.answer import Answer, returned, usage
from headrace.api.errors import HttpError
from headrace.api.plan import Plan
from headrace.messages.engine import SequenceOutput, TokenLogprob

DONE: Final = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0
_encode = msgspec.json.Encoder().encode


class ChatFormat:
    """Writes one request's answer. Everything that stays the same in a chunk is encoded once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        head = b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            _encode(plan.id),
            plan.created,
            _encode(plan.model),
        )
        count = len(plan.sequences)
        self._head = head
        self._delta = [head + b'{"index":%d,"delta":{"content":' % index for index in range(count)]
        self._tail = b'],"usage":null}\n\n' if plan.include_usage else b"]}\n\n"
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self) -> bytes:
        """The first chunk of every choice: its role."""
        return b"".join(
            self._head
            + b'{"index":%d,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,' % index
            + b'"finish_reason":null}'
            + self._tail
            for index in range(len(self._plan.sequences))
        )

    def chunk(self, index: int, output: SequenceOutput) -> bytes:
        """One engine output as events; empty when there is nothing to show."""
        events = b""
        if output.delta is not None:
            return self._besides_text(index, output, output.delta)
        if self._plan.logprobs and output.logprobs:
            logprobs = _encode({"content": chat_logprobs(output.logprobs), "refusal": None})
            events = b"".join(
                (
                    self._delta[index],
                    _encode(output.text),
                    b'},"logprobs":',
                    logprobs,
                    b',"finish_reason":null}',
                    self._tail,
                )
            )
        elif output.text:
            events = self._delta[index] + _encode(output.text) + self._plain_end
        if output.finish is not None:
            events += self._head + b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":"%b"}' % (
                index,
                output.finish.encode(),
            )
            events += self._tail
        return events

    def _besides_text(self, index: int, output: SequenceOutput, delta: bytes) -> bytes:
        """A delta of a remote engine that is more than text: tool calls, reasoning."""
        if output.text:
            delta = b'{"content":' + _encode(output.text) + b"," + delta[1:]
        logprobs = b"null"
        if self._plan.logprobs and output.logprobs:
            logprobs = _encode({"content": chat_logprobs(output.logprobs), "refusal": None})
        return b"".join(
            (
                self._head,
                b'{"index":%d,"delta":' % index,
                delta,
                b',"logprobs":',
                logprobs,
                b',"finish_reason":null}',
                self._tail,
            )
        )

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """The usage chunk, when asked for, and the end's mark."""
        if not self._plan.include_usage:
            return DONE
        return self._head + b'],"usage":%b}\n\n' % _encode(usage(self._plan, answers)) + DONE

    def failure(self, error: HttpError) -> bytes:
        """An event that holds the error."""
        return b"data: " + error.body + b"\n\n"

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole ``chat.completion`` object."""
        plan = self._plan
        return {
            "id": plan.id,
            "object": "chat.completion",
            "created": plan.created,
            "model": plan.model,
            "choices": [
                {
                    "index": position,
                    "message": message_of(answer),
                    "logprobs": (
                        {"content": chat_logprobs(answer.logprobs), "refusal": None} if plan.logprobs else None
                    ),
                    "finish_reason": answer.finish,
                }
                for position, (_, answer) in enumerate(returned(plan, answers))
            ],
            "usage": usage(plan, answers),
        }


def message_of(answer: Answer) -> dict[str, Any]:
    """The whole message: its text, and what a remote engine sent besides, put together from its deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    for delta in answer.deltas:
        _merge(message, msgspec.json.decode(delta))
    if message.get("tool_calls") and not answer.text:
        message["content"] = None
    return message


def _merge(into: dict[str, Any], delta: dict[str, Any]) -> None:
    """Texts are joined, lists of things with an ``index`` are merged by it, the rest is replaced."""
    for name, value in delta.items():
        old = into.get(name)
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            into[name] = _merged_list(old if isinstance(old, list) else [], value)
        elif isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value)
        elif isinstance(value, str) and isinstance(old, str) and name not in ("id", "type", "role"):
            into[name] = old + value
        elif value is not None:
            into[name] = value


def _merged_list(old: list[Any], items: list[Any]) -> list[Any]:
    for item in items:
        position = item.pop("index", len(old))
        if isinstance(position, int) and 0 <= position < len(old):
            _merge(old[position], item)
        else:
            old.append(item)
    return old


def chat_logprobs(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Log-probabilities in the form of the chat endpoint. A token that is no whole UTF-8 text is shown with
    U+FFFD; its ``bytes`` are exact."""
    return [
        {
            **_token(entry.token_bytes, entry.logprob),
            "top_logprobs": [_token(token_bytes, logprob) for _, token_bytes, logprob in entry.top],
        }
        for entry in entries
    ]


def finite(logprob: float | None) -> float:
    """JSON has no infinity: the least likely is written as -9999. Nothing predicts a first token, so it is
    certain: 0."""
    return 0.0 if logprob is None else max(logprob, _LEAST_LOGPROB)


def _token(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {
        "token": token_bytes.decode("utf-8", "replace"),
        "logprob": finite(logprob),
        "bytes": list(token_bytes),
    }
