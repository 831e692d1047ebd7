"""A request of the Responses API as a chat completion. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from headrace.api.decode import encode
from headrace.api.responses_wire import FunctionTool, Item, ItemPart, ResponsesRequest, TextFormat
from headrace.api.sampling import int_within
from headrace.errors import RequestError

_MOST_TOKENS: Final = 2**31 - 1
_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXTS: Final = ("input_text", "output_text", "text")


def input_messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as chat messages. Raises RequestError."""
    if request.input is None or not request.input:
        raise RequestError("input is required", param="input", code="missing_required_parameter")
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(request.input):
        message = _message(item, f"input[{index}]")
        last = messages[-1] if messages else None
        if message is None:
            continue
        if "tool_calls" in message and last is not None and last["role"] == "assistant":
            # Calls and text of one answer are items of their own here, and one message there.
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
    if not messages:
        raise RequestError("input holds no message", param="input")
    return messages


def chat_body(request: ResponsesRequest, messages: Sequence[dict[str, Any]]) -> bytes:
    """The JSON of the chat completion over these messages. Raises RequestError naming the field as the client wrote
    it."""
    _refuse(request)
    said: list[dict[str, Any]] = []
    if request.instructions:
        said.append({"role": "system", "content": request.instructions})
    chat: dict[str, Any] = {"model": request.model, "messages": [*said, *messages]}
    if request.max_output_tokens is not None:
        chat["max_tokens"] = int_within("max_output_tokens", request.max_output_tokens, 1, _MOST_TOKENS)
    plain = {
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "user": request.user,
        "metadata": request.metadata,
    }
    chat |= {name: value for name, value in plain.items() if value is not None}
    if request.text is not None and request.text.format is not None and request.text.format.type != "text":
        chat["response_format"] = _response_format(request.text.format)
    if request.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
        if request.tool_choice is not None:
            chat["tool_choice"] = _tool_choice(request.tool_choice)
        if request.parallel_tool_calls is not None:
            chat["parallel_tool_calls"] = request.parallel_tool_calls
    elif request.tool_choice not in (None, "auto", "none"):
        raise RequestError("tool_choice needs tools", param="tool_choice")
    return encode(chat)


def needs_remote(request: ResponsesRequest) -> str | None:
    """The field that asks for more than text, where there is one."""
    if request.text is not None and request.text.format is not None and request.text.format.type != "text":
        return "text.format"
    return "tools" if request.tools and request.tool_choice != "none" else None


def _refuse(request: ResponsesRequest) -> None:
    if request.background:
        raise RequestError("background is not supported", param="background", code="unsupported_parameter")
    if request.conversation is not None:
        raise RequestError(
            "conversation is not supported; use previous_response_id",
            param="conversation",
            code="unsupported_parameter",
        )
    if request.truncation not in (None, "disabled"):
        raise RequestError(
            "truncation must be 'disabled': nothing is left out of a prompt that is too long", param="truncation"
        )


def _message(item: Item, where: str) -> dict[str, Any] | None:
    match item.type or "message":
        case "message":
            if item.role not in _ROLES:
                raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
            if item.content is None:
                raise RequestError(f"{where}.content is required", param=f"{where}.content")
            return {"role": item.role, "content": _text(item.content, f"{where}.content")}
        case "function_call":
            function = {
                "name": _needed(item.name, f"{where}.name"),
                "arguments": _needed(item.arguments, f"{where}.arguments"),
            }
            call = {"id": _needed(item.call_id, f"{where}.call_id"), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            if item.output is None:
                raise RequestError(f"{where}.output is required", param=f"{where}.output")
            call_id = _needed(item.call_id, f"{where}.call_id")
            return {"role": "tool", "tool_call_id": call_id, "content": _text(item.output, f"{where}.output")}
        case "reasoning":  # what was thought for an earlier answer is not part of the prompt
            return None
        case other:
            raise RequestError(f"{where}: an item of type {other[:40]!r} is not supported", param=f"{where}.type")


def _text(content: str | list[ItemPart], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: ItemPart, where: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type not in _TEXTS:
        raise RequestError(
            f"{where}: content of type {part.type[:40]!r} is not supported; only text is",
            param=f"{where}.type",
            code="unsupported_content",
        )
    return _needed(part.text, f"{where}.text")


def _tool(tool: FunctionTool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        raise RequestError(
            f"{where}.type {tool.type[:40]!r} is not supported; only 'function' is",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    function: dict[str, Any] = {"name": _needed(tool.name, f"{where}.name")}
    plain = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    function |= {name: value for name, value in plain.items() if value is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise RequestError("tool_choice must be auto, none, required or a function", param="tool_choice")
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise RequestError("tool_choice must be of type function and have a name", param="tool_choice")
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.type != "json_schema":
        raise RequestError("text.format.type must be text, json_object or json_schema", param="text.format.type")
    if form.schema is None:
        raise RequestError("text.format.schema is required", param="text.format.schema")
    schema: dict[str, Any] = {"name": form.name or "output", "schema": form.schema}
    if form.strict is not None:
        schema["strict"] = form.strict
    if form.description is not None:
        schema["description"] = form.description
    return {"type": "json_schema", "json_schema": schema}


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise RequestError(f"{where} is required", param=where, code="missing_required_parameter")
    return value
