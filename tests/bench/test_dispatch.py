"""When requests are sent, in simulated time: open loop, closed loop, conversations, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.drive.client import Sent
from headrace.bench.drive.dispatch import Dispatcher
from headrace.bench.planned import PlannedRequest, Schedule
from headrace.bench.records import INTERRUPTED, Outcome, RequestRecord, new_record
from headrace.bench.requests.bodies import Turn, Wire
from headrace.errors import ConfigError
from tests.bench.simulated_loop import SimulatedLoop, simulate

S = 1_000_000_000
TICK_NS = 1_100_000
"""Timers count in milliseconds: a request is sent up to one later than its time, never earlier."""


def request(index: int, due_s: float | None = None, **fields: Any) -> PlannedRequest:
    due_ns = None if due_s is None else round(due_s * S)
    return PlannedRequest(index=index, class_name="c", input_tokens=1, output_tokens=1, due_ns=due_ns, **fields)


class Bench:
    """A dispatcher whose server takes ``service_s`` of the request, and what it saw."""

    def __init__(
        self,
        requests: list[PlannedRequest],
        *,
        duration_s: float = 10,
        drain_s: float = 5,
        users: int | None = None,
        service_s: Callable[[PlannedRequest], float] = lambda _: 0.05,
        outcome: Callable[[PlannedRequest], Outcome] = lambda _: "ok",
        reading_ns: int = 0,
    ) -> None:
        """Reading the clock takes ``reading_ns``."""
        self.loop = SimulatedLoop()
        self._reading_ns = reading_ns
        self._service_s = service_s
        self._outcome = outcome
        self.records: list[RequestRecord] = []
        self.histories: dict[int, list[tuple[str, str]]] = {}
        self.kept_text: set[int] = set()
        self.in_flight = 0
        self.peak = 0
        self.failure: Exception | None = None
        self.dispatcher = Dispatcher(
            Schedule(requests, duration_s, 1, {}, {}, users),
            self,
            self,
            drain_s=drain_s,
            now_ns=self._now_ns,
            on_record=self.records.append,
        )

    def _now_ns(self) -> int:
        self.loop.jump(self._reading_ns / 1e9)
        return self.loop.now_ns()

    def order(self, request: PlannedRequest, history: Sequence[Turn] = ()) -> None:
        self.histories[request.index] = [(turn.question, turn.reply) for turn in history]

    async def take(self, request: PlannedRequest) -> Wire:
        if self.failure is not None:
            raise self.failure
        return Wire("/v1", {}, b"", question=f"q{request.index}")

    async def send(
        self, planned: PlannedRequest, request: Wire, *, due_ns: int, ready_ns: int, keep_text: bool = False
    ) -> Sent:
        record = new_record(planned, due_ns, ready_ns)
        record.sent_ns = self.loop.now_ns()
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        if keep_text:
            self.kept_text.add(planned.index)
        try:
            await asyncio.sleep(self._service_s(planned))
            record.outcome = self._outcome(planned)
        except asyncio.CancelledError:
            record.outcome = "cancelled"
        self.in_flight -= 1
        record.end_ns = self.loop.now_ns()
        return Sent(record, f"a{planned.index}" if keep_text else "")

    def run(self, *interrupts_s: float) -> dict[int, RequestRecord]:
        """Records by index. Fails when a request has two."""

        async def go() -> None:
            for at_s in interrupts_s:
                self.loop.call_at(at_s, self.dispatcher.interrupt)
            await self.dispatcher.run()

        simulate(self.loop, go())
        by_index = {record.index: record for record in self.records}
        assert len(by_index) == len(self.records)
        assert self.in_flight == 0
        return by_index

    @property
    def ended_ns(self) -> int:
        return self.loop.now_ns()


def lag_ns(record: RequestRecord) -> int:
    assert record.sent_ns is not None
    return record.sent_ns - record.ready_ns


@pytest.mark.parametrize("before_ns", [0, 500, 1500, 3000, 6000, 12_000, 20_000])
def test_a_duration_that_ends_while_the_clock_is_read_is_not_slept_through(before_ns: int) -> None:
    """The last request ends so shortly before the duration, and a look at the clock takes two microseconds: the run
    ends with the duration, give or take a timer, and not with the drain's time."""
    service_s = 1 - before_ns / S
    bench = Bench([request(0, 9.0)], service_s=lambda _: service_s, reading_ns=2000)
    bench.run()
    assert bench.ended_ns <= 10 * S + 2 * TICK_NS


# Open loop


@given(st.lists(st.floats(0, 10), max_size=60), st.floats(0.001, 20))
def test_every_request_goes_out_at_its_time_however_slow_the_server(dues_s: list[float], service_s: float) -> None:
    bench = Bench([request(i, due) for i, due in enumerate(dues_s)], service_s=lambda _: service_s)
    records = bench.run()
    assert sorted(records) == list(range(len(dues_s)))
    for record in records.values():
        assert record.due_ns == record.ready_ns == round(dues_s[record.index] * S)
        assert 0 <= lag_ns(record) <= TICK_NS


