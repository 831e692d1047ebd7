"""A request of the Messages API as a chat completion. Pure."""

from __future__ import annotations

from typing import Any, Final

from headrace.api.anthropic_wire import Block, Conversation, MessagesRequest, OutputFormat, Tool, ToolChoice, Turn
from headrace.api.decode import encode
from headrace.api.sampling import int_within
from headrace.errors import RequestError

_MOST_TOKENS: Final = 2**31 - 1
_THINKING: Final = ("thinking", "redacted_thinking")


def chat_body(request: MessagesRequest) -> bytes:
    """The JSON of the chat completion. Raises RequestError naming the field as the client wrote it."""
    chat = conversation(request)
    chat["max_tokens"] = int_within("max_tokens", request.max_tokens, 1, _MOST_TOKENS)
    if request.temperature is not None and not 0.0 <= request.temperature <= 1.0:
        raise RequestError("temperature must be between 0 and 1", param="temperature")
    plain = {
        "stream": request.stream,
        "stop": request.stop_sequences or None,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": None if request.metadata is None else request.metadata.user_id,
    }
    chat |= {name: value for name, value in plain.items() if value is not None}
    return encode(chat)


def conversation(request: Conversation) -> dict[str, Any]:
    """Model, messages and tools as a chat completion has them. Raises RequestError."""
    if not request.messages:
        raise RequestError("messages must hold at least one message", param="messages")
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system, "system")})
    for index, turn in enumerate(request.messages):
        messages += _turn(turn, f"messages[{index}]")
    chat: dict[str, Any] = {"model": request.model, "messages": messages}
    last = messages[-1]
    if last["role"] == "assistant" and "tool_calls" not in last:
        # The beginning of the answer: the model goes on after it.
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        chat |= _tool_choice(request.tool_choice, bool(request.tools))
    if request.output_config is not None and request.output_config.format is not None:
        chat["response_format"] = _response_format(request.output_config.format)
    return chat


def needs_remote(request: Conversation) -> str | None:
    """The field that asks for more than text, where there is one."""
    if request.output_config is not None and request.output_config.format is not None:
        return "output_config.format"
    if request.tools and (request.tool_choice is None or request.tool_choice.type != "none"):
        return "tools"
    return None


def _turn(turn: Turn, where: str) -> list[dict[str, Any]]:
    """One message as one or several: results of tools are messages of their own."""
    if turn.role not in ("user", "assistant"):
        raise RequestError(
            f"{where}.role must be 'user' or 'assistant', not {turn.role[:40]!r}; a system prompt goes into system",
            param=f"{where}.role",
        )
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if not turn.content:
        raise RequestError(f"{where}.content must hold at least one block", param=f"{where}.content")
    return (_user if turn.role == "user" else _assistant)(turn.content, f"{where}.content")


def _user(blocks: list[Block], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type == "tool_result":
            content = "" if block.content is None else _text(block.content, f"{at}.content")
            if block.is_error:
                content = f"Error: {content}"
            tool_id = _needed(block.tool_use_id, f"{at}.tool_use_id")
            messages.append({"role": "tool", "tool_call_id": tool_id, "content": content})
        else:
            texts.append(_block_text(block, at))
    if texts:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _assistant(blocks: list[Block], where: str) -> list[dict[str, Any]]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        at = f"{where}[{index}]"
        if block.type == "tool_use":
            arguments = encode(block.input or {}).decode()
            function = {"name": _needed(block.name, f"{at}.name"), "arguments": arguments}
            calls.append({"id": _needed(block.id, f"{at}.id"), "type": "function", "function": function})
        elif block.type not in _THINKING:  # what was thought for an earlier answer is not part of the prompt
            texts.append(_block_text(block, at))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return [message]


def _text(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{where}[{index}]") for index, block in enumerate(content))


def _block_text(block: Block, where: str) -> str:
    if block.type != "text":
        raise RequestError(f"{where}: a block of type {block.type[:40]!r} is not supported here", param=f"{where}.type")
    return _needed(block.text, f"{where}.text")


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where}.type {tool.type[:40]!r} is not supported; only tools of the client's", param=f"{where}.type"
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.input_schema is None:
        raise RequestError(f"{where}.input_schema is required", param=f"{where}.input_schema")
    function["parameters"] = tool.input_schema
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice, has_tools: bool) -> dict[str, Any]:
    plain = {"auto": "auto", "any": "required", "none": "none"}
    said: Any = plain.get(choice.type)
    if choice.type == "tool":
        said = {"type": "function", "function": {"name": _needed(choice.name, "tool_choice.name")}}
    elif said is None:
        raise RequestError("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    if not has_tools:
        if choice.type in ("any", "tool"):
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return {}
    chat: dict[str, Any] = {"tool_choice": said}
    if choice.disable_parallel_tool_use:
        chat["parallel_tool_calls"] = False
    return chat


def _response_format(form: OutputFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        raise RequestError("output_config.format.type must be json_schema", param="output_config.format.type")
    if form.schema is None:
        raise RequestError("output_config.format.schema is required", param="output_config.format.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema, "strict": True}}


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise RequestError(f"{where} is required", param=where, code="missing_required_parameter")
    return value
