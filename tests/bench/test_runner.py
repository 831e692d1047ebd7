"""Whole runs against a server with known answers, and against one that dies."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.bench.drive.live import Snapshot
from headrace.bench.drive.runner import RunSettings, run
from headrace.bench.load.build_schedule import schedule_sha256
from headrace.bench.planned import PlannedRequest, Schedule, SloTarget
from headrace.bench.record_file import RunResult, read_run
from headrace.bench.records import INTERRUPTED, RequestRecord
from headrace.bench.requests.bodies import RequestBodies, Turn, Wire
from headrace.bench.requests.texts import PromptTexts
from headrace.bench.requests.token_scale import TokenScale
from headrace.bench.results.validity import validity
from headrace.errors import ConfigError
from tests.bench.truth_server import TruthServer

MEDIAN_ERROR_NS = 5_000_000
"""Of times, against the server's own: see test_client."""

BODIES = RequestBodies(model="truth", texts=PromptTexts(), scale=TokenScale())


@pytest.fixture(scope="module")
def server() -> Iterator[TruthServer]:
    one = TruthServer()
    yield one
    one.close()


def planned(index: int, due_s: float | None, truth: dict[str, Any] | None = None, **fields: Any) -> PlannedRequest:
    return PlannedRequest(
        index=index,
        class_name="chat",
        input_tokens=10,
        output_tokens=4,
        due_ns=None if due_s is None else round(due_s * 1e9),
        body={} if truth is None else {"truth": truth},
        **fields,
    )


def schedule(requests: Sequence[PlannedRequest], duration_s: float, users: int | None = None) -> Schedule:
    slos = {"chat": SloTarget(ttft_s=0.5)}
    return Schedule(list(requests), duration_s, 7, {"arrivals": "by hand"}, slos, users)


def go(url: str, plan: Schedule, *, maker: Any = BODIES, **rest: Any) -> RunResult:
    settings = {name: rest.pop(name) for name in list(rest) if name in RunSettings.__dataclass_fields__}
    environment = rest.pop("environment", {})
    return run(plan, maker, RunSettings(target=url, model="truth", **settings), environment=environment, **rest)


def by_index(result: RunResult) -> dict[int, RequestRecord]:
    found = {record.index: record for record in result.records}
    assert len(found) == len(result.records)
    return found


# Truth


def test_a_run_reports_what_the_server_did(server: TruthServer) -> None:
    requests = [
        planned(i, i * 0.01, {"key": f"run-{i}", "tokens": 12, "tokens_per_chunk": 3, "first_ms": 15, "gap_ms": 6})
        for i in range(40)
    ]
    result = go(server.url, schedule(requests, 0.5))
    records = by_index(result)
    assert sorted(records) == list(range(40))
    ttft_errors_ns: list[int] = []
    gap_errors_ns: list[int] = []
    for index, record in records.items():
        told = server.told(f"run-{index}")
        assert (record.outcome, record.output_tokens, len(record.chunk_ns)) == ("ok", 12, 4)
        assert record.sent_ns is not None
        assert record.first_ns is not None
        assert record.due_ns == record.ready_ns <= record.sent_ns
        # Between the server's reading the request and its writing the first token lies less time than between
        # the client's sending and its reading it.
        ttft_errors_ns.append((record.first_ns - record.sent_ns) - (told.chunk_ns[0] - told.first_byte_ns))
        gaps = zip(record.chunk_ns, told.chunk_ns, strict=True)
        seen = [mine - theirs for mine, theirs in gaps]
        gap_errors_ns += [abs(after - before) for before, after in zip(seen, seen[1:], strict=False)]
    assert min(ttft_errors_ns) >= 0
    assert statistics.median(ttft_errors_ns) <= MEDIAN_ERROR_NS
    assert statistics.median(gap_errors_ns) <= MEDIAN_ERROR_NS


