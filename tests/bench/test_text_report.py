"""The summary on a terminal: no figure cut, nothing obeyed, the reasons of failures named."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.bench.compare.comparison import Comparison, Statement, comparison_table
from headrace.bench.records import RequestRecord
from headrace.bench.report.grid import Grid, print_grid
from headrace.bench.report.text_report import print_summary
from headrace.bench.report.units import show_number
from headrace.bench.report.visible import visible
from headrace.bench.results.figures import Summary
from headrace.bench.results.summary import summarise
from tests.bench.bench_records import answered, failed, ms, run_info, synthetic_run

CONTROL = "".join([chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))])


def _printed(summary: Summary, *, width: int = 80, full: bool = False) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        print_summary(summary, console, full=full)
    return captured.get()


# Foreign text.


def test_characters_that_act_are_shown_as_their_escapes() -> None:
    assert visible("a\x1b[2J\x07\x9b\r\nb") == r"a\x1b[2J\x07\x9b\r\nb"
    assert visible("\x7f\u202e\u2028\ud800") == r"\x7f\u202e\u2028\ud800"
    assert visible("größe 対話 🙂 [red] 95 %") == "größe 対話 🙂 [red] 95 %"
    assert visible("a\nb\r", keep="\n") == "a\nb\\r"


@given(st.text())
def test_nothing_that_acts_is_left_and_the_rest_stays(text: str) -> None:
    shown = visible(text)
    assert not set(shown) & set(CONTROL)
    assert shown == text or not text.isprintable() or re.search("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)


@pytest.mark.parametrize("width", [40, 200])
def test_no_control_character_of_a_record_reaches_the_terminal(width: int) -> None:
    evil = f"evil{CONTROL}"
    records = [answered(i, i * 10, ttft_ms=10, class_name=evil, lane=evil + "lane") for i in range(8)]
    records += [failed(90, 10, "http_error", status=500, error=evil, class_name=evil)]
    records += [failed(91, 20, "error", error=f"generator: {evil}", class_name="other")]
    info = run_info(model=evil, target=evil, slos={evil: {"ttft_s": 1.0}})
    text = _printed(summarise(info, records), width=width, full=True)
    assert not set(text) & (set(CONTROL) - {"\n"})
    assert "evil\\x00\\x01" in text.replace("\n", ""), "the model's name, folded where it is long"


def test_no_control_character_of_a_name_reaches_a_comparison() -> None:
    statement = Statement("lane\x1b[2J", "attainment", "share", 0.5, 0.5, words="same\x07")
    comparison = Comparison("a\x1b]0;x\x07", "b\x9b", "runs", (1, 1), 0.95, [], [statement])
    console = Console(width=120, force_terminal=False)
    with console.capture() as captured:
        console.print(comparison_table(comparison))
    assert not set(captured.get()) & (set(CONTROL) - {"\n"})
    assert r"lane\x1b[2J" in captured.get() and r"A: a\x1b]0;x\x07" in captured.get()


# Width.


def _figures(text: str) -> list[str]:
    return sorted(re.findall(r"\d[\d,.]*", text.replace("\n", " ")))


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_narrow_terminal_gets_every_figure_that_a_wide_one_gets(width: int) -> None:
    grid = Grid(
        ("", "offered", "p99"),
        [["all", "6,123,456", "12.34 s\n11.1 to 13.3 s"], ["chat", "1,234,567,890", "9 ms"]],
        labels=("", "offered", "TTFT p99"),
        styles={1: "red"},
    )
    wide, narrow = Console(width=300, force_terminal=False), Console(width=width, force_terminal=False)
    texts = []
    for console in (wide, narrow):
        with console.capture() as captured:
            print_grid(grid, console)
        texts.append(captured.get())
    figures = [found for found in _figures(texts[1].replace("TTFT p99", "p99")) if found != "99"]
    assert figures == [found for found in _figures(texts[0]) if found != "99"]
    if width == 20:
        assert texts[1].splitlines()[:2] == ["all", "  offered: 6,123,456"]


@pytest.mark.parametrize("full", [False, True])
def test_a_report_on_40_columns_cuts_nothing(full: bool) -> None:
    info, records = synthetic_run(np.random.default_rng(1), duration_s=60.0, shed_share=0.02)
    records += [failed(50_000, 100, "rejected", malformed="no_body", status=500)]
    summary = summarise(info, records)
    wide = set(re.findall(r"\d+(?:\.\d+)? (?:ms|s|µs|%)", _printed(summary, width=300, full=full)))
    narrow = _printed(summary, width=40, full=full)
    assert max(len(line) for line in narrow.splitlines()) <= 40
    # An interval whose line is too long breaks between words, and a number may then stand apart from its unit.
    assert wide <= set(re.findall(r"\d+(?:\.\d+)? (?:ms|s|µs|%)", re.sub(r"\s+", " ", narrow)))
    assert "TTFT p99: " in narrow and "illegal requests: no body" in narrow


def test_huge_values_are_whole_on_80_columns() -> None:
    records = [answered(i, i * 10, ttft_ms=10, gaps_ms=(1,), output_tokens=10**17) for i in range(9)]
    text = _printed(summarise(run_info(), records))
    assert "9e+16" in text
    assert show_number(1.5e300) == "1.5e+300"


# What is said.


def _failing() -> list[RequestRecord]:
    kinds = [("out of memory", 5), ("bad gateway", 4), ("[red]teapot", 3), ("rare", 1)]
    texts = [text for text, count in kinds for _ in range(count)]
    return [failed(i, i, "http_error", status=500, error=text) for i, text in enumerate(texts)]


def test_the_three_most_frequent_failures_are_named() -> None:
    text = _printed(summarise(run_info(), [*_failing(), answered(99, 99, ttft_ms=1)]), width=100)
    assert re.findall(r"failed: (.*)", text) == [
        "5 x http error 500: out of memory",
        "4 x http error 500: bad gateway",
        "3 x http error 500: [red]teapot",
    ]
    assert "NOTHING WAS ANSWERED" not in text


def test_a_run_without_an_answer_says_so() -> None:
    assert "NOTHING WAS ANSWERED: of 13 offered requests not one" in _printed(summarise(run_info(), _failing()))


def test_one_class_is_one_row() -> None:
    text = _printed(summarise(run_info(), [answered(i, i, ttft_ms=1, class_name="chat") for i in range(5)]))
    assert "all requests" not in text
    assert len([line for line in text.splitlines() if line.startswith("chat")]) == 2, "rates and latencies"


def test_attainment_from_due_is_shown_where_it_differs() -> None:
    late = [answered(i, i * 100, lag_ms=600, ttft_ms=100, ready_ns=ms(i * 100 + 600)) for i in range(4)]
    slos = {"chat": {"ttft_s": 0.5}}
    assert "attained from due: chat 0 %" in _printed(summarise(run_info(slos=slos), late))
    prompt = [answered(i, i * 100, ttft_ms=100) for i in range(4)]
    assert "from due" not in _printed(summarise(run_info(slos=slos), prompt))
