"""What a server says it counted (``usage``), and how far that is believed.

Rates and latencies per token are made of these counts, and a server may send anything: a count is a whole number
from 0 to MOST_TOKENS, and an answer has about as many tokens as were asked for or as can be seen in it. A usage
that is not like that is none, and the record says why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from headrace.bench.records import MOST_TOKENS

_MARGIN_FACTOR, _MARGIN_TOKENS = 2, 64
"""How far a count may lie above what was asked for or seen: for what servers add (ends of thought, a template's own
tokens) and for text of which a token is less than a character."""


class Counts(NamedTuple):
    """Tokens; None: the server did not say."""

    completion: int | None = None
    prompt: int | None = None
    cached: int | None = None


class NotCredible(Exception):
    """The usage holds what cannot be. The message says what."""


class _Usage(Struct, gc=False):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None
    prompt_cache_hit_tokens: Any = None


_decode = msgspec.json.Decoder(_Usage | None).decode


def read_usage(raw: msgspec.Raw) -> Counts | None:
    """The counts of a ``usage`` object; None when it counts no completion (as ``null`` does, or its absence).

    Raises NotCredible.
    """
    if not raw:
        return None
    try:
        usage = _decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotCredible(f"usage is not readable: {error}") from error
    if usage is None or usage.completion_tokens is None:
        return None
    details = usage.prompt_tokens_details
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Counts(
        _count(usage.completion_tokens, "completion_tokens"),
        _count(usage.prompt_tokens, "prompt_tokens"),
        _count(usage.prompt_cache_hit_tokens if cached is None else cached, "cached tokens"),
    )


def most_credible_tokens(*, asked: int, choices: int, chunks: int, characters: int) -> int:
    """The most output tokens that an answer is believed to have: ``asked`` of each choice, the chunks and the
    characters of text are what speaks for them."""
    return _MARGIN_FACTOR * max(asked * choices, chunks, characters) + _MARGIN_TOKENS


def _count(value: object, name: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise NotCredible(f"usage: {name} is no whole number")
    if not 0 <= value <= MOST_TOKENS:
        raise NotCredible(f"usage: {name} is {value:.6g}, not from 0 to {MOST_TOKENS}")
    return value
