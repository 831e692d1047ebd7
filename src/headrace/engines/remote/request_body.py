"""From a ``Submit`` to the JSON that a remote engine takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from headrace.errors import RequestError
from headrace.messages.engine import SamplingParams, Submit, WireRequest

Kind = Literal["openai", "vllm", "sglang", "llama-server", "headrace"]
"""Which server it is: what it can do beyond OpenAI's API differs."""

PriorityOrder = Literal["none", "lower_first", "higher_first"]
"""What a body's ``priority`` means to an engine; none: it is not sent."""

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETION_PATH: Final = "/v1/completions"
_encode = msgspec.json.Encoder().encode
_STREAM: Final = b'"stream":true,"stream_options":{"include_usage":true}'
_CONTINUES_CHAT: Final = frozenset({"vllm", "sglang", "llama-server", "headrace"})
_TELLS_TOKEN_IDS: Final = frozenset({"vllm"})


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one server is spoken to. ``model`` is its own name for the model."""

    kind: Kind = "openai"
    model: str = ""
    priority: PriorityOrder = "none"


def can_continue(submit: Submit, kind: Kind) -> bool:
    """Whether such a server can go on after text that was sent already."""
    wire = submit.wire
    if wire is None or not wire.continuable:
        return False
    if wire.endpoint == "chat":
        return kind in _CONTINUES_CHAT
    return wire.prompt.startswith(b'"')


def compose(submit: Submit, dialect: Dialect) -> tuple[str, bytes]:
    """The path and the body. Raises RequestError when the prompt of a continued answer is not text."""
    if submit.wire is None:
        return COMPLETION_PATH, _from_tokens(submit, dialect)
    return _from_wire(submit, submit.wire, dialect)


def _from_wire(submit: Submit, wire: WireRequest, dialect: Dialect) -> tuple[str, bytes]:
    chat = wire.endpoint == "chat"
    prompt = wire.prompt
    members = [b'"model":' + _encode(wire.model or dialect.model), _STREAM]
    if wire.continued:
        prompt = _continued(wire)
        if chat and dialect.kind != "llama-server":
            # llama-server goes on after a last message of the assistant's by itself.
            members.append(b'"continue_final_message":true,"add_generation_prompt":false')
    if submit.max_tokens is not None:
        name = b"max_completion_tokens" if chat and dialect.kind == "openai" else b"max_tokens"
        members.append(b'"%b":%d' % (name, max(1, submit.max_tokens - wire.continued_tokens)))
    if submit.sampling.seed is not None:
        members.append(b'"seed":%d' % submit.sampling.seed)
    members += _extras(submit, dialect)
    if wire.fields:
        members.append(wire.fields)
    members.append((b'"messages":' if chat else b'"prompt":') + prompt)
    return CHAT_PATH if chat else COMPLETION_PATH, b"{" + b",".join(members) + b"}"


def _continued(wire: WireRequest) -> bytes:
    if wire.endpoint == "chat":
        message = _encode({"role": "assistant", "content": wire.continued})
        return wire.prompt.rstrip()[:-1] + b"," + message + b"]"
    text = msgspec.json.decode(wire.prompt)
    if not isinstance(text, str):
        raise RequestError("an answer to token ids cannot be continued as text", param="prompt")
    return _encode(text + wire.continued)


def _extras(submit: Submit, dialect: Dialect) -> list[bytes]:
    members = []
    if dialect.priority != "none":
        members.append(b'"priority":%d' % (submit.priority if dialect.priority == "lower_first" else -submit.priority))
    return members


def _from_tokens(submit: Submit, dialect: Dialect) -> bytes:
    """A request of token ids: text completions of vLLM, SGLang and llama-server take them."""
    body: dict[str, Any] = {
        "model": dialect.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": submit.prompt_tokens,
        **_sampling(submit.sampling),
    }
    if submit.max_tokens is not None:
        body["max_tokens"] = submit.max_tokens
    if dialect.kind in _TELLS_TOKEN_IDS:
        body["return_token_ids"] = True
    extras = b",".join(_extras(submit, dialect))
    encoded = _encode(body)
    return encoded[:-1] + b"," + extras + b"}" if extras else encoded


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, and the temperature, whose default differs between servers."""
    plain = SamplingParams()
    names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs")
    said: dict[str, Any] = {"temperature": sampling.temperature}
    said |= {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(plain, name)}
    if sampling.seed is not None:
        said["seed"] = sampling.seed
    if sampling.stop:
        said["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        said["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        said["logit_bias"] = {str(token): value for token, value in sampling.logit_bias.items()}
    if sampling.ignore_eos:
        said["ignore_eos"] = True
    if sampling.include_stop_text:
        said["include_stop_str_in_output"] = True
    if not sampling.skip_special_tokens:
        said["skip_special_tokens"] = False
    return said
