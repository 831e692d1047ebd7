"""Bytes to a typed request, with a precise message for whatever is wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar

import msgspec

from headrace.api.wire import CompletionRequest
from headrace.errors import RequestError

RequestType = TypeVar("RequestType", bound=msgspec.Struct)

HINTS: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields whose absence changes nothing in an answer: accepted under every policy."""

UNSUPPORTED: Final = frozenset(
    {
        "audio",
        "functions",
        "moderation",
        "prediction",
        "reasoning_effort",
        "suffix",
        "verbosity",
        "web_search_options",
    }
)
"""OpenAI's fields that headrace knows but does not honour."""

CONSTRAINED_OUTPUT: Final = frozenset(
    {
        "grammar",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "json_schema",
        "structured_outputs",
    }
)
"""Extensions of other servers that promise a form of output; ignoring one would break the promise."""

_MAX_IGNORED_NAMES = 32
_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MSGSPEC_PATH = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`")

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_object_decoder = msgspec.json.Decoder(dict[str, Any])


def decode(
    body: bytes, type_: type[RequestType], unsupported: Literal["ignore", "reject"] = "ignore"
) -> tuple[RequestType, tuple[str, ...]]:
    """The typed request, and the names of fields that were sent but are not used.

    Raises RequestError: malformed JSON, a wrong type, a missing field, or (under ``reject``) a field that is
    not supported.
    """
    with _translated(body):
        fields = _fields_decoder.decode(body)
        request = msgspec.json.decode(body, type=type_)
    return request, _unused_fields(fields, type_, unsupported)


def decode_lenient(body: bytes, type_: type[RequestType]) -> tuple[RequestType, dict[str, msgspec.Raw]]:
    """The typed request and every field as it was sent: for engines that know more fields than headrace. Raises
    RequestError as ``decode`` does, but for no field's name."""
    with _translated(body):
        fields = _fields_decoder.decode(body)
        request = msgspec.json.decode(body, type=type_)
    return request, fields


def decode_object(body: bytes) -> dict[str, Any]:
    """Any JSON object. Raises RequestError as ``decode`` does."""
    with _translated(body):
        return _object_decoder.decode(body)


def encode(value: object) -> bytes:
    """JSON of what a client sent, put together anew. Raises RequestError where it is nested too deeply, or holds a
    number that cannot be written."""
    try:
        return msgspec.json.encode(value)
    except RecursionError as error:
        raise RequestError("the request body is nested too deeply", code="invalid_json") from error
    except OverflowError as error:
        raise RequestError("the request body holds a number that is too large", code="invalid_json") from error


@contextmanager
def _translated(body: bytes) -> Iterator[None]:
    """msgspec's errors become RequestErrors."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _wrong_type(error) from error
    except msgspec.DecodeError as error:
        raise RequestError(_malformed(body, error), code="invalid_json") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"the request body is not UTF-8 (byte {error.start})", code="invalid_json") from error
    except RecursionError as error:
        raise RequestError("the request body is nested too deeply", code="invalid_json") from error


def _unused_fields(
    fields: dict[str, msgspec.Raw], type_: type[msgspec.Struct], unsupported: Literal["ignore", "reject"]
) -> tuple[str, ...]:
    known = set(type_.__struct_fields__)
    unused = [name for name, value in fields.items() if name not in known and bytes(value) != b"null"]
    for name in unused:
        if name in CONSTRAINED_OUTPUT:
            raise RequestError(f"{name} is not supported: output cannot be constrained", param=name)
        if unsupported == "reject" and name not in HINTS:
            raise RequestError(_not_supported(name, known), param=_shown(name), code="unsupported_parameter")
    if issubclass(type_, CompletionRequest):
        unused = [name for name in unused if name not in ("metadata", "store")]
    return tuple(name for name in unused if _SAFE_NAME.fullmatch(name))[:_MAX_IGNORED_NAMES]


def _not_supported(name: str, known: set[str]) -> str:
    shown = _shown(name)
    if name in UNSUPPORTED:
        return f"{shown} is not supported by this server"
    near = difflib.get_close_matches(name[:64], sorted(known | HINTS), n=1)
    return f"unknown field {shown!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _shown(name: str) -> str:
    return name if len(name) <= 64 else name[:64] + "..."


def _malformed(body: bytes, error: msgspec.DecodeError) -> str:
    if not body.strip():
        return "the request body is empty; it must be a JSON object"
    message = str(error)
    if "UTF-8" in message:
        return "the request body is not valid UTF-8"
    if "truncated" in message:
        return f"malformed JSON: it ends too early (byte {len(body)}), or a string holds half a surrogate pair"
    return "malformed JSON: " + message.removeprefix("JSON is malformed: ")


def _wrong_type(error: msgspec.ValidationError) -> RequestError:
    """msgspec's ``Expected `str`, got `int` - at `$.messages[0].role``` in OpenAI's notation."""
    message = str(error)
    found = _MSGSPEC_PATH.search(message)
    path = found["path"].lstrip(".") if found else ""
    text = message[: found.start()] if found else message
    text = text.replace("`", "")
    if missing := re.fullmatch(r"Object missing required field (\S+)", text):
        param = f"{path}.{missing[1]}" if path else missing[1]
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    text = text[:1].lower() + text[1:]
    if not path:
        return RequestError(f"the request body is not right: {text}", code="invalid_type")
    return RequestError(f"{path}: {text}", param=path, code="invalid_type")
