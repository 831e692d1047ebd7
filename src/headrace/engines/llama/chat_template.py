"""The chat template of a GGUF: Jinja, rendered in a sandbox as the model's authors wrote it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import ModelError, RequestError

_END_MARK = "\x00headrace-end-of-final-message\x00"


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template. Immutable and safe to share between threads."""

    def __init__(self, source: str, *, bos_text: str, eos_text: str) -> None:
        """Raises ModelError when the template does not compile."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._special = {"bos_token": bos_text, "eos_token": eos_text}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. With ``continue_final_message`` the last message is left open, so that the model
        continues it. Raises RequestError when the template refuses the messages."""
        turns = [dict(message) for message in messages]
        if continue_final_message:
            turns[-1]["content"] = f"{turns[-1].get('content') or ''}{_END_MARK}"
        try:
            text = self._template.render(
                {
                    **(template_kwargs or {}),
                    **self._special,
                    "messages": turns,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt and not continue_final_message,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        if continue_final_message:
            return text[: text.index(_END_MARK)] if _END_MARK in text else text
        return text
