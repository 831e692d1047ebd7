"""The gate's prompt set, shipped with the package.

A *chat* is a question: F16's greedy answer is what the others are compared on. A *text* is read as it stands; in it,
answers that follow from what comes before (facts, copies, look-ups in a list) are marked ``[[so]]``. An answer counts
as right when, after everything before it, the likeliest token is the right one at each of its tokens: exactly when
greedy decoding would have written it. One pass over a text thereby asks many questions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Final, Literal

import msgspec

from headrace.errors import GateError

_FILE: Final = "prompts.json"
_OPEN, _CLOSE = "[[", "]]"


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt as the file has it."""

    name: str
    kind: Literal["chat", "text"]
    text: str


class PromptSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``version`` names the set in results; so does ``digest``, which changes with every letter."""

    version: int
    prompts: tuple[Prompt, ...]
    digest: str = ""


@dataclass(frozen=True, slots=True)
class TokenText:
    """A text in tokens, and where its answers are: (first, after the last)."""

    tokens: list[int]
    answers: tuple[tuple[int, int], ...]


def shipped_prompts() -> PromptSet:
    """The set of this version of headrace."""
    return read_prompts(resources.files(__package__).joinpath(_FILE).read_bytes())


def first_prompts(found: PromptSet, many: int) -> PromptSet:
    """The first ``many`` prompts of a set, for a quick look: the shipped order is shuffled, so they are a fair part."""
    return msgspec.structs.replace(found, prompts=found.prompts[:many])


def read_prompts(data: bytes) -> PromptSet:
    """A set from JSON. Raises GateError when it is malformed, empty, or a mark is not closed."""
    try:
        found = msgspec.json.decode(data, type=PromptSet)
    except msgspec.DecodeError as error:
        raise GateError(f"the prompt set is malformed: {error}") from error
    if not found.prompts:
        raise GateError("the prompt set is empty")
    for prompt in found.prompts:
        pieces(prompt)
    return msgspec.structs.replace(found, digest=hashlib.sha256(data).hexdigest()[:16])


def pieces(prompt: Prompt) -> list[tuple[str, bool]]:
    """The text cut at its marks: each part, and whether it is an answer. Raises GateError for marks that do not pair
    up."""
    parts: list[tuple[str, bool]] = []
    rest = prompt.text
    while rest:
        before, opened, tail = rest.partition(_OPEN)
        answer, closed, after = tail.partition(_CLOSE)
        if _CLOSE in before or (opened and (not closed or not answer or _OPEN in answer)):
            raise GateError(f"prompt {prompt.name!r}: {_OPEN} and {_CLOSE} do not pair up")
        if before:
            parts.append((before, False))
        if opened:
            parts.append((answer, True))
        rest = after
    return parts


def tokenized(prompt: Prompt, encode: Callable[[str, bool], list[int]]) -> TokenText:
    """A text in tokens. ``encode`` is given a part and whether it begins the text (and so gets the model's beginning
    token). Parts are tokenized each for itself, so that an answer has tokens of its own."""
    tokens: list[int] = []
    answers: list[tuple[int, int]] = []
    for text, is_answer in pieces(prompt):
        start = len(tokens)
        tokens += encode(text, start == 0)
        if is_answer and 0 < start < len(tokens):
            answers.append((start, len(tokens)))
    return TokenText(tokens, tuple(answers))
