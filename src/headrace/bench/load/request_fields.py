"""What an operator may add to requests: headers, and fields of their JSON.

The command line, workload files and traces all say such things; what is wrong with them is decided here, before
anything is sent. A field that the tool itself writes is refused: the results would say one thing (the model, the
length asked for) and the requests another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

OWN_FIELDS: Final[dict[str, str]] = {
    "model": "--model says it",
    "messages": "the prompt's text is made from the input length",
    "prompt": "the prompt's text is made from the input length",
    "stream": "--stream and --no-stream say it",
    "max_tokens": "the output length says it",
    "max_completion_tokens": "the output length says it (--max-tokens-field names the field)",
    "n": "a request is one answer",
}
"""Fields that the tool sets, and what says their value."""

_FRAMING: Final = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that say how a request's bytes travel, which is the HTTP client's business."""

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def header_problem(name: str, value: str) -> str | None:
    """What keeps this from being sent as a header, or None."""
    if not _HEADER_NAME.fullmatch(name):
        return f"{_shown(name)} is no name of an HTTP header"
    if name.lower() in _FRAMING:
        return f"the header {name} belongs to the HTTP client"
    return header_text_problem(value)


def header_text_problem(value: str) -> str | None:
    """What keeps a text (a lane, a conversation's name) from being a header's value, or None."""
    # The value is not shown: it may be a secret.
    return None if value.isascii() and value.isprintable() else "not fit for an HTTP header: plain ASCII only"


def class_body_problem(fields: Mapping[str, object]) -> str | None:
    """``body_problem`` of a workload's class, which may say whether its own requests are streams."""
    if not isinstance(fields.get("stream", True), bool):
        return "stream is true or false"
    return body_problem({name: value for name, value in fields.items() if name != "stream"})


def body_problem(fields: Mapping[str, object]) -> str | None:
    """What keeps these from being added to a request's JSON, or None.

    ``stream_options`` may say more than the tool does (``continuous_usage_stats``), but must ask for the usage.
    """
    for name, instead in OWN_FIELDS.items():
        if name in fields:
            return f"{name} is set by the tool itself: {instead}"
    if "stream_options" in fields:
        options = fields["stream_options"]
        if not (isinstance(options, Mapping) and options.get("include_usage") is True):
            return 'stream_options is set by the tool itself: it may say more, but with "include_usage": true'
    try:
        msgspec.json.encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a date, half a surrogate pair, 2^64
        return f"cannot be written as JSON: {error}"
    return None


def _shown(text: str) -> str:
    return ascii(text[:60])
