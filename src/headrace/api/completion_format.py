"""Text completions on the wire: whole bodies and stream chunks."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.api.answer import Answer, returned, usage
from headrace.api.chat_format import DONE, finite
from headrace.api.errors import HttpError
from headrace.api.plan import Plan
from headrace.messages.engine import SequenceOutput, TokenLogprob

_encode = msgspec.json.Encoder().encode


class CompletionFormat:
    """Writes one request's answer. With ``echo`` a choice begins with its prompt."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._head = b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            _encode(plan.id),
            plan.created,
            _encode(plan.model),
        )
        count = len(plan.sequences)
        self._text = [self._head + b'{"index":%d,"text":' % index for index in range(count)]
        self._tail = b'],"usage":null}\n\n' if plan.include_usage else b"]}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._offsets = [_Offsets() for _ in range(count)]
        self._echoes = [plan.prompts[index // plan.best_of].text or "" for index in range(count)]

    def opening(self) -> bytes:
        """Text completions have no opening chunk."""
        return b""

    def chunk(self, index: int, output: SequenceOutput) -> bytes:
        """One engine output as an event; empty when there is nothing to show."""
        echo, self._echoes[index] = self._echoes[index], ""
        text = echo + output.text
        entries = [*(output.prompt_logprobs or ()), *(output.logprobs or ())] if self._plan.logprobs else []
        if not (text or entries or output.finish):
            return b""
        if not entries and output.finish is None:
            return self._text[index] + _encode(text) + self._plain_end
        logprobs = _encode(self._offsets[index].legacy_logprobs(entries)) if entries else b"null"
        return b"".join(
            (
                self._text[index],
                _encode(text),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                _encode(output.finish),
                b"}",
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
        """The whole ``text_completion`` object."""
        plan = self._plan
        return {
            "id": plan.id,
            "object": "text_completion",
            "created": plan.created,
            "model": plan.model,
            "choices": [
                {
                    "index": position,
                    "text": self._echoes[index] + answer.text,
                    "logprobs": self._logprobs(index, answer),
                    "finish_reason": answer.finish,
                }
                for position, (index, answer) in enumerate(returned(plan, answers))
            ],
            "usage": usage(plan, answers),
        }

    def _logprobs(self, index: int, answer: Answer) -> dict[str, Any] | None:
        if not self._plan.logprobs:
            return None
        return self._offsets[index].legacy_logprobs([*answer.prompt_logprobs, *answer.logprobs])


class _Offsets:
    """Where each token begins in a choice's text, in characters, over all of its chunks."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._next = 0

    def legacy_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities in the form of the text endpoint: parallel lists."""
        tokens, offsets, logprobs, tops = [], [], [], []
        for entry in entries:
            tokens.append(token_text(entry.token_bytes))
            offsets.append(self._next)
            self._next += len(self._decoder.decode(entry.token_bytes))
            logprobs.append(finite(entry.logprob))
            tops.append(_top(entry))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def token_text(token_bytes: bytes) -> str:
    """A token as text; bytes that are no whole UTF-8 text as ``bytes:\\xe2\\x80``."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _top(entry: TokenLogprob) -> dict[str, float]:
    """The most likely tokens, and the chosen one whether or not it is among them."""
    if entry.logprob is None:
        return {}
    top: dict[str, float] = {}
    for _, token_bytes, logprob in entry.top:
        top.setdefault(token_text(token_bytes), finite(logprob))
    top.setdefault(token_text(entry.token_bytes), finite(entry.logprob))
    return top
