"""The records file: what is written comes back, also from a run that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench import record_file
from headrace.bench.record_checks import IndexSet
from headrace.bench.record_file import RecordWriter, read_info, read_records, read_run
from headrace.bench.records import GeneratorHealth, Outcome, RequestRecord, RunInfo
from headrace.errors import ConfigError


@st.composite
def made_records(draw: st.DrawFn) -> RequestRecord:
    """What a run writes: moments in the order in which they come, all of them or as far as it got."""
    moments = sorted(draw(st.lists(st.integers(0, 10**15), min_size=6, max_size=12)))
    sent = draw(st.booleans())
    chunk_ns = moments[4:-1] if sent and draw(st.booleans()) else []
    counted = bool(chunk_ns) and draw(st.booleans())
    chunk_tokens = [draw(st.integers(0, 9)) for _ in chunk_ns] if counted else []
    return RequestRecord(
        index=0,
        class_name=draw(st.text(max_size=8)),
        outcome=draw(st.sampled_from(get_args(Outcome))),
        due_ns=moments[0],
        ready_ns=moments[1],
        sent_ns=moments[2] if sent else None,
        headers_ns=moments[3] if chunk_ns else None,
        first_ns=chunk_ns[0] if chunk_ns else None,
        chunk_ns=chunk_ns,
        chunk_tokens=chunk_tokens,
        end_ns=moments[-1] if sent else draw(st.none() | st.just(moments[0])),
        error=draw(st.none() | st.text(max_size=20)),
        note=draw(st.none() | st.text(max_size=20)),
        retry_after_s=draw(st.none() | st.floats(0, 1e300)),
        output_tokens=sum(chunk_tokens) + draw(st.integers(0, 1000)),
        usage_seen=draw(st.booleans()),
    )


def numbered(records: list[RequestRecord]) -> list[RequestRecord]:
    return [msgspec.structs.replace(one, index=index) for index, one in enumerate(records)]


RECORDS = st.lists(made_records(), max_size=20).map(numbered)


def info(**fields: Any) -> RunInfo:
    known: dict[str, Any] = {
        "tool_version": "1",
        "target": "http://t",
        "model": "m",
        "started_at": "2026-01-01T00:00:00+00:00",
        "duration_s": 60.0,
        "wall_s": 0.0,
        "warmup_s": 5.0,
        "seed": 7,
        "source": {"arrivals": "poisson(2)"},
        "slos": {"chat": {"ttft_s": 0.5}},
        "health": GeneratorHealth(0.0, 0.0, 0),
    }
    return RunInfo(**{**known, **fields})


DONE = info(wall_s=61.5, health=GeneratorHealth(0.25, 0.001, 40))


def record(index: int, **fields: Any) -> RequestRecord:
    return RequestRecord(index=index, class_name="c", outcome="ok", due_ns=index, ready_ns=index, **fields)


def write(path: Path, *records: RequestRecord, last: RunInfo = DONE) -> None:
    with RecordWriter(path, info()) as writer:
        for one in records:
            writer.write(one)
        writer.finish(last)


@given(records=RECORDS)
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, records: list[RequestRecord]) -> None:
    path = tmp_path_factory.mktemp("records") / "run.jsonl"
    write(path, *records)
    result = read_run(path)
    assert (result.info, result.records, result.warnings) == (DONE, records, [])


def test_the_first_line_is_json_like_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, record(0), record(1))
    lines = path.read_bytes().splitlines()
    assert len(lines) == 3
    assert msgspec.json.decode(lines[0])["wall_s"] == 61.5
    assert [msgspec.json.decode(line)["index"] for line in lines[1:]] == [0, 1]


def test_a_first_line_that_outgrew_its_room_is_written_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    grown = info(wall_s=1.0, source={"text": "x" * 10_000})
    write(path, record(0), record(1), last=grown)
    result = read_run(path)
    assert (result.info, result.records) == (grown, [record(0), record(1)])
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, *(record(i) for i in range(100)))
    write(path, record(5))
    assert read_run(path).records == [record(5)]


WRITES_AND_WAITS = """
import sys, time
from pathlib import Path
from tests.bench.test_record_file import RecordWriter, info, record
with RecordWriter(Path(sys.argv[1]), info()) as writer:
    for index in range(50):
        writer.write(record(index))
    time.sleep(60)