def test_the_facts_of_a_run_are_with_its_records(server: TruthServer, tmp_path: Path) -> None:
    plan = schedule([planned(0, 0.05), planned(1, 0.1)], 0.2)
    path = tmp_path / "run.jsonl"
    result = go(f"{server.url}/v1/", plan, records_path=path, label="A", warmup_s=0.05, wall_clock=lambda: 1e9)
    info = result.info
    assert (info.target, info.model, info.label, info.seed) == (server.url, "truth", "A", 7)
    assert (info.duration_s, info.warmup_s, info.interrupted, info.concurrency) == (0.2, 0.05, False, None)
    assert 0.2 <= info.wall_s < 5
    assert info.started_at.startswith("2001-09-09T01:46:40")
    assert info.slos == {"chat": {"ttft_s": 0.5}}
    assert info.schedule_sha256 == schedule_sha256(plan)
    assert info.health.peak_in_flight >= 1
    assert 0 < info.health.cpu_share < 10
    assert read_run(path) == result
    assert result.warnings == []


def test_every_kind_of_failure_of_one_run_is_in_its_records(server: TruthServer) -> None:
    truths: list[dict[str, Any]] = [
        {"tokens": 2},
        {"status": 429, "headers": {"Retry-After": "2"}},
        {"status": 400, "body": "no"},
        {"status": 500, "body": "no"},
        {"tokens": 2, "end": "close"},
        {"tokens": 2, "end": "rst"},
        {"tokens": 2, "end": "stall"},
        {"chunks": [{"kind": "error", "text": "full"}]},
        {"end": "silent"},
    ]
    requests = [planned(i, i * 0.01, truth) for i, truth in enumerate(truths)]
    records = by_index(go(server.url, schedule(requests, 0.1), timeout_s=0.4))
    outcomes = [records[i].outcome for i in range(len(truths))]
    assert outcomes == ["ok", "shed", "rejected", "http_error", "cut", "cut", "timeout", "error", "cut"]


def test_a_conversation_carries_the_replies(server: TruthServer) -> None:
    truths = [{"key": f"turn-{turn}", "chunks": [{"text": f"reply{turn}"}]} for turn in range(3)]
    requests = [
        planned(turn, 0.01, truth, session="s", turn=turn, after=turn - 1 if turn else None)
        for turn, truth in enumerate(truths)
    ]
    records = by_index(go(server.url, schedule(requests, 0.1)))
    assert [records[turn].outcome for turn in range(3)] == ["ok"] * 3
    assert all(records[turn].ready_ns == records[turn - 1].end_ns for turn in (1, 2))
    messages = msgspec.json.decode(server.told("turn-2").body)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert [messages[1]["content"], messages[3]["content"]] == ["reply0", "reply1"]


def test_a_closed_loop_keeps_its_users_busy_until_the_end(server: TruthServer) -> None:
    truth = {"tokens": 2, "first_ms": 10, "gap_ms": 10}
    requests = [planned(i, None, truth, user=i % 3, think_ns=5_000_000) for i in range(600)]
    result = go(server.url, schedule(requests, 0.6, users=3))
    assert result.info.health.peak_in_flight == 3
    for user in range(3):
        own = [record for record in result.records if record.user == user]
        assert len(own) >= 5  # 30 ms each when the machine is idle: 20
        assert all(
            before.end_ns is not None and after.due_ns == before.end_ns + 5_000_000
            for before, after in zip(own, own[1:], strict=False)
        )
    assert {record.outcome for record in result.records} == {"ok"}


# A server that dies, or is not there


def test_a_server_killed_in_the_middle_is_seen_as_it_was() -> None:
    server = TruthServer()
    try:
        truth = {"tokens": 40, "gap_ms": 10}
        requests = [planned(i, i * 0.01, truth) for i in range(100)]
        killer = threading.Timer(0.6, server.kill)
        killer.start()
        result = go(server.url, schedule(requests, 1.0))
        killer.join()
    finally:
        server.close()
    records = by_index(result)
    assert sorted(records) == list(range(100))
    outcomes = [records[i].outcome for i in range(100)]
    assert set(outcomes) <= {"ok", "cut", "refused"}
    assert "cut" in outcomes  # in flight when it died
    assert outcomes[-20:] == ["refused"] * 20  # sent when it was gone
    cut = [record for record in records.values() if record.outcome == "cut" and record.chunk_ns]
    assert cut
    ends = [record.end_ns for record in cut]
    assert max(end for end in ends if end is not None) - min(end for end in ends if end is not None) < 200_000_000
    assert result.info.wall_s >= 1.0  # the load went on to its end


