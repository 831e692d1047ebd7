"""Illegal requests: the exact bytes of each kind, and the answers that refuse it rightly.

They show whether a server stays upright and answers precisely while it is busy. A right refusal is quick, names
the client as the one at fault (4xx), and generates nothing. Servers disagree about 400 and 422, and some are
lenient on purpose (llama-server serves any model name): what came back is reported beside what was right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, get_args

import msgspec
from msgspec import Struct

from headrace.bench.planned import RIGHT_STATUSES, MalformedKind, PlannedRequest
from headrace.bench.requests.texts import PromptTexts
from headrace.bench.requests.token_scale import PATHS, Endpoint

MALFORMED_KINDS: Final[tuple[MalformedKind, ...]] = get_args(MalformedKind)

BEYOND_ANY_CONTEXT_TOKENS: Final = 2**21
"""The length of a ``too_long`` prompt when the target's context is not known: twice the longest in use."""

HUGE_BODY_BYTES: Final = 8 * 1024 * 1024
"""Twice what headrace takes unless told otherwise."""

_UNKNOWN_MODEL: Final = "no-such-model"
_JSON_HEADERS: Final = {"content-type": "application/json"}
_WORDS: Final = 32


class MalformedRequest(Struct, frozen=True):
    """What goes over the wire. ``right_statuses``: see ``RIGHT_STATUSES``."""

    path: str
    headers: dict[str, str]
    body: bytes
    right_statuses: frozenset[int]


class MalformedRequests:
    """Makes them for one target. The same request gives the same bytes.

    ``words_of`` gives the number of words for a number of tokens.
    """

    def __init__(self, *, model: str, endpoint: Endpoint, texts: PromptTexts, words_of: Callable[[float], int]) -> None:
        self._model = model
        self._endpoint: Endpoint = endpoint
        self._texts = texts
        self._words_of = words_of
        # Each takes tens of milliseconds to make; one body serves every request of its kind and length.
        self._large: dict[tuple[MalformedKind, int], bytes] = {}

    def build(self, request: PlannedRequest) -> MalformedRequest:
        """The bytes of ``request``, whose ``malformed`` says how it is wrong and ``text_seed`` which variant."""
        kind = request.malformed
        assert kind is not None
        return MalformedRequest(
            path=PATHS[self._endpoint],
            headers=_JSON_HEADERS,
            body=self._body(kind, request),
            right_statuses=RIGHT_STATUSES[kind],
        )

    def _body(self, kind: MalformedKind, request: PlannedRequest) -> bytes:
        seed = request.text_seed
        text = self._texts.own(seed, _WORDS)
        # A server that accepts it all the same must not be kept busy by it.
        legal: dict[str, object] = {"model": self._model, **self._prompt(text), "max_tokens": 1}
        match kind:
            case "broken_json":
                return _broken(msgspec.json.encode(legal), seed)
            case "wrong_type":
                return msgspec.json.encode(legal | self._wrong_type(seed))
            case "unknown_model":
                return msgspec.json.encode(legal | {"model": f"{_UNKNOWN_MODEL}-{seed % 1000}"})
            case "empty_messages":
                empty: dict[str, object] = {"messages": []} if self._endpoint == "chat" else {"prompt": []}
                return msgspec.json.encode(legal | empty)
            case "bad_range":
                return msgspec.json.encode(legal | _out_of_range(seed))
            case "too_long":
                return self._kept(kind, request.input_tokens, legal)
            case "huge_body":
                return self._kept(kind, 0, legal)
            case "no_body":
                return b""

    def _prompt(self, text: str) -> dict[str, object]:
        if self._endpoint == "completions":
            return {"prompt": text}
        return {"messages": [{"role": "user", "content": text}]}

    def _wrong_type(self, seed: int) -> dict[str, object]:
        prompt: dict[str, object] = {"messages": "hello"} if self._endpoint == "chat" else {"prompt": {"text": "hello"}}
        variants: tuple[dict[str, object], ...] = (prompt, {"max_tokens": "many"}, {"temperature": [1]}, {"stop": 7})
        return variants[seed % len(variants)]

    def _kept(self, kind: MalformedKind, tokens: int, legal: dict[str, object]) -> bytes:
        if (kind, tokens) not in self._large:
            if kind == "too_long":
                text = self._texts.own(0, self._words_of(tokens))
            else:
                piece = self._texts.own(0, 2**16)
                text = piece * -(-HUGE_BODY_BYTES // len(piece))
            self._large[kind, tokens] = msgspec.json.encode(legal | self._prompt(text))
        return self._large[kind, tokens]


def _broken(body: bytes, seed: int) -> bytes:
    variants = (
        body[: len(body) // 2],
        body[:-1] + b",}",
        body.replace(b'"', b"'"),
        body[:-1] + b',"stop":"\xff\xfe"}',
        body + b"}",
        body.removeprefix(b"{"),
    )
    return variants[seed % len(variants)]


def _out_of_range(seed: int) -> dict[str, object]:
    variants: tuple[dict[str, object], ...] = (
        {"temperature": -1.0},
        {"top_p": 7.5},
        {"presence_penalty": 50.0},
        {"temperature": 1e9},
    )
    return variants[seed % len(variants)]