def test_nothing_bounds_how_many_are_in_flight() -> None:
    bench = Bench([request(i, i / 1000) for i in range(3000)], service_s=lambda _: 9)
    bench.run()
    assert bench.peak == bench.dispatcher.peak_in_flight == 3000


def test_the_run_lasts_its_duration_when_all_is_answered_before() -> None:
    bench = Bench([request(0, 1)], duration_s=10)
    bench.run()
    assert 10 * S <= bench.ended_ns <= 10 * S + TICK_NS


def test_the_run_ends_with_its_last_answer_after_the_duration() -> None:
    bench = Bench([request(0, 9)], duration_s=10, service_s=lambda _: 3)
    records = bench.run()
    assert records[0].outcome == "ok"
    assert 12 * S <= bench.ended_ns <= 12 * S + 2 * TICK_NS


def test_what_is_in_flight_after_the_drain_time_is_cancelled() -> None:
    bench = Bench([request(0, 1), request(1, 9)], drain_s=5, service_s=lambda r: 60 if r.index else 13)
    records = bench.run()
    assert [records[i].outcome for i in (0, 1)] == ["ok", "cancelled"]
    assert records[1].sent_ns is not None
    assert 15 * S <= bench.ended_ns <= 15 * S + TICK_NS


# Conversations


def test_a_later_turn_waits_for_the_turn_before_it_and_keeps_its_due_time() -> None:
    requests = [request(0, 1), request(1, 2, after=0), request(2, 8, after=1)]
    records = Bench(requests, service_s=lambda _: 3).run()
    assert [record.due_ns for record in records.values()] == [1 * S, 2 * S, 8 * S]
    assert records[1].ready_ns == records[0].end_ns  # late: the turn before ended after it was due
    assert records[2].ready_ns == 8 * S  # in time
    assert all(0 <= lag_ns(record) <= TICK_NS for record in records.values())


def test_a_later_turn_holds_nothing_else_back() -> None:
    requests = [request(0, 1), request(1, 2, after=0), request(2, 3), request(3, 3, after=2)]
    records = Bench(requests, service_s=lambda r: 4 if r.index == 0 else 0.5).run()
    assert [lag_ns(records[i]) <= TICK_NS for i in range(4)] == [True] * 4
    assert records[3].ready_ns < records[1].ready_ns


def test_a_later_turn_gets_the_history_and_only_what_is_needed_is_kept() -> None:
    requests = [request(0, 1), request(1, 2, after=0), request(2, 3, after=1), request(3, 4)]
    bench = Bench(requests)
    bench.run()
    assert bench.histories == {1: [("q0", "a0")], 2: [("q0", "a0"), ("q1", "a1")]}
    assert bench.kept_text == {0, 1}


def test_a_failed_turn_does_not_take_the_load_of_the_next_one_away() -> None:
    requests = [request(0, 1), request(1, 2, after=0), request(2, 3, after=1)]
    bench = Bench(requests, outcome=lambda r: "ok" if r.index else "shed")
    records = bench.run()
    assert [records[i].outcome for i in range(3)] == ["shed", "ok", "ok"]
    assert bench.histories[2] == [("q0", ""), ("q1", "a1")]


def test_turns_that_could_not_be_sent_are_accounted_for() -> None:
    requests = [request(0, 1), request(1, 2, after=0), request(2, 3, after=1)]
    records = Bench(requests, service_s=lambda _: 100).run()
    assert [records[i].outcome for i in range(3)] == ["cancelled"] * 3
    assert [records[i].sent_ns is None for i in range(3)] == [False, True, True]
    assert [records[i].due_ns for i in range(3)] == [1 * S, 2 * S, 3 * S]


@given(
    st.lists(st.tuples(st.floats(0, 10), st.booleans(), st.floats(0, 8)), min_size=1, max_size=40),
    st.floats(0, 6),
)
def test_every_planned_request_of_an_open_loop_has_one_record(
    plan: list[tuple[float, bool, float]], drain_s: float
) -> None:
    requests = [request(i, due_s, after=i - 1 if follows and i else None) for i, (due_s, follows, _) in enumerate(plan)]
    bench = Bench(requests, drain_s=drain_s, service_s=lambda r: plan[r.index][2])
    records = bench.run()
    assert sorted(records) == list(range(len(plan)))
    for record in records.values():
        before = requests[record.index].after
        if record.sent_ns is not None and before is not None:
            end_ns = records[before].end_ns
            assert end_ns is not None
            assert record.sent_ns >= end_ns


def test_a_turn_after_an_unknown_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="come after"):
        Bench([request(0, 1, after=7)]).run()


# Closed loop


