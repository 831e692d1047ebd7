"""What an engine's output adds to an answer, piece by piece: text, reasoning, tool calls.

For APIs whose answers are lists of typed blocks. Remote engines are lenient in what they send; what has not the form of
a delta is left out, as a chat client would leave it out.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from headrace.messages.engine import SequenceOutput

PartKind = Literal["reasoning", "text", "tool", "arguments"]


class Part(NamedTuple):
    """``tool`` names a call that begins (``text`` is the function's name), ``arguments`` a piece of its JSON;
    ``tool_index`` says of which call."""

    kind: PartKind
    text: str
    tool_index: int = 0
    tool_id: str = ""


def parts_of(output: SequenceOutput) -> list[Part]:
    """The parts of one output, in the order in which a reader should see them."""
    if output.delta is None:
        return [Part("text", output.text)] if output.text else []
    delta: dict[str, Any] = msgspec.json.decode(output.delta)
    parts = []
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(reasoning, str):
        parts.append(Part("reasoning", reasoning))
    text = output.text or delta.get("refusal")
    if isinstance(text, str) and text:
        parts.append(Part("text", text))
    calls = delta.get("tool_calls")
    for position, call in enumerate(calls if isinstance(calls, list) else []):
        if isinstance(call, dict):
            parts += _call_parts(call, position)
    return parts


def _call_parts(call: dict[str, Any], position: int) -> list[Part]:
    index, function = call.get("index"), call.get("function")
    if not isinstance(index, int):
        index = position
    if not isinstance(function, dict):
        return []
    name, arguments, tool_id = function.get("name"), function.get("arguments"), call.get("id")
    parts = []
    if isinstance(name, str) and name:
        parts.append(Part("tool", name, index, tool_id if isinstance(tool_id, str) else ""))
    if isinstance(arguments, str) and arguments:
        parts.append(Part("arguments", arguments, index))
    return parts
