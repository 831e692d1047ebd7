"""Schedules that come from a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.load.workload import IllegalTraffic, TrafficClass
from headrace.bench.planned import Schedule, SloTarget
from tests.bench.schedules import SHORT, legal, schedule


def trace(folder: Path, *rows: dict[str, object]) -> None:
    (folder / "t.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def row(
    at_s: float, tokens: int = 100, output: int = 10, name: str | None = None, **fields: object
) -> dict[str, object]:
    return {"at_s": at_s, "input_tokens": tokens, "output_tokens": output, "class": name, **fields}


def replay(folder: Path, arrivals: str = "trace(t.jsonl)", **fields: Any) -> Schedule:
    return schedule(folder=folder, **{"arrivals": arrivals, "duration_s": None, "classes": {}, **fields})


def test_a_trace_is_replayed_as_it_was(tmp_path: Path) -> None:
    trace(tmp_path, row(0.5, lane="long", headers={"x-a": "b"}), row(2.25, 7, 3, "api"))
    planned = replay(tmp_path)
    first, second = planned.requests
    assert (first.due_ns, first.input_tokens, first.output_tokens) == (500_000_000, 100, 10)
    assert (first.lane, first.headers, first.class_name) == ("long", {"x-a": "b"}, "trace")
    assert (second.due_ns, second.class_name) == (2_250_000_000, "api")
    assert planned.duration_s == 3.0


def test_speed_window_and_duration_decide_how_long_a_replay_is(tmp_path: Path) -> None:
    trace(tmp_path, *(row(second) for second in range(60)))
    assert replay(tmp_path, "trace(t.jsonl, speed=4)").duration_s == 15.0
    windowed = replay(tmp_path, "trace(t.jsonl, speed=2, start=10, duration=30)")
    assert (windowed.duration_s, len(windowed.requests)) == (15.0, 30)
    assert len(replay(tmp_path, duration_s=5.5).requests) == 6


def test_the_traces_classes_become_the_workloads(tmp_path: Path) -> None:
    trace(tmp_path, *(row(n, name=name) for n, name in enumerate(("chat", "api", "files"))))
    talk = TrafficClass(lane="interactive", body={"temperature": 1}, slo=SloTarget(ttft_s=1))
    rest = TrafficClass(lane="batch")
    planned = replay(tmp_path, classes={"talk": talk, "rest": rest}, trace_classes={"chat": "talk", "*": "rest"})
    assert [(request.class_name, request.lane) for request in planned.requests] == [
        ("talk", "interactive"),
        ("rest", "batch"),
        ("rest", "batch"),
    ]
    assert planned.requests[0].body == {"temperature": 1}
    assert planned.slos["talk"] == SloTarget(ttft_s=1)


def test_hash_ids_say_what_prompts_share_and_shrink_with_the_lengths(tmp_path: Path) -> None:
    trace(tmp_path, row(0, 4096, hash_ids=[1, 2, 3, 4, 5, 6, 7, 8]))
    traced = TrafficClass(written_for_context_tokens=32768)
    fields: dict[str, Any] = {"classes": {"c": traced}, "trace_classes": {"*": "c"}}
    (whole,) = replay(tmp_path, **fields).requests
    (scaled,) = replay(tmp_path, scale_to_context_tokens=8192, **fields).requests
    assert whole.prefix is not None
    assert scaled.prefix is not None
    assert (whole.input_tokens, whole.prefix.block_tokens) == (4096, 512)
    assert (scaled.input_tokens, scaled.prefix.block_tokens) == (1024, 128)
    assert whole.prefix.hash_ids == scaled.prefix.hash_ids == (1, 2, 3, 4, 5, 6, 7, 8)


def test_a_traces_conversation_carries_its_history_where_its_prompt_held_it(tmp_path: Path) -> None:
    trace(
        tmp_path,
        row(0, 100, 10, session="s"),
        row(1, 150, 10, session="s"),
        row(2, 160, 10, session="s"),
        row(3, 200, 10, session="s", hash_ids=[1]),
    )
    malformed = IllegalTraffic(share=1.0, kinds={"no_body": 1})
    turns = legal(replay(tmp_path, malformed=malformed))
    assert [turn.turn for turn in turns] == [0, 1, 2, 3]
    assert {turn.session for turn in turns} == {"s"}
    # 160 tokens cannot have held the 150 and the answer of 10 before them; with hash ids the text holds it all.
    assert [turn.after for turn in turns] == [None, turns[0].index, None, None]


def test_only_a_traces_times_are_used_where_classes_give_lengths(tmp_path: Path) -> None:
    trace(tmp_path, row(0.5), row(1.5))
    planned = replay(tmp_path, classes={"short": SHORT})
    assert [request.due_ns for request in planned.requests] == [500_000_000, 1_500_000_000]
    assert {request.class_name for request in planned.requests} == {"short"}