def rows(users: int, each: int, **fields: Any) -> list[PlannedRequest]:
    return [request(i, user=i % users, **fields) for i in range(users * each)]


def test_each_user_has_one_request_at_a_time_and_thinks_between_them() -> None:
    bench = Bench(rows(3, 30, think_ns=S // 2), users=3, service_s=lambda r: 0.2 + 0.1 * (r.index % 3))
    records = bench.run()
    assert bench.peak == 3
    for user in range(3):
        own = [record for record in records.values() if record.user == user]
        assert own[0].due_ns == 0
        for before, after in zip(own, own[1:], strict=False):
            assert before.end_ns is not None
            assert after.due_ns == after.ready_ns == before.end_ns + S // 2
            assert lag_ns(after) <= TICK_NS


def test_a_closed_loop_ends_at_its_duration_and_drains() -> None:
    bench = Bench(rows(2, 100), users=2, duration_s=10, drain_s=5, service_s=lambda r: 3 if r.user else 40)
    records = bench.run()
    assert {record.outcome for record in records.values() if record.user == 1} == {"ok"}
    assert [record.outcome for record in records.values() if record.user == 0] == ["cancelled"]
    assert all(record.sent_ns is not None and record.sent_ns < 10 * S for record in records.values())
    assert max(record.end_ns or 0 for record in records.values() if record.user == 1) > 10 * S
    assert 15 * S <= bench.ended_ns <= 15 * S + TICK_NS


def test_users_whose_rows_are_too_short_are_reported() -> None:
    bench = Bench(rows(4, 2), users=4)
    assert len(bench.run()) == 8
    assert bench.dispatcher.users_without_work == 4


def test_a_turn_waits_for_another_users_turn_too() -> None:
    requests = [request(0, user=0), request(1, user=1), request(2, user=1, after=0)]
    records = Bench(requests, users=2, service_s=lambda r: 3 if r.index == 0 else 1).run()
    assert records[2].due_ns == records[1].end_ns
    assert records[2].ready_ns == records[0].end_ns


# Interrupts


def test_the_first_interrupt_stops_sending_and_drains() -> None:
    requests = [request(i, i) for i in range(10)] + [request(10, 2, after=2)]
    bench = Bench(requests, service_s=lambda _: 2, drain_s=1)
    records = bench.run(3.5)
    # Sent at 0 to 3 s; at 3.5 s two of them are in flight: one ends within the drain time, one does not. What was
    # due later was not offered; the turn that was due and had to wait was.
    assert sorted(records) == [0, 1, 2, 3, 10]
    assert [records[i].outcome for i in (0, 1, 2, 3, 10)] == ["ok", "ok", "ok", "cancelled", "cancelled"]
    assert records[10].sent_ns is None
    assert bench.dispatcher.interrupted_ns == round(3.5 * S)
    assert round(4.5 * S) <= bench.ended_ns <= round(4.5 * S) + TICK_NS


def test_an_interrupt_with_nothing_in_flight_ends_at_once() -> None:
    bench = Bench([request(0, 0), request(1, 9)])
    assert sorted(bench.run(4)) == [0]
    assert bench.ended_ns <= 4 * S + TICK_NS


def test_the_second_interrupt_ends_at_once() -> None:
    bench = Bench([request(0, 0)], service_s=lambda _: 100, drain_s=50)
    records = bench.run(1, 2)
    assert (records[0].outcome, records[0].error) == ("cancelled", INTERRUPTED)
    assert bench.ended_ns <= 2 * S + TICK_NS


def test_only_what_the_second_interrupt_cancelled_says_so() -> None:
    requests = [request(0, 0), request(1, 0), request(2, 0, after=1)]
    bench = Bench(requests, service_s=lambda r: 100 if r.index else 0.5, drain_s=5)
    records = bench.run(1, 2)
    assert [records[i].error for i in range(3)] == [None, INTERRUPTED, INTERRUPTED]
    # The drain's end cuts off what had its time: the server's doing.
    records = Bench([request(0, 0)], service_s=lambda _: 100, drain_s=5).run(1)
    assert (records[0].outcome, records[0].error) == ("cancelled", None)


def test_an_interrupt_in_the_drain_does_not_lengthen_it() -> None:
    bench = Bench([request(0, 0)], service_s=lambda _: 100, duration_s=10, drain_s=5)
    bench.run(14)
    assert bench.ended_ns <= 15 * S + TICK_NS


def test_a_closed_loop_is_interrupted_too() -> None:
    bench = Bench(rows(2, 100), users=2, service_s=lambda _: 1)
    records = bench.run(4.5)
    assert len(records) == 10
    assert bench.ended_ns <= 5 * S + 10 * TICK_NS


def test_what_the_body_maker_raises_ends_the_run() -> None:
    bench = Bench([request(0, 1), request(1, 2)])
    bench.failure = ConfigError("no such text")
    with pytest.raises(ConfigError, match="no such text"):
        bench.run()
