"""Answers of the Responses API: whole bodies and stream events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.api.answer import Answer, usage
from headrace.api.errors import HttpError
from headrace.api.parts import Part, parts_of
from headrace.api.plan import Plan
from headrace.api.responses_wire import ResponsesRequest
from headrace.messages.engine import SequenceOutput

_encode = msgspec.json.Encoder().encode


class ResponsesFormat:
    """Writes one request's answer: its output items grow with the engine's outputs, and events tell how.

    An item of text or reasoning ends where the next begins. Function calls stay open until the answer ends, since an
    engine may send pieces of several in turn.
    """

    def __init__(self, plan: Plan, request: ResponsesRequest) -> None:
        self._plan = plan
        self._request = request
        self._suffix = plan.id.removeprefix("chatcmpl-")
        self.id = f"resp_{self._suffix}"
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._open: str | None = None
        self._calls: dict[int, int] = {}
        self._written: tuple[SequenceOutput, bytes] | None = None

    def opening(self) -> bytes:
        """The response as it begins."""
        return self._event("response.created", response=self._response("in_progress")) + self._event(
            "response.in_progress", response=self._response("in_progress")
        )

    def chunk(self, index: int, output: SequenceOutput) -> bytes:
        """One engine output as events. Asked again for the same output it gives the same events."""
        if self._written is not None and self._written[0] is output:
            return self._written[1]
        events = b"".join([self._part(part) for part in parts_of(output)])
        self._written = output, events
        return events

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """The end of the last items, and the whole response."""
        events = self._end_item() + self._end_calls()
        response = self._response(_status(answers[0]), answers)
        return events + self._event(f"response.{response['status']}", response=response)

    def failure(self, error: HttpError) -> bytes:
        """The response as it failed."""
        said = msgspec.json.decode(error.body)["error"]
        self._end_item()
        self._end_calls()
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": said["message"]}
        return self._event("response.failed", response=response)

    def body(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole ``response`` object."""
        answer = answers[0]
        if not self._items:
            for delta in answer.deltas:
                for part in parts_of(SequenceOutput("", delta=delta)):
                    if part.kind == "reasoning":
                        self._part(part)
            if answer.text:
                self._part(Part("text", answer.text))
            for delta in answer.deltas:
                for part in parts_of(SequenceOutput("", delta=delta)):
                    if part.kind != "reasoning":
                        self._part(part)
        self._end_item()
        self._end_calls()
        return self._response(_status(answer), answers)

    def _part(self, part: Part) -> bytes:
        match part.kind:
            case "text" | "reasoning":
                events = self._begin(part.kind)
                self._texts[-1].append(part.text)
                kind = "output_text" if part.kind == "text" else "reasoning_text"
                extra: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
                return events + self._event(f"response.{kind}.delta", **self._where(), delta=part.text, **extra)
            case "tool":
                if part.tool_index in self._calls:
                    return b""
                events = self._end_item()
                at = self._calls[part.tool_index] = len(self._items)
                call_id = part.tool_id or f"call_{self._suffix}_{at}"
                item: dict[str, Any] = {
                    "id": f"fc_{self._suffix}_{at}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call_id,
                    "name": part.text,
                    "arguments": "",
                }
                return events + self._add(item)
            case "arguments":
                if part.tool_index not in self._calls:
                    return b""
                at = self._calls[part.tool_index]
                self._texts[at].append(part.text)
                return self._event(
                    "response.function_call_arguments.delta",
                    item_id=self._items[at]["id"],
                    output_index=at,
                    delta=part.text,
                )

    def _begin(self, kind: str) -> bytes:
        """An item of this kind to write into: the one that is open, or a new one."""
        if self._open == kind:
            return b""
        events = self._end_item()
        self._open, at = kind, len(self._items)
        item: dict[str, Any]
        if kind == "text":
            item = {
                "id": f"msg_{self._suffix}_{at}",
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
        else:
            item = {"id": f"rs_{self._suffix}_{at}", "type": "reasoning", "summary": [], "content": []}
        events += self._add(item)
        return events + self._event("response.content_part.added", **self._where(), part=_content_part(kind, ""))

    def _add(self, item: dict[str, Any]) -> bytes:
        self._items.append(item)
        self._texts.append([])
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _end_item(self) -> bytes:
        if self._open is None:
            return b""
        kind, self._open = self._open, None
        text, where = "".join(self._texts[-1]), self._where()
        part = _content_part(kind, text)
        item = self._items[-1] = {**self._items[-1], "content": [part]}
        if kind == "text":
            item["status"] = "completed"
        name = "output_text" if kind == "text" else "reasoning_text"
        extra: dict[str, Any] = {"logprobs": []} if kind == "text" else {}
        return (
            self._event(f"response.{name}.done", **where, text=text, **extra)
            + self._event("response.content_part.done", **where, part=part)
            + self._event("response.output_item.done", output_index=where["output_index"], item=item)
        )

    def _end_calls(self) -> bytes:
        events = b""
        for at in self._calls.values():
            arguments = "".join(self._texts[at])
            if self._items[at]["status"] == "completed":
                continue
            item = self._items[at] = {**self._items[at], "arguments": arguments, "status": "completed"}
            events += self._event(
                "response.function_call_arguments.done",
                item_id=item["id"],
                output_index=at,
                name=item["name"],
                arguments=arguments,
            )
            events += self._event("response.output_item.done", output_index=at, item=item)
        return events

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data))

    def _response(self, status: str, answers: Sequence[Answer] = ()) -> dict[str, Any]:
        request = self._request
        tools = [{"strict": None, **msgspec.to_builtins(tool)} for tool in request.tools or []]
        text = {"type": "text"} if request.text is None or request.text.format is None else request.text.format
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._plan.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None if status != "incomplete" else {"reason": _why_incomplete(answers[0])},
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._plan.model,
            "output": list(self._items),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "store": request.store is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": msgspec.to_builtins(text)},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": tools,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": _usage(self._plan, answers) if answers else None,
            "user": request.user,
        }


def _content_part(kind: str, text: str) -> dict[str, Any]:
    if kind == "text":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish in ("length", "content_filter") else "completed"


def _why_incomplete(answer: Answer) -> str:
    return "max_output_tokens" if answer.finish == "length" else "content_filter"


def _usage(plan: Plan, answers: Sequence[Answer]) -> dict[str, Any]:
    said: dict[str, Any] = usage(plan, answers)
    return {
        "input_tokens": said["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": said["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": said["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said["total_tokens"],
    }
