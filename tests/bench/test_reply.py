"""What is read out of an answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.drive.reply import MAX_ERROR_CHARS, Reply, error_text
from headrace.bench.drive.sse import SseEvent
from headrace.bench.drive.usage import Counts
from headrace.bench.records import MOST_TOKENS


def event(fields: Any, kind: str = "message") -> SseEvent:
    return SseEvent(kind, fields if isinstance(fields, bytes) else msgspec.json.encode(fields))


def delta(usage: dict[str, Any] | None = None, **fields: Any) -> SseEvent:
    chunk = {"id": "c-1", "choices": [{"index": 0, "delta": fields}]}
    return event(chunk if usage is None else {**chunk, "usage": usage})


def counted(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": 5, "completion_tokens": tokens}


def stream(*events: SseEvent, keep_text: bool = False) -> Reply:
    """Events one nanosecond apart, from 100 on."""
    reply = Reply(keep_text=keep_text)
    for at_ns, one in enumerate(events, 100):
        reply.take(one, at_ns)
    return reply


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a", "content": None},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"content": [{"type": "text", "text": "a"}]},
    ],
)
def test_what_the_model_generated_is_content(fields: dict[str, Any]) -> None:
    assert stream(delta(**fields)).chunk_ns == [100]


@pytest.mark.parametrize(
    "fields", [{"role": "assistant"}, {"role": "assistant", "content": ""}, {}, {"content": None}, {"tool_calls": []}]
)
def test_a_delta_that_carries_nothing_is_no_content(fields: dict[str, Any]) -> None:
    assert stream(delta(**fields), delta(content="a")).chunk_ns == [101]


def test_completions_text_is_content() -> None:
    reply = stream(event({"choices": [{"text": "a"}]}), event({"choices": [{"text": "", "finish_reason": "stop"}]}))
    assert reply.chunk_ns == [100]
    assert reply.finish_reason == "stop"
    assert reply.whole


def test_tokens_per_chunk_are_known_when_every_chunk_is_counted() -> None:
    reply = stream(
        delta(counted(0), role="assistant"),
        delta(counted(3), content="abc"),
        delta(counted(4)),  # a token that shows nothing yet belongs to the chunk that shows it
        delta(counted(6), content="de"),
        event({"choices": [], "usage": counted(7)}),  # the end token
    )
    assert reply.chunk_tokens == [3, 3]
    assert reply.completion_tokens == 7


def test_tokens_per_chunk_are_unknown_when_one_chunk_is_not_counted() -> None:
    assert stream(delta(counted(1), content="a"), delta(content="b"), delta(counted(3), content="c")).chunk_tokens == []


def test_tokens_per_chunk_are_unknown_when_the_count_goes_back() -> None:
    assert stream(delta(counted(5), content="a"), delta(counted(2), content="b")).chunk_tokens == []


def test_the_last_usage_counts_wherever_it_stands() -> None:
    before = event({"choices": [], "usage": counted(9)})
    assert stream(before, delta(content="a"), event(b"[DONE]")).completion_tokens == 9
    assert stream(delta(content="a"), event(b"[DONE]"), before).completion_tokens == 9
    assert stream(delta(content="a"), event(b"[DONE]")).completion_tokens is None
    assert stream(event({"choices": [], "usage": None})).completion_tokens is None


def test_cached_tokens_in_both_shapes() -> None:
    openai = {**counted(1), "prompt_tokens_details": {"cached_tokens": 4}}
    deepseek = {**counted(1), "prompt_cache_hit_tokens": 4}
    for usage in (openai, deepseek):
        reply = stream(event({"choices": [], "usage": usage}))
        assert (reply.prompt_tokens, reply.cached_tokens) == (5, 4)


HOSTILE_COUNTS = [-1, -5, 2**63, 2**70, 10**300, MOST_TOKENS + 1, 3_000_000_000, 4.5, True, "5", [5], {"n": 5}]


@pytest.mark.parametrize("count", HOSTILE_COUNTS)
@pytest.mark.parametrize("field", ["completion_tokens", "prompt_tokens", "prompt_cache_hit_tokens"])
def test_a_count_that_cannot_be_is_no_usage_and_noted_and_no_error(field: str, count: Any) -> None:
    usage = {**counted(1), field: count}
    reply = stream(delta(content="a"), event({"choices": [], "usage": usage}), event(b"[DONE]"))
    assert reply.whole
    assert reply.counts == Counts()
    assert "usage: " in str(reply.usage_note)
    assert reply.chunk_tokens == []


@pytest.mark.parametrize("usage", [b"[]", b"7", b'"x"', b'{"completion_tokens": 1e999}', b"[" * 5000 + b"]" * 5000])
def test_a_usage_that_is_none_is_no_error_of_the_answer(usage: bytes) -> None:
    reply = stream(delta(content="a"), event(b'{"choices": [], "usage": ' + usage + b"}"), event(b"[DONE]"))
    assert reply.completion_tokens is None
    if len(usage) < 5000:  # beyond the decoder's depth the whole event is unreadable
        assert reply.whole
        assert reply.usage_note is not None


@pytest.mark.parametrize("count", [5, 5.0])
def test_a_whole_number_counts_however_it_is_written(count: float) -> None:
    reply = stream(event({"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": count}}))
    assert (reply.counts, reply.usage_note) == (Counts(5, 5, None), None)


def test_once_a_count_cannot_be_no_later_one_is_believed() -> None:
    reply = stream(delta(counted(1), content="a"), delta(counted(-2), content="b"), delta(counted(3), content="c"))
    assert reply.counts == Counts()
    assert reply.chunk_tokens == []


@pytest.mark.parametrize(
    ("text", "asked", "claimed", "believed"),
    [(" ", 16, 100_000, False), (" ", 16, 17, True), ("x" * 900, 16, 800, True), (" ", None, 100_000, True)],
)
def test_a_count_far_beyond_what_was_asked_for_and_can_be_seen_is_not_believed(
    text: str, asked: int | None, claimed: int, believed: bool
) -> None:
    reply = Reply(asked_tokens=asked)
    reply.take(delta(counted(claimed), content=text), 100)
    reply.take(event(b"[DONE]"), 101)
    assert reply.whole
    assert reply.completion_tokens == (claimed if believed else None)
    assert reply.chunk_tokens == ([claimed] if believed else [])
    assert (reply.usage_note is None) is believed


def test_tokens_per_chunk_are_unknown_when_the_final_count_is_less_than_theirs() -> None:
    reply = stream(delta(counted(4), content="a"), event({"choices": [], "usage": counted(2)}))
    assert (reply.completion_tokens, reply.chunk_tokens) == (2, [])


@given(st.lists(st.integers(-3, 12), max_size=8), st.integers(-3, 40))
def test_tokens_per_chunk_never_exceed_the_answers(counts: list[int], final: int) -> None:
    chunks = [delta(counted(count), content="a") for count in counts]
    reply = stream(*chunks, event({"choices": [], "usage": counted(final)}))
    assert all(tokens >= 0 for tokens in reply.chunk_tokens)
    assert sum(reply.chunk_tokens) <= (reply.completion_tokens or 0)


@pytest.mark.parametrize(
    "nulls",
    [
        b"null",
        b'{"choices": null, "usage": null, "error": null, "id": null}',
        b'{"choices": [null, {"delta": null, "text": null, "finish_reason": null}]}',
        b'{"choices": [], "usage": {"prompt_tokens": null, "completion_tokens": null, "prompt_tokens_details": null}}',
    ],
)
def test_null_fields_are_no_error(nulls: bytes) -> None:
    reply = stream(event(nulls), delta(content="a"), event(nulls), event(b"[DONE]"))
    assert reply.whole
    assert (reply.chunk_ns, reply.counts, reply.usage_note) == ([101], Counts(), None)


def test_finish_reasons_and_ids_are_shortened() -> None:
    long = {"id": "i" * 5000, "choices": [{"delta": {"content": "a"}, "finish_reason": {"x": "y" * 5000}}]}
    reply = stream(event(long))
    assert (len(reply.id or ""), len(reply.finish_reason or "")) == (MAX_ERROR_CHARS, MAX_ERROR_CHARS)
    long["choices"] = [{"delta": {}, "finish_reason": "stop" * 500}]
    assert len(stream(event(long)).finish_reason or "") == MAX_ERROR_CHARS


def test_an_event_nested_too_deep_is_an_error() -> None:
    deep = b'{"choices": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    assert "not OpenAI's" in str(stream(event(deep)).error)
    assert error_text(deep) == deep[:MAX_ERROR_CHARS].decode()


@pytest.mark.parametrize(
    "bad",
    [
        event({"error": {"message": "out of memory", "code": 500}}),
        event({"error": "out of memory"}),
        event({"message": "out of memory"}, "error"),
        event({"object": "error", "message": "out of memory", "code": 500}),
        event(b"out of memory", "error"),
    ],
)
def test_an_error_in_the_stream_is_no_whole_answer(bad: SseEvent) -> None:
    reply = stream(delta(content="a"), bad, event(b"[DONE]"))
    assert reply.error == "out of memory"
    assert not reply.whole
    assert reply.chunk_ns == [100]


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"choices": 5}', b"\xff\xfe", b""])
def test_an_event_that_is_not_the_api_s_is_an_error(data: bytes) -> None:
    reply = stream(event(data))
    assert reply.error is not None
    assert "not OpenAI's" in reply.error


def test_the_end_is_a_finish_reason_or_done() -> None:
    assert not stream(delta(content="a")).whole
    assert stream(delta(content="a"), event(b"[DONE]")).whole
    assert stream(event({"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]})).whole


def test_text_is_kept_only_when_asked_for() -> None:
    events = (delta(content="Hé"), delta(reasoning_content="hm"), delta(content="llo"))
    assert stream(*events, keep_text=True).text == "Héllo"
    assert stream(*events).text == ""


def test_a_whole_answer_is_one_chunk() -> None:
    reply = Reply(keep_text=True)
    body = {
        "id": "c-2",
        "choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}],
        "usage": counted(2),
    }
    reply.take_whole(msgspec.json.encode(body), 77)
    assert (reply.chunk_ns, reply.chunk_tokens, reply.completion_tokens) == ([77], [2], 2)
    assert (reply.text, reply.id, reply.finish_reason, reply.whole) == ("Hello", "c-2", "stop", True)


@pytest.mark.parametrize("body", [b"<html>", b"", b"{}", b'{"choices": []}', b'{"error": {"message": "no"}}'])
def test_a_whole_body_without_choices_is_no_answer(body: bytes) -> None:
    reply = Reply()
    reply.take_whole(body, 1)
    assert reply.error
    assert not reply.whole
    assert reply.chunk_ns == []


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too long", "type": "x"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc":["body"]}]'),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b"Bad Gateway", "Bad Gateway"),
        (b"", ""),
    ],
)
def test_the_message_is_found_in_every_usual_shape(body: bytes, text: str) -> None:
    assert error_text(body) == text


def test_a_long_error_is_shortened() -> None:
    assert len(error_text(msgspec.json.encode({"error": {"message": "x" * 5000}}))) == MAX_ERROR_CHARS
