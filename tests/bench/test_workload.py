"""Workload files: read strictly, every problem with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.load.workload import IllegalTraffic, PrefixPool, Session, TrafficClass, Workload
from headrace.bench.load.workload_file import (
    LoadedWorkload,
    check_workload,
    find_workload,
    load_workload,
    parse_workload,
    shipped_workloads,
    with_values,
)
from headrace.bench.planned import SloTarget
from headrace.bench.requests.bodies import LANE_HEADER
from headrace.config.problems import ConfigProblems
from headrace.errors import ConfigError
from headrace.lanes.defaults import default_lanes

HERE = Path(__file__).parent

MINIMAL = """\
arrivals: poisson(5)
duration_s: 60
classes:
  chat:
    input_length: uniform(10, 20)
    output_length: 16
"""


def parse(text: str, folder: Path = HERE) -> Workload:
    return parse_workload(text, name="w.yaml", folder=folder)


def complaint(text: str, folder: Path = HERE) -> str:
    with pytest.raises(ConfigProblems) as caught:
        parse(text, folder)
    return str(caught.value)


def test_the_least_that_a_workload_needs() -> None:
    chat = TrafficClass(input_length="uniform(10, 20)", output_length="16")
    assert parse(MINIMAL) == Workload(arrivals="poisson(5)", duration_s=60.0, classes={"chat": chat})


def test_every_key_is_read() -> None:
    workload = parse("""\
description: all of it
arrivals: closed(4, think=1)
duration_s: 1.5
scale_to_context_tokens: 4096
malformed: {share: 0.1, kinds: {too_long: 1, no_body: 2.5}}
classes:
  chat:
    description: people
    weight: 3
    lane: interactive
    input_length: fixed(7)
    output_length: normal(50, 5)
    written_for_context_tokens: 8192
    headers: {x-tenant-id: bank}
    body: {temperature: 0.7, stop: [a, b], nested: {turns: 3}}
    priority: 5
    shared_prefix: {tokens: 800, count: 10}
    session: {turns: 4, think_ms: 2000, history: false}
    slo: {ttft_s: 1, tpot_s: 0.1, e2e_s: 9}
