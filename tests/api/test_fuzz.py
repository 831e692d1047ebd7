"""Whatever bytes or JSON come, the answer is a 2xx or a 4xx in OpenAI's form, never a 500."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.anthropic_wire import CountRequest, MessagesRequest
from headrace.api.decode import decode
from headrace.api.embeddings import EmbeddingsRequest
from headrace.api.prompts import template_messages
from headrace.api.responses_wire import ResponsesRequest
from headrace.api.sampling import choice_counts, requested_max_tokens, sampling_params
from headrace.api.wire import ChatRequest, CompletionRequest, DetokenizeRequest, GenerationRequest, TokenizeRequest
from headrace.engines.scripted import ScriptedTokenizer
from headrace.errors import RequestError
from tests.api.harness import MODEL, chat_body, serving

GENERATING: list[type[ChatRequest] | type[CompletionRequest]] = [ChatRequest, CompletionRequest]
TYPES = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]

numbers = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([0, -1, 2**63, 10**40, 1e308])
)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": texts | values}
    ),
    max_size=3,
)


def body_of(kind: type[GenerationRequest]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies near the truth: known names with any values, sensible ones more often."""
    fields = {name: numbers | values for name in kind.__struct_fields__}
    required: dict[str, st.SearchStrategy[Any]] = {"model": st.sampled_from([MODEL, "alias", "x"])}
    if kind is ChatRequest:
        required["messages"] = messages | values
    else:
        required["prompt"] = texts | st.lists(st.integers(0, 300)) | values
    optional = {name: strategy for name, strategy in fields.items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional)


@given(st.sampled_from(TYPES), st.binary(max_size=200) | values.map(msgspec.json.encode))
def test_any_bytes_decode_or_are_refused(kind: type[msgspec.Struct], body: bytes) -> None:
    try:
        decode(body, kind)
    except RequestError as error:
        assert str(error)


@given(st.sampled_from(GENERATING).flatmap(lambda kind: st.tuples(st.just(kind), body_of(kind))))
@settings(max_examples=300)
def test_any_fields_become_parameters_in_range_or_are_refused(
    case: tuple[type[ChatRequest] | type[CompletionRequest], dict[str, Any]],
) -> None:
    kind, fields = case
    request: ChatRequest | CompletionRequest
    try:
        request, _ = decode(msgspec.json.encode(fields), kind)
        sampling = sampling_params(request, ScriptedTokenizer())
        n, best_of = choice_counts(request)
        requested_max_tokens(request)
        if isinstance(request, ChatRequest):
            template_messages(request.messages)
    except RequestError as error:
        assert len(str(error)) < 2000
        return
    assert 0 <= sampling.temperature <= 2 and 0 < sampling.top_p <= 1
    assert 1 <= n <= best_of <= 128


blocks = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "input_text"])},
        optional={name: texts | values for name in ("text", "id", "name", "input", "tool_use_id", "content")},
    ),
    max_size=3,
)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": texts | blocks | values}),
    max_size=3,
)


def other_bodies() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """A path of another API, and a body near the truth for it."""

    def near(path: str, kind: type[msgspec.Struct], **required: Any) -> Any:
        names = [name for name in kind.__struct_fields__ if name not in required and name != "model"]
        said = st.fixed_dictionaries(
            {"model": st.just(MODEL), **required}, optional={name: numbers | values | blocks for name in names}
        )
        return st.tuples(st.just(path), said)

    limits = st.integers(0, 9)
    found: st.SearchStrategy[tuple[str, dict[str, Any]]] = (
        near("/v1/messages", MessagesRequest, messages=turns | values, max_tokens=limits)
        | near("/v1/messages/count_tokens", CountRequest, messages=turns | values)
        | near("/v1/responses", ResponsesRequest, input=texts | turns | values)
        | near("/v1/embeddings", EmbeddingsRequest, input=texts | values)
    )
    return found


@pytest.mark.timeout(120)
async def test_other_apis_never_answer_500(tmp_path: Path) -> None:
    """Errors have each API's own form."""
    async with serving(tmp_path, max_context_tokens=64) as served:
        loop = asyncio.get_running_loop()
        statuses: set[int] = set()

        async def post(path: str, body: bytes) -> None:
            response = await served.client.post(path, content=body)
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert response.json()["error"]["message"]
                assert (response.json().get("type") == "error") == path.startswith("/v1/messages")

        @given(other_bodies())
        @settings(max_examples=200, deadline=None)
        def drive(case: tuple[str, dict[str, Any]]) -> None:
            path, body = case
            asyncio.run_coroutine_threadsafe(post(path, msgspec.json.encode(body)), loop).result()

        await post("/v1/messages", msgspec.json.encode({**chat_body(), "max_tokens": 1}))
        await asyncio.to_thread(drive)
        for depth in range(900, 1000, 3):
            nested = b'{"a":' * depth + b"1" + b"}" * depth
            block = b'{"type":"tool_use","id":"t","name":"f","input":%b}' % nested
            head = b'{"model":"scripted","max_tokens":1,"messages":[{"role":"user","content":"x"},'
            await post("/v1/messages", head + b'{"role":"assistant","content":[%b]}]}' % block)
    assert {200, 400} <= statuses


@pytest.mark.timeout(120)
async def test_a_running_server_never_answers_500(tmp_path: Path) -> None:
    async with serving(tmp_path, max_context_tokens=64) as served:
        loop = asyncio.get_running_loop()
        statuses: set[int] = set()

        async def post(path: str, body: bytes) -> None:
            response = await served.client.post(path, content=body)
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert response.json()["error"]["message"]

        def run(path: str, body: bytes) -> None:
            asyncio.run_coroutine_threadsafe(post(path, body), loop).result()

        @given(
            st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
            st.binary(max_size=64) | (body_of(ChatRequest) | body_of(CompletionRequest)).map(msgspec.json.encode),
        )
        @settings(max_examples=200, deadline=None)
        def drive(path: str, body: bytes) -> None:
            run(path, body)

        # Whether a random body is right is left to chance.
        await post("/v1/chat/completions", msgspec.json.encode({**chat_body(), "max_tokens": 1}))
        await asyncio.to_thread(drive)
    assert {200, 400} <= statuses
