"""How many of the target's tokens a word is, and how many its chat template adds: measured, not assumed.

Tried in this order: the target's ``/tokenize`` with the request's own form (headrace, vLLM), ``/tokenize`` with
plain text (llama-server), ``usage.prompt_tokens`` of a few tiny completions. A target that does none of it is
taken to have one token a word, and ``TokenScale.source`` says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

from msgspec import Struct

from headrace.bench.requests.words import WORDS

Endpoint = Literal["chat", "completions"]
Post = Callable[[str, dict[str, object]], Awaitable[tuple[int, object]]]
"""POST a JSON object to a path of the target: its status, and its answer's JSON (None when it is none). Raises
what the client raises when there is no answer."""

PATHS: Final[dict[Endpoint, str]] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

_SHORT_WORDS: Final = 16
_SPREAD_WORDS: Final = 256
"""A measuring completion costs this much prefill."""


class TokenScale(Struct, frozen=True):
    """Tokens of a prompt with w words in m messages: about ``template_tokens + w * tokens_per_word
    + (m - 1) * message_tokens``.

    ``system_tokens`` is what a system message adds instead of ``message_tokens`` (negative where it takes the
    place of a default one). ``system_role``: the target's template takes a system message.
    """

    tokens_per_word: float = 1.0
    template_tokens: float = 0.0
    message_tokens: float = 0.0
    system_tokens: float = 0.0
    system_role: bool = True
    source: Literal["tokenize", "usage", "assumed"] = "assumed"

    def words(self, tokens: float) -> int:
        """The number of words nearest to ``tokens`` tokens, at least 0."""
        return max(0, round(tokens / self.tokens_per_word))


async def measure_token_scale(post: Post, *, model: str, endpoint: Endpoint = "chat") -> TokenScale:
    """Ask the target. Sends at most ten requests; those that generate ask for one token each.

    Errors of ``post`` itself (no connection) are raised as they are.
    """
    counters = (
        _TokenizeForm(post, model, endpoint),
        _TokenizeText(post, model, endpoint),
        _Usage(post, model, endpoint),
    )
    for counter in counters:
        scale = await _measure(counter, endpoint)
        if scale is not None:
            return scale
    return TokenScale()


Message = dict[str, str]


class _Counter:
    """Counts a prompt's tokens in one way; None: the target does not do it."""

    source: Literal["tokenize", "usage"]
    spread: tuple[str, ...]
    """The words whose tokens are counted: all of them where counting is cheap."""

    def __init__(self, post: Post, model: str, endpoint: Endpoint) -> None:
        self._post = post
        self._model = model
        self._endpoint: Endpoint = endpoint

    async def count(self, messages: list[Message]) -> int | None:
        raise NotImplementedError

    async def _answer(self, path: str, body: dict[str, object]) -> dict[str, Any]:
        status, answer = await self._post(path, body)
        return answer if status == 200 and isinstance(answer, dict) else {}

    def _prompt(self, messages: list[Message]) -> dict[str, object]:
        if self._endpoint == "completions":
            return {"prompt": messages[0]["content"]}
        return {"messages": messages}


class _TokenizeForm(_Counter):
    """``{"model", "messages" | "prompt"}`` -> ``{"count"}``: headrace, vLLM."""

    source = "tokenize"
    spread = WORDS

    async def count(self, messages: list[Message]) -> int | None:
        answer = await self._answer("/tokenize", {"model": self._model, **self._prompt(messages)})
        return _number(answer.get("count"))


class _TokenizeText(_Counter):
    """llama-server: ``{"content"}`` -> ``{"tokens"}``, of the text that ``/apply-template`` makes of messages."""

    source = "tokenize"
    spread = WORDS

    async def count(self, messages: list[Message]) -> int | None:
        content: object = messages[0]["content"]
        if self._endpoint == "chat":
            content = (await self._answer("/apply-template", {"messages": messages})).get("prompt")
            if not isinstance(content, str):
                return None
        body: dict[str, object] = {"content": content, "add_special": True, "parse_special": True}
        tokens = (await self._answer("/tokenize", body)).get("tokens")
        # A server without this form answers for a prompt of nothing.
        return len(tokens) if isinstance(tokens, list) and len(tokens) > 1 else None


class _Usage(_Counter):
    """``usage.prompt_tokens`` of a completion of one token."""

    source = "usage"
    # Evenly over the list, which is sorted.
    spread = WORDS[:: len(WORDS) // _SPREAD_WORDS]

    async def count(self, messages: list[Message]) -> int | None:
        body: dict[str, object] = {"model": self._model, "max_tokens": 1, **self._prompt(messages)}
        usage = (await self._answer(PATHS[self._endpoint], body)).get("usage")
        return _number(usage.get("prompt_tokens")) if isinstance(usage, dict) else None


async def _measure(counter: _Counter, endpoint: Endpoint) -> TokenScale | None:
    short = " ".join(WORDS[:_SHORT_WORDS])
    user = {"role": "user", "content": short}
    base = await counter.count([user])
    if base is None:
        return None
    # One prompt is the other and the words to be counted behind it: the difference is theirs alone.
    longer = await counter.count([{"role": "user", "content": " ".join((short, *counter.spread))}])
    if longer is None or longer <= base:
        return None
    per_word = (longer - base) / len(counter.spread)
    template = base - per_word * _SHORT_WORDS
    if endpoint == "completions":
        return TokenScale(tokens_per_word=per_word, template_tokens=max(template, 0.0), source=counter.source)
    message = {"role": "assistant", "content": short}
    dialogue = await counter.count([user, message, user])
    system = await counter.count([{"role": "system", "content": short}, user])
    text = per_word * _SHORT_WORDS
    return TokenScale(
        tokens_per_word=per_word,
        template_tokens=max(template, 0.0),
        message_tokens=0.0 if dialogue is None else max((dialogue - base) / 2 - text, 0.0),
        system_tokens=0.0 if system is None else system - base - text,
        system_role=system is not None,
        source=counter.source,
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
