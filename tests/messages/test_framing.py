"""Frames survive any split; whatever is not a frame raises EngineError and nothing else."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import EngineError
from headrace.messages import framing
from headrace.messages.engine import (
    Abort,
    EngineLoad,
    EngineMessage,
    Fatal,
    GatewayMessage,
    Knobs,
    SamplingParams,
    SequenceOutput,
    Shutdown,
    Snapshot,
    StepOutput,
    Submit,
    TokenLogprob,
)
from headrace.scheduling.knobs import SchedulingKnobs

TEXT = st.text(max_size=30)
IDS = st.integers(-(2**31), 2**31 - 1)
SAMPLING = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
GATEWAY: st.SearchStrategy[GatewayMessage] = st.one_of(
    st.builds(
        Submit,
        request_id=TEXT,
        prompt_tokens=st.lists(IDS, max_size=20),
        sampling=SAMPLING,
        lane=TEXT,
        priority=st.integers(-9, 9),
        max_tokens=st.none() | st.integers(0, 9999),
        deadline_s=st.none() | st.floats(0, 1e9),
        arrived_s=st.floats(0, 1e9),
    ),
    st.builds(Abort, request_id=TEXT),
    st.builds(
        Knobs,
        scheduling=st.none() | st.builds(SchedulingKnobs, step_tokens=st.integers(1, 4096)),
        threads=st.none() | st.integers(1, 64),
    ),
    st.builds(Snapshot, ask_id=st.integers(0, 2**31)),
    st.just(Shutdown()),
)
LOGPROB = st.builds(
    TokenLogprob,
    token_id=IDS,
    token_bytes=st.binary(max_size=8),
    logprob=st.none() | st.floats(-100, 0),
    top=st.lists(st.tuples(IDS, st.binary(max_size=8), st.floats(-100, 0)), max_size=3),
)
LOAD = EngineLoad(1, 2, 3, 4, 5, 6, 7, 0.5, 8, 9, 2)
ENGINE: st.SearchStrategy[EngineMessage] = st.one_of(
    st.builds(
        StepOutput,
        outputs=st.lists(
            st.builds(
                SequenceOutput,
                request_id=TEXT,
                text=TEXT,
                token_ids=st.lists(IDS, max_size=3),
                logprobs=st.none() | st.lists(LOGPROB, max_size=2),
                finish=st.sampled_from([None, "stop", "length", "abort", "error"]),
                stop_reason=st.none() | TEXT | IDS,
            ),
            max_size=3,
        ),
        ended_s=st.floats(0, 1e9),
        load=st.none() | st.just(LOAD),
    ),
    st.builds(Fatal, message=TEXT),
)


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` cut at the given places."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


@given(st.lists(GATEWAY, max_size=5), st.lists(st.integers(0, 10_000), max_size=12))
def test_requests_round_trip_however_the_bytes_are_split(messages: list[GatewayMessage], cuts: list[int]) -> None:
    """The engine reads exactly the messages that the gateway sent, in order."""
    buffer, received = framing.FrameBuffer(), []
    for piece in in_pieces(b"".join(map(framing.encode, messages)), cuts):
        received += [framing.decode_for_engine(body) for body in buffer.feed(piece)]
    assert received == messages


@given(st.lists(ENGINE, max_size=5), st.lists(st.integers(0, 10_000), max_size=12))
def test_outputs_round_trip_however_the_bytes_are_split(messages: list[EngineMessage], cuts: list[int]) -> None:
    """The gateway reads exactly the messages that the engine sent, in order."""
    buffer, received = framing.FrameBuffer(), []
    for piece in in_pieces(b"".join(map(framing.encode, messages)), cuts):
        received += [framing.decode_for_gateway(body) for body in buffer.feed(piece)]
    assert received == messages


@given(GATEWAY)
def test_byte_by_byte_a_frame_completes_with_its_last_byte(message: GatewayMessage) -> None:
    """No message comes early, none comes late."""
    buffer = framing.FrameBuffer()
    *head, last = (bytes([byte]) for byte in framing.encode(message))
    assert all(not list(buffer.feed(byte)) for byte in head)
    assert [framing.decode_for_engine(body) for body in buffer.feed(last)] == [message]


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_bodies_raise_engine_error_and_nothing_else(body: bytes) -> None:
    """Random bytes are no message in either direction."""
    with pytest.raises(EngineError, match="unreadable message from the gateway"):
        framing.decode_for_engine(body)
    with pytest.raises(EngineError, match="unreadable message from the engine"):
        framing.decode_for_gateway(body)


@settings(max_examples=300)
@given(GATEWAY | ENGINE, st.data())
def test_damaged_messages_raise_engine_error_or_are_another_message(
    message: GatewayMessage | EngineMessage, data: st.DataObject
) -> None:
    """One changed byte may give another valid message; it never gives another exception."""
    body = bytearray(framing.encode(message)[4:])
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    for decode in (framing.decode_for_engine, framing.decode_for_gateway):
        try:
            decode(bytes(body))
        except EngineError:
            continue


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x82\xa4type\xa5abort\xa1x" + b"\x91" * 200_000 + b"\x90", id="nested deeper than the stack"),
        pytest.param(b"\x82\xa4type\xa5abort\xaarequest_id\xa2\xff\xfe", id="a string that is not UTF-8"),
        pytest.param(msgspec.msgpack.encode({"type": "abort"}), id="a field is missing"),
        pytest.param(msgspec.msgpack.encode({"type": "abort", "request_id": 7}), id="a field of another type"),
        pytest.param(msgspec.msgpack.encode({"type": "nothing"}), id="an unknown kind"),
        pytest.param(msgspec.msgpack.encode(Abort("a")) + b"\x00", id="bytes left over"),
        pytest.param(b"", id="empty"),
    ],
)
def test_malformed_bodies(body: bytes) -> None:
    """Known ways to be wrong, each translated."""
    with pytest.raises(EngineError):
        framing.decode_for_engine(body)
    with pytest.raises(EngineError):
        framing.decode_for_gateway(body)


def test_a_length_beyond_the_limit_is_refused_before_its_bytes_are_awaited() -> None:
    """A stream that is out of step is noticed at once; frames before it still come out."""
    buffer = framing.FrameBuffer()
    good = framing.encode(Abort("a"))
    bodies = iter(buffer.feed(good + struct.pack("<I", framing.MAX_FRAME_BYTES + 1)))
    assert framing.decode_for_engine(next(bodies)) == Abort("a")
    with pytest.raises(EngineError, match="beyond the limit"):
        next(bodies)


@pytest.mark.parametrize("name", ["step_tokens", "max_prefill_tokens", "threads"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_knob_that_would_stop_the_engine_cannot_be_made(name: str, value: int) -> None:
    """Neither in the gateway nor from the wire: an engine that applied it would compute nothing or die."""
    changed = {name: value} if name == "threads" else {"scheduling": {name: value}}
    with pytest.raises(ValueError, match=name):
        msgspec.convert({"type": "knobs", **changed}, Knobs)
    with pytest.raises(EngineError, match=name):
        framing.decode_for_engine(msgspec.msgpack.encode({"type": "knobs", **changed}))