"""


def test_a_killed_run_leaves_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES_AND_WAITS, str(path)], cwd=Path(__file__).parents[2], start_new_session=True
    )
    try:
        until_s = time.monotonic() + 20
        while not (path.exists() and path.read_bytes().count(b"\n") == 51):
            assert process.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    result = read_run(path)
    assert result.info == info()
    assert [one.index for one in result.records] == list(range(50))
    assert result.warnings == [f"{path}: the run that wrote this file did not end: its health is not known"]


def test_a_cut_last_line_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, record(0), record(1))
    path.write_bytes(path.read_bytes()[:-9])
    result = read_run(path)
    assert result.records == [record(0)]
    assert result.warnings == [f"{path}:3: the last line was cut and is left out"]


def test_a_whole_last_line_needs_no_line_end(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, record(0), record(1))
    path.write_bytes(path.read_bytes()[:-1])
    assert read_run(path).records == [record(0), record(1)]
    assert read_run(path).warnings == []


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b'{"index": 1}\n', b'{"index": "x"}\n', b"\xff\n"])
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "run.jsonl"
    write(path, record(0), record(1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line, lines[2]]))
    with pytest.raises(ConfigError) as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path}:3: is not a request's record: ")


SENT = {
    "sent_ns": 10, "headers_ns": 20, "first_ns": 30, "chunk_ns": [30, 40], "end_ns": 50, "output_tokens": 2,
}  # fmt: skip


def edited(path: Path, number: int, **fields: Any) -> None:
    """A records file in which someone changed line ``number``."""
    write(path, record(0, **SENT), record(1, **SENT))
    lines = path.read_bytes().splitlines()
    lines[number - 1] = msgspec.json.encode({**msgspec.json.decode(lines[number - 1]), **fields})
    path.write_bytes(b"".join(line + b"\n" for line in lines))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"malformed": "evil"}, "malformed is 'evil'; the kinds are broken_json"),
        ({"output_tokens": -5}, "output_tokens is -5"),
        ({"output_tokens": 2**63}, "output_tokens is 9223372036854775808"),
        ({"prompt_tokens": 10**9}, "prompt_tokens is 1000000000"),
        ({"input_tokens": -1}, "input_tokens is -1"),
        ({"due_ns": 2**70}, "due_ns is 0x4"),
        ({"due_ns": -1}, "due_ns is -1"),
        ({"end_ns": 10**300}, "end_ns is 0x"),
        ({"sent_ns": 10**12}, "headers_ns (20) is before sent_ns (1000000000000)"),
        ({"sent_ns": None}, "has headers_ns and no sent_ns"),
        ({"ready_ns": 11}, "sent_ns (10) is before ready_ns (11)"),
        ({"end_ns": 35}, "end_ns (35) is before chunk_ns (40)"),
        ({"chunk_ns": [2**70]}, "end_ns (50) is before chunk_ns"),
        ({"chunk_ns": [31, 40]}, "first_ns is 30, the first of chunk_ns 31"),
        ({"chunk_ns": [30, 2**70], "end_ns": None}, "chunk_ns is 0x4"),
        ({"chunk_ns": [30, 2**70]}, "end_ns (50) is before chunk_ns"),
        ({"chunk_ns": [30, 20, 45]}, "chunk_ns is not in ascending order"),
        ({"chunk_ns": [-5, -9, 3], "first_ns": -5}, "first_ns is -5"),
        ({"chunk_tokens": [-1, 2]}, "chunk_tokens holds -1"),
        ({"chunk_tokens": [10**9, 1]}, "chunk_tokens add up to 1000000001"),
        ({"chunk_tokens": [1]}, "has 2 chunks and chunk_tokens for 1"),
        ({"index": -1}, "index is -1"),
        ({"index": 10**12}, "index is 1000000000000"),
        ({"index": 0}, "is a second record of request 0"),
        ({"status": -(2**80)}, "status is -0x1"),
        ({"retry_after_s": -1}, "retry_after_s is -1"),
        ({"turn": -1}, "turn is -1"),
        ({"user": -1}, "user is -1"),
    ],
)
def test_a_record_that_cannot_be_is_named_by_its_line(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "run.jsonl"
    edited(path, 3, **fields)
    with pytest.raises(ConfigError) as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path}:3: {message}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wall_s": -1}, "wall_s is -1"),
        ({"duration_s": 1e300}, "duration_s is 1e+300"),
        ({"warmup_s": -1}, "warmup_s is -1"),
        ({"concurrency": -5}, "concurrency is -5"),
        ({"slos": {"all": {"ttft_s": -1.0}}}, "'slos.all.ttft_s' is -1, not more than 0 s"),
        ({"slos": {"all": {"x": 1.0}}}, "'slos.all.x': unknown bound"),
        ({"health": {"cpu_share": -1.0, "loop_lag_p99_s": 0, "peak_in_flight": 1}}, "health.cpu_share is -1"),
        ({"health": {"cpu_share": 0, "loop_lag_p99_s": 0, "peak_in_flight": -1}}, "health.peak_in_flight is -1"),
    ],
)
def test_facts_that_no_run_has_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "run.jsonl"
    edited(path, 1, **fields)
    with pytest.raises(ConfigError) as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path}:1: {message}")


@pytest.mark.parametrize("number", [1, 2])
def test_a_line_nested_too_deep_is_named(tmp_path: Path, number: int) -> None:
    path = tmp_path / "run.jsonl"
    write(path, record(0))
    lines = path.read_bytes().splitlines()
    lines[number - 1] = b'{"source": ' + b"[" * 100_000
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.raises(ConfigError, match=rf":{number}: is not "):
        read_run(path)


@given(st.lists(st.integers(0, 3000), max_size=300))
def test_a_number_is_new_once(indexes: list[int]) -> None:
    seen, expected = IndexSet(), set[int]()
    for index in indexes:
        assert seen.add(index) is (index not in expected)
        expected.add(index)


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(path, record(0), record(1))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n"))
    assert read_run(path).records == [record(0), record(1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b'{"index": 1}\n', "is not the facts of a run"),
        (b"arrived,tokens\n", "is not the facts of a run"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_info(path)


def test_a_file_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_run(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        list(read_records(path, print))


def test_a_file_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        RecordWriter(tmp_path / "no" / "folder.jsonl", info())


def test_a_full_disk_is_told_at_the_end_and_does_not_disturb_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RecordWriter, data: bytes) -> None:
        self._failure = OSError(28, "No space left on device")

    monkeypatch.setattr(record_file.RecordWriter, "_append", full)
    with RecordWriter(tmp_path / "run.jsonl", info()) as writer:
        writer.write(record(0))
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            writer.finish(DONE)
