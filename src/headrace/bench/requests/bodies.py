"""From a planned request to what goes over the wire: path, headers, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from headrace.bench.planned import PlannedRequest, Schedule, SharedPrefix
from headrace.bench.requests.malformed import MalformedRequests
from headrace.bench.requests.texts import PromptTexts
from headrace.bench.requests.token_scale import PATHS, Endpoint, TokenScale

LANE_HEADER: Final = "x-headrace-lane"
SESSION_HEADER: Final = "x-session-id"

_GAP: Final = "\n\n"
"""Between the turns of a conversation in a plain text completion."""


class Turn(Struct, frozen=True):
    """An earlier turn of a conversation as it went: the request, the question as ``Wire`` had it, and the reply's
    whole text (empty: it failed; the next turns then leave it out)."""

    request: PlannedRequest
    question: str
    reply: str


class Wire(Struct, frozen=True):
    """One request as it is sent. ``question`` is the user's last message, for the ``Turn`` that comes of it;
    ``right_statuses`` are the HTTP statuses of a right answer (a right refusal, for an illegal request)."""

    path: str
    headers: dict[str, str]
    body: bytes
    question: str = ""
    right_statuses: frozenset[int] = frozenset({200})


class RequestBodies:
    """Writes the requests of a run for one target.

    ``ignore_eos`` asks servers that know the field (headrace, vLLM, SGLang, llama-server) to generate all of
    ``output_tokens``. ``max_tokens_field`` names the field of that limit; some hosted models want
    ``max_completion_tokens``. ``headers`` and ``body`` are added to every legal request; what a request's class
    says wins over them, and over every field written here.
    """

    def __init__(
        self,
        *,
        model: str,
        texts: PromptTexts,
        scale: TokenScale,
        endpoint: Endpoint = "chat",
        stream: bool = True,
        ignore_eos: bool = False,
        max_tokens_field: str = "max_tokens",
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> None:
        self._texts = texts
        self._scale = scale
        self._endpoint: Endpoint = endpoint
        self._max_tokens_field = max_tokens_field
        self._headers = {"content-type": "application/json", **_lower(headers or {})}
        self._fields: dict[str, object] = {"model": model, "stream": stream}
        if ignore_eos:
            self._fields["ignore_eos"] = True
        self._fields |= body or {}
        self._malformed = MalformedRequests(model=model, endpoint=endpoint, texts=texts, words_of=scale.words)

    def prepare(self, schedule: Schedule) -> None:
        """Make the large texts of illegal requests now: each takes tens of milliseconds once, and none later."""
        large = {
            (request.malformed, request.input_tokens): request
            for request in schedule.requests
            if request.malformed in ("too_long", "huge_body")
        }
        for request in large.values():
            self.build(request)

    def build(self, request: PlannedRequest, history: Sequence[Turn] = ()) -> Wire:
        """The request on the wire. ``history``: all earlier turns of its conversation, oldest first, when
        ``request.after`` is set."""
        headers = self._headers | _lower(self._routing(request)) | _lower(request.headers)
        if request.malformed is not None:
            illegal = self._malformed.build(request)
            return Wire(illegal.path, headers | illegal.headers, illegal.body, "", illegal.right_statuses)
        prompt, question = self._prompt(request, history)
        fields = self._fields | prompt | {self._max_tokens_field: request.output_tokens}
        if request.priority is not None:
            fields["priority"] = request.priority
        fields |= request.body
        if fields["stream"]:
            fields.setdefault("stream_options", {"include_usage": True})
        return Wire(PATHS[self._endpoint], headers, msgspec.json.encode(fields), question)

    def _routing(self, request: PlannedRequest) -> dict[str, str]:
        routing: dict[str, str] = {}
        if request.lane is not None:
            routing[LANE_HEADER] = request.lane
        if request.session is not None:
            routing[SESSION_HEADER] = request.session
        return routing

    def _prompt(self, request: PlannedRequest, history: Sequence[Turn]) -> tuple[dict[str, object], str]:
        """The prompt's field, and the question in it."""
        answered = [turn for turn in history if turn.reply]
        shared = self._shared(request)
        apart = bool(shared) and self._endpoint == "chat" and self._scale.system_role
        question = self._question(request, history, shared, apart=apart)
        if shared and not apart and not answered:
            question = f"{shared} {question}"
        if self._endpoint == "completions":
            texts = [text for turn in answered for text in (turn.question, turn.reply)]
            return {"prompt": _GAP.join((*texts, question))}, question
        messages = [_message("system", shared)] if apart else []
        for turn in answered:
            messages += [_message("user", turn.question), _message("assistant", turn.reply)]
        return {"messages": [*messages, _message("user", question)]}, question

    def _shared(self, request: PlannedRequest) -> str:
        """Whole, however short the prompt was planned: another length would be another prefix."""
        prefix = request.prefix
        if prefix is None or not prefix.key:
            return ""
        return self._texts.shared(prefix.key, max(1, self._scale.words(prefix.tokens)))

    def _question(self, request: PlannedRequest, history: Sequence[Turn], shared: str, *, apart: bool) -> str:
        """What the request adds of its own: the planned length less everything else that is in the prompt, at least
        a word (a prompt planned shorter than the template and the prefix is longer than planned)."""
        scale, prefix = self._scale, request.prefix
        if history:
            before = history[-1].request
            tokens = request.input_tokens - before.input_tokens - before.output_tokens - 2 * scale.message_tokens
            return self._texts.own(request.text_seed, max(1, scale.words(tokens)))
        tokens = request.input_tokens - scale.template_tokens
        if prefix is not None and prefix.hash_ids:
            return self._blocks(request, prefix, max(1, scale.words(tokens)))
        if apart:
            tokens -= scale.system_tokens
        words = scale.words(tokens) - (shared.count(" ") + 1 if shared else 0)
        return self._texts.own(request.text_seed, max(1, words))

    def _blocks(self, request: PlannedRequest, prefix: SharedPrefix, words: int) -> str:
        block_words = max(1, self._scale.words(prefix.block_tokens))
        return self._texts.blocks(prefix.hash_ids, block_words, request.text_seed, words)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    """Header names are the same in any case; the later of two must win."""
    return {name.lower(): value for name, value in headers.items()}