def test_a_run_against_nobody_is_a_run_of_refusals() -> None:
    server = TruthServer()
    server.close()
    result = go(server.url, schedule([planned(i, i * 0.01) for i in range(10)], 0.1))
    assert [record.outcome for record in result.records] == ["refused"] * 10


# Ctrl-C


def interrupt_at(*times_s: float) -> list[threading.Timer]:
    timers = [threading.Timer(at_s, os.kill, (os.getpid(), signal.SIGINT)) for at_s in times_s]
    for timer in timers:
        timer.start()
    return timers


def test_ctrl_c_stops_sending_drains_and_keeps_the_records(server: TruthServer, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    requests = [planned(i, i * 0.05, {"tokens": 10, "gap_ms": 30}) for i in range(200)]
    path = tmp_path / "run.jsonl"
    timers = interrupt_at(0.7)
    result = go(server.url, schedule(requests, 10), records_path=path)
    for timer in timers:
        timer.join()
    assert result.info.interrupted
    assert result.info.duration_s < 5
    assert result.info.wall_s < 5
    assert 1 <= len(result.records) < 100
    assert {record.outcome for record in result.records} == {"ok"}  # the last ones were let end
    assert read_run(path) == result
    assert signal.getsignal(signal.SIGINT) is before


def test_a_usage_that_is_not_believed_is_a_warning(server: TruthServer) -> None:
    raw = 'data: {"choices":[],"usage":{"completion_tokens":-5}}\n\n'
    truth = {"chunks": [{}, {"kind": "raw", "text": raw}], "usage": "never"}
    result = go(server.url, schedule([planned(0, 0.0, truth), planned(1, 0.0, {"tokens": 1})], 0.1))
    assert result.warnings == [
        "the usage of 1 answers is not believed and not used; the first: usage: completion_tokens is -5, not from 0 "
        "to 10000000"
    ]


def test_ctrl_c_twice_ends_at_once_and_keeps_the_records(
    server: TruthServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [planned(i, i * 0.05, {"tokens": 3, "end": "stall"}) for i in range(200)]
    path = tmp_path / "run.jsonl"
    timers = interrupt_at(0.5, 0.8)
    result = go(server.url, schedule(requests, 10), drain_s=60, records_path=path)
    for timer in timers:
        timer.join()
    assert result.info.interrupted
    assert result.info.wall_s < 5
    assert {record.outcome for record in result.records} == {"cancelled"}
    assert {record.error for record in result.records} == {INTERRUPTED}
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert "waits up to 60 s for" in told[0]
    assert "a second Ctrl-C ends it now" in told[0]
    assert "ends now" in told[1]
    assert any(record.output_tokens == 3 for record in result.records)
    assert read_run(path).records == result.records


# The generator's own part


class Watcher:
    """A display that may hold the event loop up."""

    interval_s = 0.2

    def __init__(self, block_s: float = 0.0, error: Exception | None = None) -> None:
        self.snapshots: list[Snapshot] = []
        self.closed = False
        self._block_s = block_s
        self._error = error

    def show(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        time.sleep(self._block_s)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self.closed = True


def test_a_generator_that_was_held_up_says_that_the_run_is_not_valid(server: TruthServer) -> None:
    requests = [planned(i, i * 0.01, {"tokens": 1}) for i in range(80)]
    result = go(server.url, schedule(requests, 0.8), progress=Watcher(block_s=0.15))
    found = validity(result.records, result.info.health)
    assert not found.valid
    assert any("sent late" in reason for reason in found.reasons)
    assert any("read late" in reason for reason in found.reasons)


def test_the_display_sees_the_run(server: TruthServer) -> None:
    watcher = Watcher()
    requests = [planned(i, i * 0.02, {"tokens": 3, "gap_ms": 2}) for i in range(100)]
    go(server.url, schedule(requests, 2.0), progress=watcher, warmup_s=1.0)
    assert watcher.closed
    # Every 0.2 s at the most; a machine busy with other things shows some of them late.
    assert 2 <= len(watcher.snapshots) <= 11
    assert watcher.snapshots[0].phase == "warm-up"
    last = watcher.snapshots[-1]
    assert last.phase in ("load", "drain")
    assert last.planned == 100
    assert sum(last.outcomes.values()) + last.in_flight == last.sent
    assert last.ttft_s is not None


def test_a_display_that_breaks_does_not_break_the_run(server: TruthServer) -> None:
    requests = [planned(i, i * 0.02) for i in range(20)]
    result = go(server.url, schedule(requests, 0.5), progress=Watcher(error=BrokenPipeError()))
    assert len(result.records) == 20


def test_a_run_leaves_the_process_as_it_was(server: TruthServer) -> None:
    before = (sys.getswitchinterval(), gc.isenabled(), threading.active_count())
    go(server.url, schedule([planned(0, 0.0)], 0.05))
    assert (sys.getswitchinterval(), gc.isenabled(), threading.active_count()) == before


def test_uvloop_runs_it_where_it_is_installed(server: TruthServer) -> None:
    assert go(server.url, schedule([planned(0, 0.0)], 0.05)).info.machine["event_loop"] == "uvloop"


class Failing:
    """Makes no bodies."""

    def build(self, request: PlannedRequest, history: Sequence[Turn] = ()) -> Wire:
        raise ConfigError("no such text", where="workload.yaml")


def test_what_the_maker_raises_is_raised_before_anything_is_sent(server: TruthServer, tmp_path: Path) -> None:
    before = server.counts()["requests"]
    with pytest.raises(ConfigError, match="no such text"):
        go(server.url, schedule([planned(0, 0.0)], 0.1), maker=Failing(), records_path=tmp_path / "x.jsonl")
    assert server.counts()["requests"] == before


def test_a_named_key_that_is_not_set_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="MY_KEY"):
        go("http://127.0.0.1:1", schedule([planned(0, 0.0)], 0.1), api_key_env="MY_KEY")


def test_the_key_is_in_no_file(server: TruthServer, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    truth = {"key": "keyed", "status": 401, "body": "bad key sk-secret"}
    go(
        server.url,
        schedule([planned(0, 0.0, truth)], 0.1),
        records_path=path,
        environment={"OPENAI_API_KEY": "sk-secret"},
    )
    assert server.told("keyed").headers["authorization"] == "Bearer sk-secret"
    assert b"sk-secret" not in path.read_bytes()
    assert b"bad key ***" in path.read_bytes()


@pytest.mark.slow
def test_a_thousand_requests_a_second_are_sent_in_time_or_the_run_says_that_they_were_not() -> None:
    server = TruthServer(first_ms=5, gap_ms=5, keep=False)
    try:
        result = go(server.url, schedule([planned(i, i / 1000) for i in range(5000)], 5))
    finally:
        server.close()
    assert len(result.records) == 5000
    found = validity(result.records, result.info.health)
    assert found.send_lag_p99_s is not None
    assert found.send_lag_p99_s < 0.010 or any("sent late" in reason for reason in found.reasons)
    assert {record.outcome for record in result.records} == {"ok"}


def test_a_run_can_be_made_inside_another_thread(server: TruthServer) -> None:
    results: list[RunResult] = []
    plan = schedule([planned(0, 0.0)], 0.05)
    thread = threading.Thread(target=lambda: results.append(go(server.url, plan)))
    thread.start()
    thread.join()
    assert [record.outcome for record in results[0].records] == ["ok"]
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()