""")
    assert workload == Workload(
        description="all of it",
        arrivals="closed(4, think=1)",
        duration_s=1.5,
        scale_to_context_tokens=4096,
        malformed=IllegalTraffic(share=0.1, kinds={"too_long": 1.0, "no_body": 2.5}),
        classes={
            "chat": TrafficClass(
                description="people",
                weight=3.0,
                lane="interactive",
                input_length="fixed(7)",
                output_length="normal(50, 5)",
                written_for_context_tokens=8192,
                headers={"x-tenant-id": "bank"},
                body={"temperature": 0.7, "stop": ["a", "b"], "nested": {"turns": 3}},
                priority=5,
                shared_prefix=PrefixPool(tokens=800, count=10),
                session=Session(turns="4", think_ms="2000", history=False),
                slo=SloTarget(ttft_s=1.0, tpot_s=0.1, e2e_s=9.0),
            )
        },
    )


def with_class(lines: str) -> str:
    """The minimal workload with more lines in its class; the first of them is line 7."""
    return MINIMAL + "".join(f"    {line}\n" for line in lines.splitlines())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL.replace("duration_s", "duraton_s"), "w.yaml:2: duraton_s: unknown key; did you mean duration_s?"),
        (with_class("lanes: long"), "w.yaml:7: classes.chat.lanes: unknown key; did you mean lane?"),
        (with_class("slo: {tfft_s: 1}"), "w.yaml:7: classes.chat.slo.tfft_s: unknown key; did you mean ttft_s?"),
        (MINIMAL + "malformed: {shares: 0.1}", "w.yaml:7: malformed.shares: unknown key; did you mean share?"),
        (MINIMAL + "malformed: {share: 1.5}", "w.yaml:7: malformed.share: 1.5 is out of range (0 to 1)"),
        (
            MINIMAL + "malformed: {share: 0.1, kinds: {bad_json: 1}}",
            "w.yaml:7: malformed.kinds.bad_json: no such kind; did you mean broken_json?",
        ),
        (MINIMAL + "malformed: {share: 0.1, kinds: {no_body: 0}}", "w.yaml:7: malformed.kinds: every weight is 0"),
        (MINIMAL + "malformed: {share: 0.1, kinds: {no_body: .nan}}", "nan is out of range"),
        (MINIMAL.replace("poisson(5)", "poison(5)"), "w.yaml:1: arrivals: 'poison' is none of"),
        (MINIMAL.replace("poisson(5)", "poisson(-5)"), "w.yaml:1: arrivals: poisson: rate is"),
        (MINIMAL.replace("60", "0"), "w.yaml:2: duration_s: 0 is out of range (above 0"),
        (MINIMAL.replace("60", ".inf"), "w.yaml:2: duration_s: inf is out of range"),
        (MINIMAL.replace("duration_s: 60", "description: x"), "w.yaml: duration_s is missing"),
        ("arrivals: poisson(1)\nduration_s: 1\n", "classes: no class"),
        ("duration_s: 1\n", "arrivals is missing"),
        (MINIMAL.replace("    output_length: 16\n", ""), "w.yaml:4: classes.chat: output_length is missing"),
        (
            MINIMAL.replace("uniform(10, 20)", "uniform(20, 10)"),
            "w.yaml:5: classes.chat.input_length: uniform: from=20",
        ),
        (with_class("weight: -1"), "w.yaml:7: classes.chat.weight: -1 is out of range"),
        (with_class("weight: 0"), "w.yaml:3: classes: every weight is 0"),
        (with_class("weight: heavy"), 'w.yaml:7: classes.chat.weight: expected a number, got "heavy"'),
        (with_class('lane: "a\\nb"'), "w.yaml:7: classes.chat.lane: not fit for an HTTP header"),
        (with_class("headers: {x-a: ü}"), "w.yaml:7: classes.chat.headers: not fit for an HTTP header"),
        (with_class("body: 7"), "w.yaml:7: classes.chat.body: expected a mapping"),
        (with_class("body: {max_tokens: 1}"), "w.yaml:7: classes.chat.body: max_tokens is set by the tool itself"),
        (with_class("body: {stream: maybe}"), "w.yaml:7: classes.chat.body: stream is true or false"),
        (with_class("body: {stream_options: {}}"), "w.yaml:7: classes.chat.body: stream_options is set by"),
        (with_class("headers: {content-length: '3'}"), "w.yaml:7: classes.chat.headers: the header content-length"),
        (with_class("shared_prefix: {tokens: 0}"), "w.yaml:7: classes.chat.shared_prefix.tokens: 0 is out of range"),
        (with_class("shared_prefix: {count: 2}"), "w.yaml:7: classes.chat.shared_prefix: tokens is missing"),
        (
            with_class("session: {turns: 2, think_ms: soon}"),
            "w.yaml:7: classes.chat.session.think_ms: 'soon' is none of",
        ),
        (with_class("written_for_context_tokens: 1"), "w.yaml:7: classes.chat.written_for_context_tokens: 1 is out"),
        (with_class("slo: {ttft_s: 0}"), "w.yaml:7: classes.chat.slo.ttft_s: 0 is out of range"),
        (MINIMAL + "scale_to_context_tokens: 8", "w.yaml:7: scale_to_context_tokens: 8 is out of range"),
        (MINIMAL.replace("chat:", "malformed:"), "w.yaml:4: classes.malformed: malformed is the class of illegal"),
        (MINIMAL + "trace_classes: {a: chat}", "w.yaml:7: trace_classes: only for a trace"),
        (MINIMAL + "arrivals: poisson(1)", "w.yaml:7: arrivals: given twice (first on line 1)"),
        ("- a\n", "w.yaml: expected a mapping, got a list"),
        ("arrivals: [\n", "w.yaml:2: not valid YAML"),
        (
            with_class("input_length: empirical(missing.csv)").replace("    input_length: uniform(10, 20)\n", ""),
            "w.yaml:6",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, message: str) -> None:
    assert message in complaint(text)


def test_every_problem_is_reported_at_once() -> None:
    text = with_class("weight: -1\npriority: high\nlanes: x").replace("60", "nan")
    assert len(complaint(text).splitlines()) == 3  # what has the right shape is looked at when all has it
    assert len(complaint(with_class("weight: -1\nslo: {e2e_s: -1}").replace("60", "-1")).splitlines()) == 3


def test_a_file_of_lengths_is_found_beside_the_workload(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5\n7\n")
    text = MINIMAL.replace("uniform(10, 20)", "empirical(lengths.txt)")
    assert parse(text, tmp_path).classes["chat"].input_length == "empirical(lengths.txt)"
    assert "lengths.txt" in complaint(text, tmp_path / "elsewhere")


TRACED = "arrivals: trace(t.jsonl)\nclasses:\n  chat: {lane: interactive}\n"


def test_a_trace_needs_neither_duration_nor_lengths() -> None:
    workload = parse(TRACED + 'trace_classes: {"*": chat}\n')
    assert workload.trace_classes == {"*": "chat"}
    assert workload.duration_s is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TRACED + "trace_classes: {a: chatt}", "w.yaml:4: trace_classes.a: no class chatt; did you mean chat?"),
        (
            TRACED.replace("lane: interactive", "session: {turns: 2, think_ms: 5}"),
            "w.yaml:3: classes.chat.session: the trace itself says",
        ),
        (TRACED.replace("lane: interactive", "input_length: 5"), "w.yaml:3: classes.chat: output_length is missing"),
    ],
)
def test_a_trace_brings_its_own_lengths_and_conversations(text: str, message: str) -> None:
    assert message in complaint(text)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse(text)
    except ConfigProblems as error:
        assert str(error)


# -- files that come with headrace ------------------------------------------------------------------------


def test_the_shipped_workloads_are_found_by_name_and_are_right() -> None:
    assert "mixed-enterprise" in shipped_workloads()
    for name, path in shipped_workloads().items():
        assert find_workload(name) == path
        loaded = load_workload(name)
        assert loaded.name == name
        assert loaded.workload.description


def test_a_path_is_a_workload_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    assert load_workload(str(path)) == LoadedWorkload(parse(MINIMAL), "mine", tmp_path)


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape("did you mean mixed-enterprise? (there: mixed-enterprise")):
        load_workload("mixed-enterprize")
    with pytest.raises(ConfigError, match="no workload file"):
        load_workload(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="is a folder"):
        load_workload(str(tmp_path))


def test_the_mixed_workload_is_the_mix_it_is_named_for() -> None:
    workload = load_workload("mixed-enterprise").workload
    classes = workload.classes
    total = sum(traffic.weight for traffic in classes.values())
    assert {name: traffic.weight / total for name, traffic in classes.items()} == {
        "long_document": 0.2,
        "dialogue": 0.3,
        "short_generation": 0.5,
    }
    assert classes["dialogue"].session is not None
    assert classes["long_document"].written_for_context_tokens == 131072
    assert workload.malformed is not None
    assert workload.malformed.share == 0.05
    assert {traffic.lane for traffic in classes.values()} <= set(default_lanes())
    assert LANE_HEADER not in {header.lower() for traffic in classes.values() for header in traffic.headers}


# -- values from the command line -------------------------------------------------------------------------


def test_the_command_line_replaces_a_files_values() -> None:
    loaded = LoadedWorkload(parse(MINIMAL), "w", HERE)
    changed = with_values(loaded, arrivals="closed(3)", scale_to_context_tokens=4096).workload
    assert (changed.arrivals, changed.duration_s, changed.scale_to_context_tokens) == ("closed(3)", 60.0, 4096)
    assert changed.classes == loaded.workload.classes
    with pytest.raises(ConfigProblems, match="duration_s: -1 is out of range"):
        with_values(loaded, duration_s=-1)


def test_a_workload_made_without_a_file_is_checked_in_the_same_way() -> None:
    lengths = TrafficClass(input_length="uniform(5)", output_length="5")
    with pytest.raises(ConfigProblems, match=re.escape("classes.all.input_length: uniform needs 'to'")):
        check_workload(Workload(arrivals="poisson(1)", duration_s=1, classes={"all": lengths}), HERE)
