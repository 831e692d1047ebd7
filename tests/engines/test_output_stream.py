"""The way from an engine's message to its reader, with and without a sink."""

from __future__ import annotations

import asyncio

import pytest

from headrace.engines.output_stream import MOST_UNREAD, OutputStream
from headrace.errors import EngineGone
from headrace.messages.engine import SequenceOutput


def output(text: str, *, finish: bool = False) -> SequenceOutput:
    return SequenceOutput("a", text=text, finish="stop" if finish else None)


def new_stream() -> OutputStream:
    return OutputStream(lambda _: None, lambda _: None)


async def reader_waits() -> None:
    """Let the reading task run until it waits for the next output."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_sink_takes_what_comes_while_the_reader_waits_and_the_reader_gets_the_end() -> None:
    stream, taken = new_stream(), list[str]()

    async def read() -> list[str]:
        return [item.text async for item in stream]

    def sink(item: SequenceOutput) -> bool:
        taken.append(item.text)
        return True

    reading = asyncio.create_task(read())
    await reader_waits()
    stream.forward(sink)
    for text in "ab":
        stream.push(output(text))
    stream.push(output("c", finish=True))
    assert await reading == ["c"]
    assert taken == ["a", "b"]


async def test_nothing_overtakes_what_the_reader_has_not_dealt_with() -> None:
    """An output that the sink declined is with the reader; what follows waits behind it."""
    stream, order = new_stream(), list[str]()
    busy = asyncio.Event()

    async def read() -> None:
        async for item in stream:
            await busy.wait()
            order.append(item.text)

    def sink(item: SequenceOutput) -> bool:
        if item.text == "declined":
            return False
        order.append(item.text)
        return True

    reading = asyncio.create_task(read())
    await reader_waits()
    stream.forward(sink)
    for text in ("first", "declined", "behind"):
        stream.push(output(text))
    await reader_waits()
    stream.push(output("still behind"))
    assert order == ["first"]
    busy.set()
    await reader_waits()
    stream.push(output("later"))
    assert order == ["first", "declined", "behind", "still behind", "later"]
    stream.push(output("", finish=True))
    await reading


async def test_an_error_goes_to_the_reader() -> None:
    stream = new_stream()
    reading = asyncio.ensure_future(anext(stream))
    await reader_waits()
    stream.forward(lambda _: True)
    stream.push(EngineGone("gone"))
    with pytest.raises(EngineGone):
        await reading


async def test_without_a_waiting_reader_the_sink_is_not_asked() -> None:
    stream = new_stream()
    stream.forward(lambda _: pytest.fail("asked"))
    stream.push(output("a"))
    assert (await anext(stream)).text == "a"


async def test_whoever_pushes_hears_when_the_reader_is_slow_and_when_it_has_caught_up() -> None:
    """Each once, however many outputs come: memory is bounded by what is not sent then."""
    stream, heard = new_stream(), list[bool]()
    stream.bound(heard.append)
    reading = asyncio.create_task(anext(stream))
    await reader_waits()
    for _ in range(MOST_UNREAD + 11):
        stream.push(output("x"))
    await reading
    assert heard == [True] and stream.pressed
    for _ in range(MOST_UNREAD + 9):
        await anext(stream)
    assert heard == [True, False] and not stream.pressed


async def test_a_stream_that_is_made_to_fail_tells_its_reader_and_aborts_what_runs() -> None:
    """The error comes after what had come before."""
    aborted = list[OutputStream]()
    stream = OutputStream(lambda _: None, aborted.append)
    reading = asyncio.create_task(anext(stream))
    await reader_waits()
    stream.push(output("a"))
    stream.fail(EngineGone("broken off"))
    assert (await reading).text == "a"
    with pytest.raises(EngineGone, match="broken off"):
        await anext(stream)
    assert aborted == [stream]
