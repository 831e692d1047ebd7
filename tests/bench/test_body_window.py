"""Bodies are made ahead of their time, within a budget, by one thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from headrace.bench.drive.body_window import BodyWindow
from headrace.bench.planned import PlannedRequest
from headrace.bench.requests.bodies import Turn, Wire
from headrace.errors import ConfigError


def planned(index: int) -> PlannedRequest:
    return PlannedRequest(index=index, class_name="c", input_tokens=1, output_tokens=1)


class Maker:
    """Notes what it makes, in which thread, and can be held up."""

    def __init__(self, size: int = 1000) -> None:
        self.made: list[int] = []
        self.threads: set[int] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.began = threading.Semaphore(0)
        self.fails_at: int | None = None
        self._size = size
        self._working = threading.Lock()

    def build(self, request: PlannedRequest, history: Sequence[Turn] = ()) -> Wire:
        assert self._working.acquire(blocking=False), "two threads make bodies at once"
        try:
            self.began.release()
            self.may_go_on.wait(10)
            if request.index == self.fails_at:
                raise ConfigError("no such text")
            self.made.append(request.index)
            self.threads.add(threading.get_ident())
            return Wire(f"/{request.index}/{len(history)}", {}, b"x" * self._size)
        finally:
            self._working.release()


@contextmanager
def started(window: BodyWindow) -> Iterator[BodyWindow]:
    window.start()
    try:
        yield window
    finally:
        window.close()


async def until(condition: object) -> None:
    assert callable(condition)
    while not condition():
        await asyncio.sleep(0.001)


async def test_what_fits_the_budget_is_made_before_the_run_and_is_there_at_once() -> None:
    maker = Maker()
    window = BodyWindow(maker, map(planned, range(5)))
    window.fill()
    assert maker.made == [0, 1, 2, 3, 4]
    with started(window):
        taking = window.take(planned(3))
        with pytest.raises(StopIteration) as taken:  # without one turn of the event loop
            taking.send(None)
    assert taken.value.value.path == "/3/0"
    assert maker.threads == {threading.get_ident()}


async def test_the_rest_follows_as_bodies_are_taken_and_never_more_than_the_budget() -> None:
    maker = Maker(size=1000)
    window = BodyWindow(maker, map(planned, range(50)), budget_bytes=10 * 2024)  # ten bodies and what is around them
    window.fill()
    assert maker.made == list(range(10))
    with started(window):
        await window.take(planned(0))
        await until(lambda: len(maker.made) == 11)
        for index in range(1, 50):
            assert (await window.take(planned(index))).path == f"/{index}/0"
            assert len(maker.made) <= index + 12
    assert maker.made == list(range(50))


async def test_a_later_turn_is_made_before_everything_that_is_not_yet_due() -> None:
    maker = Maker()
    window = BodyWindow(maker, map(planned, range(100)), budget_bytes=1)
    window.fill()
    assert maker.made == [0]
    turn = Turn(planned(0), "q", "a")
    with started(window):
        window.order(planned(500), [turn])
        assert (await window.take(planned(500))).path == "/500/1"
        for index in range(3):
            await window.take(planned(index))
    assert maker.made[:2] == [0, 500]
    assert maker.made.count(500) == 1


async def test_what_is_taken_before_its_turn_is_made_once() -> None:
    maker = Maker()
    window = BodyWindow(maker, map(planned, range(20)), budget_bytes=3 * 2024)
    window.fill()
    with started(window):
        assert (await window.take(planned(9))).path == "/9/0"
        for index in (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11):
            assert (await window.take(planned(index))).path == f"/{index}/0"
    assert len(maker.made) == len(set(maker.made))


async def test_the_event_loop_is_free_while_a_body_is_made() -> None:
    maker = Maker()
    window = BodyWindow(maker, [])
    with started(window):
        maker.may_go_on.clear()
        taking = asyncio.ensure_future(window.take(planned(1)))
        await until(lambda: maker.began.acquire(blocking=False))
        await asyncio.sleep(0)
        assert not taking.done()
        maker.may_go_on.set()
        assert (await taking).path == "/1/0"
    assert threading.get_ident() not in maker.threads


async def test_a_body_nobody_waits_for_any_more_harms_nothing() -> None:
    maker = Maker()
    window = BodyWindow(maker, [])
    with started(window):
        maker.may_go_on.clear()
        taking = asyncio.ensure_future(window.take(planned(1)))
        await until(lambda: maker.began.acquire(blocking=False))
        taking.cancel()
        maker.may_go_on.set()
        assert (await window.take(planned(2))).path == "/2/0"
    assert taking.cancelled()


async def test_what_the_maker_raises_reaches_who_takes() -> None:
    maker = Maker()
    maker.fails_at = 7
    window = BodyWindow(maker, [])
    with started(window):
        for _ in range(2):
            with pytest.raises(ConfigError, match="no such text"):
                await window.take(planned(7))


def test_what_the_maker_raises_before_the_run_is_raised_there() -> None:
    maker = Maker()
    maker.fails_at = 1
    with pytest.raises(ConfigError, match="no such text"):
        BodyWindow(maker, map(planned, range(3))).fill()
