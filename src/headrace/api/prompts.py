"""Messages and prompts to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from headrace.api.wire import ChatRequest, CompletionRequest, ContentPart, Message, TokenizeRequest
from headrace.engines.protocol import Tokenizer
from headrace.errors import ContextTooLong, RequestError

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_THREAD_ABOVE_CHARACTERS: Final = 16 * 1024
_ROLE_MARK_CHARACTERS: Final = 32

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue. ``text`` is what ``echo`` repeats (None where no echo was asked for). For a remote engine
    there are none, and ``estimated`` says how many there should be."""

    tokens: list[int]
    text: str | None = None
    estimated: int = 0

    @property
    def count(self) -> int:
        return len(self.tokens) or self.estimated


async def chat_prompt(request: ChatRequest, tokenizer: Tokenizer, limit_tokens: int | None = None) -> Prompt:
    """The chat template's prompt for the messages. Raises RequestError for what cannot be rendered, and
    ContextTooLong early when it has more than ``limit_tokens``."""
    if limit_tokens is not None and len(request.messages) > limit_tokens:
        raise ContextTooLong(
            f"{len(request.messages)} messages cannot fit a context of {limit_tokens} tokens", param="messages"
        )
    messages = template_messages(request.messages)
    tools = request.tools if request.tools and request.tool_choice != "none" else None

    def work() -> Prompt:
        text = tokenizer.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=_add_generation_prompt(request),
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=request.chat_template_kwargs,
        )
        # The template writes BOS and the control tokens itself.
        tokens = tokenizer.encode(text, add_special=False, parse_special=True, limit_tokens=limit_tokens)
        return Prompt(tokens)

    return await _in_thread_if_long(_characters(messages), work)


async def completion_prompts(
    request: CompletionRequest, tokenizer: Tokenizer, max_prompts: int, limit_tokens: int | None = None
) -> list[Prompt]:
    """One Prompt per prompt of a text completion. Raises RequestError (empty, unknown token id, mixed), and
    ContextTooLong early when one has more than ``limit_tokens``."""
    prompts = _split_prompt(request.prompt, max_prompts)
    echo = bool(request.echo)

    def work() -> list[Prompt]:
        return [_completion_prompt(prompt, tokenizer, limit_tokens, echo=echo) for prompt in prompts]

    return await _in_thread_if_long(sum(map(len, prompts)), work)


async def tokenize_request(request: TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a /tokenize request."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if request.prompt is not None:
        text = request.prompt
        special = request.add_special_tokens is not False
        return await _in_thread_if_long(
            len(text), lambda: tokenizer.encode(text, add_special=special, parse_special=True)
        )
    messages = template_messages(request.messages or [])

    def work() -> list[int]:
        rendered = tokenizer.render_chat(
            messages,
            tools=request.tools,
            add_generation_prompt=_add_generation_prompt(request),
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=request.chat_template_kwargs,
        )
        return tokenizer.encode(rendered, add_special=bool(request.add_special_tokens), parse_special=True)

    return await _in_thread_if_long(_characters(messages), work)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as a chat template expects them: known roles, content as one string."""
    if not messages:
        raise RequestError("messages must hold at least one message", param="messages", code="empty_messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        shown = message.role[:40]
        raise RequestError(f"{where}.role {shown!r} is unknown; use one of {', '.join(ROLES)}", param=f"{where}.role")
    rendered: dict[str, Any] = {
        # Open models' templates know no developer role; it means what system meant before.
        "role": "system" if message.role == "developer" else message.role,
        "content": content_text(message, where),
    }
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            rendered[name] = value
    return rendered


def content_text(message: Message, where: str) -> str:
    """A message's content as one string; text parts are joined by line breaks."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise RequestError(f"{where}.content is required", param=f"{where}.content")
    if not content:
        raise RequestError(f"{where}.content must hold at least one part", param=f"{where}.content")
    return "\n".join(_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part_text(part: ContentPart, where: str) -> str:
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type != "text":
        raise RequestError(
            f"{where}: content of type {part.type[:40]!r} is not supported; this model reads text only",
            param=f"{where}.type",
            code="unsupported_content",
        )
    if part.text is None:
        raise RequestError(f"{where}.text is required", param=f"{where}.text")
    return part.text


def _split_prompt(prompt: str | list[str | int | list[int]], max_prompts: int) -> list[str | list[int]]:
    """The prompts of a request; a flat list of integers is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    tokens = [item for item in prompt if isinstance(item, int)]
    if len(tokens) == len(prompt):
        return [tokens]
    if tokens:
        raise RequestError("prompt mixes token ids with strings or lists", param="prompt")
    if len(prompt) > max_prompts:
        raise RequestError(f"prompt holds {len(prompt)} prompts; at most {max_prompts} are allowed", param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


def _characters(messages: Sequence[dict[str, Any]]) -> int:
    """About how long the rendered messages are, role marks included."""
    return sum(len(message["content"]) + _ROLE_MARK_CHARACTERS for message in messages)


def _completion_prompt(
    prompt: str | list[int], tokenizer: Tokenizer, limit_tokens: int | None, *, echo: bool
) -> Prompt:
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt, add_special=True, parse_special=True, limit_tokens=limit_tokens)
        text = prompt if echo else None
    else:
        tokens = prompt
        for token in tokens:
            if not 0 <= token < tokenizer.vocab_size:
                raise RequestError(f"prompt holds a token id outside 0..{tokenizer.vocab_size - 1}", param="prompt")
        text = tokenizer.decode(tokens) if echo else None
    if not tokens:
        raise RequestError("prompt must hold at least one token", param="prompt")
    return Prompt(tokens, text)


def _add_generation_prompt(request: ChatRequest | TokenizeRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    if request.add_generation_prompt and request.continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    return request.add_generation_prompt


async def _in_thread_if_long(characters: int, work: Callable[[], Result]) -> Result:
    """Tokenizing a long text takes milliseconds that the event loop owes to running streams."""
    return await asyncio.to_thread(work) if characters > _THREAD_ABOVE_CHARACTERS else work()
