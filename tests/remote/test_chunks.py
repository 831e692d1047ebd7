"""Chunks of streams, request bodies, metrics: what servers say and what they are told."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.remote.chunks import Piece, error_message, piece_of, read_chunk
from headrace.engines.remote.exposition import EngineFigures, read_exposition
from headrace.engines.remote.request_body import Dialect, can_continue, compose
from headrace.errors import RemoteFailure
from headrace.messages.engine import SamplingParams, Submit, WireRequest


def piece(choice: str) -> Piece | None:
    choices = read_chunk(b'{"choices":[' + choice.encode() + b"]}").choices or []
    assert len(choices) == 1
    return piece_of(choices[0])


def test_text_comes_from_both_forms() -> None:
    assert piece('{"delta":{"content":"a"}}') == ("a", [], None, None, None, None)
    assert piece('{"text":"a","finish_reason":"length","stop_reason":7}') == ("a", [], None, None, "length", 7)


@pytest.mark.parametrize("choice", ['{"delta":{"role":"assistant","content":""}}', '{"delta":{}}', '{"text":""}'])
def test_what_says_nothing_is_nothing(choice: str) -> None:
    """A role is no first token."""
    assert piece(choice) is None


def test_what_comes_besides_text_is_kept_as_it_came_and_nothing_else() -> None:
    """Tool calls and reasoning; members that no client asked for stay inside."""
    found = piece('{"delta":{"content":null,"tool_calls":[{"index":0,"id":"c"}],"internal":"10.0.0.1","refusal":null}}')
    assert found is not None and found.text == ""
    assert found.delta is not None and msgspec.json.decode(found.delta) == {"tool_calls": [{"index": 0, "id": "c"}]}


def test_log_probabilities_of_both_forms_are_the_same() -> None:
    chat = piece(
        '{"delta":{"content":"a"},"logprobs":{"content":[{"token":"a","logprob":-0.5,"bytes":[97],'
        '"top_logprobs":[{"token":"a","logprob":-0.5},{"token":"b","logprob":-1.5}]}]}}'
    )
    text = piece(
        '{"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-0.5],"top_logprobs":[{"b":-1.5,"a":-0.5}]}}'
    )
    assert chat is not None and text is not None and chat.logprobs == text.logprobs
    assert chat.logprobs is not None and [value for _, _, value in chat.logprobs[0].top] == [-0.5, -1.5]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"{", "junk"),
        (b"\xff", "junk"),
        (b"[]", "junk"),
        (b"{}", "junk"),
        (b'{"choices":[{"delta":7}]}', "junk"),
        (b'{"error":{"message":"oom"}}', "cut"),
        (b'{"choices":[],"error":"oom"}', "cut"),
    ],
)
def test_what_is_no_chunk_is_a_failure(data: bytes, kind: str) -> None:
    with pytest.raises(RemoteFailure) as caught:
        read_chunk(data)
    assert caught.value.kind == kind


@given(st.binary(max_size=200))
def test_any_bytes_are_a_chunk_or_a_failure(data: bytes) -> None:
    try:
        for choice in read_chunk(data).choices or ():
            piece_of(choice)
    except RemoteFailure:
        pass
    assert isinstance(error_message(data), str)


@pytest.mark.parametrize(
    "body", [b'{"error":{"message":"why"}}', b'{"message":"why"}', b'{"detail":"why"}', b'{"error":"why"}', b'"why"']
)
def test_errors_are_read_in_the_forms_that_servers_use(body: bytes) -> None:
    assert error_message(body) == "why"


def wired(endpoint: str = "chat", prompt: bytes = b'[{"role":"user"}]', **changes: object) -> Submit:
    wire = WireRequest(endpoint, prompt, **changes)  # type: ignore[arg-type]
    return Submit("r", [], SamplingParams(seed=5), "chat", 20, 10, wire=wire)


@pytest.mark.parametrize(("order", "priority"), [("none", None), ("lower_first", 20), ("higher_first", -20)])
def test_priority_is_told_in_the_engines_order(order: str, priority: int | None) -> None:
    """Lower is more urgent here; some engines take it the other way round."""
    _, body = compose(wired(), Dialect("vllm", "m", order))  # type: ignore[arg-type]
    assert msgspec.json.decode(body).get("priority") == priority


def test_a_body_holds_what_was_asked_and_counts_what_was_sent() -> None:
    submit = wired(fields=b'"temperature":0.5', continued="so far", continued_tokens=4)
    path, body = compose(submit, Dialect("vllm", "m"))
    said = msgspec.json.decode(body)
    assert path == "/v1/chat/completions" and said["max_tokens"] == 6 and said["seed"] == 5
    assert said["stream"] is True and said["stream_options"] == {"include_usage": True}
    assert said["messages"] == [{"role": "user"}, {"role": "assistant", "content": "so far"}]
    path, body = compose(wired("completion", b'"Once"', continued=" upon"), Dialect("openai", "m"))
    assert path == "/v1/completions" and msgspec.json.decode(body)["prompt"] == "Once upon"


@pytest.mark.parametrize(
    ("submit", "kind", "expected"),
    [
        (wired(), "vllm", True),
        (wired(), "llama-server", True),
        (wired(), "openai", False),
        (wired(continuable=False), "vllm", False),
        (wired("completion", b'"text"'), "openai", True),
        (wired("completion", b"[1,2]"), "vllm", False),
        (Submit("r", [1], SamplingParams(), "chat", 0), "vllm", False),
    ],
)
def test_who_can_continue_what(submit: Submit, kind: str, expected: bool) -> None:
    assert can_continue(submit, kind) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'vllm:num_requests_running{model_name="a"} 3.0\nvllm:num_requests_running{model_name="b"} 1\n'
            'vllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n',
            EngineFigures(4, 2, 0.25),
        ),
        ("sglang:num_running_reqs 2\nsglang:num_queue_reqs 1\nsglang:token_usage 0.5\n", EngineFigures(2, 1, 0.5)),
        ("llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n", EngineFigures(1, 0, None)),
        ("# HELP nothing\nother 1\nvllm:num_requests_running NaN\nvllm:num_requests_waiting x\n", EngineFigures()),
    ],
)
def test_engines_metrics_are_read(text: str, expected: EngineFigures) -> None:
    assert read_exposition(text) == expected


@given(st.text(max_size=300))
def test_any_text_is_read(text: str) -> None:
    figures = read_exposition("vllm:kv_cache_usage_perc " + text)
    assert figures.kv_share is None or 0 <= figures.kv_share <= 1
