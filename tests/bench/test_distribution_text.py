"""The grammar of distribution texts: parts, numbers, durations, and messages that say what to write."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.load.distribution_forms import Form, Param, read_arguments
from headrace.bench.load.distribution_text import (
    Call,
    call_text,
    number_text,
    parse_call,
    parse_duration_s,
    parse_number,
)
from headrace.errors import ConfigError

EXAMPLE = "poisson(200)"
FORM = Form(
    "ramp",
    (
        Param("from", "number", required=True, most=1000),
        Param("to", "number", required=True, above=True),
        Param("steps", "whole", least=1),
        Param("over", "duration", named=True),
        Param("file", "text", named=True),
        Param("shape", "text", named=True, choices=("linear", "square")),
    ),
    "goes from one to the other",
    "ramp(1, 50, over=60)",
)
OTHER = Form("burst", (Param("rate", "number", infinite=True, required=True),), "bursts", "burst(5)")


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("poisson(200)", Call("poisson", ("200",))),
        ("  uniform ( 512 ,16384 )  ", Call("uniform", ("512", "16384"))),
        ("gamma(10, shape = 0.5)", Call("gamma", ("10",), {"shape": "0.5"})),
        ("512", Call(None, ("512",))),
        ("closed", Call("closed")),
        ("closed()", Call("closed")),
        (
            "empirical(data/a-b_c.csv, column=Request tokens)",
            Call("empirical", ("data/a-b_c.csv",), {"column": "Request tokens"}),
        ),
        ("empirical(\"a, (b)='c'.csv\")", Call("empirical", ("a, (b)='c'.csv",))),
        ("empirical('it''s.csv' , column = \"\")", Call("empirical", ("it's.csv",), {"column": ""})),
    ],
)
def test_a_text_is_taken_into_its_parts(text: str, call: Call) -> None:
    assert parse_call(text, example=EXAMPLE) == call


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        (" \t", "is empty"),
        ("poisson(200", "needs ',' or ')' at character 12, and has the end"),
        ("poisson(", "needs a value at character 9, and has the end"),
        ("uniform(1,,2)", "needs a value at character 11, and has ','"),
        ("uniform(1,)", "needs a value at character 11, and has ')'"),
        ("uniform(1 'a')", "needs ',' or ')' at character 11, and has \"'\""),
        ("uniform(1, 2) x", "ends with 'x', which belongs to nothing"),
        ("uniform(a=1, 2)", "has '2' without a name after arguments with one"),
        ("uniform(a=1, a=2)", "says a twice"),
        ("uniform('a)", "has an opening ' without a closing one"),
        ("5)", "has ')' at character 2, outside parentheses"),
        ("(5)", "needs a value at character 1, and has '('"),
    ],
)
def test_an_error_says_what_was_expected_where(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_call(text, example=EXAMPLE, where="--arrivals")
    assert str(caught.value) == f"--arrivals: {text!r} {problem}; write for example poisson(200)"


def test_a_long_text_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_call("f(" * 5000, example=EXAMPLE)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("200", 200),
        ("-3", -3),
        (".5", 0.5),
        ("5.", 5),
        ("1e3", 1000),
        ("2.5E-1", 0.25),
        ("16k", 16_000),
        ("16K", 16_000),
        ("16ki", 16_384),
        ("1.1k", 1100),
        ("2m", 2_000_000),
        ("1 mi", 1_048_576),
        ("inf", inf),
        *(
            (text, None)
            for text in ("", "nan", "-inf", "1x", "1s", "k", "1e9999", "1e999", "0x10", "1_000", "١", "1 2")
        ),
    ],
)
def test_a_number_may_have_a_suffix(text: str, value: float | None) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60", 60),
        ("60s", 60),
        ("1.5 s", 1.5),
        ("5m", 300),
        ("5min", 300),
        ("2h", 7200),
        ("250ms", 0.25),
        *((text, None) for text in ("inf", "5k", "1d", "", "1e999h")),
    ],
)
def test_a_duration_is_in_seconds_unless_it_says_otherwise(text: str, seconds: float | None) -> None:
    assert parse_duration_s(text) == seconds


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53))
def test_a_number_survives_being_written_and_read(value: float) -> None:
    assert parse_number(number_text(value)) == value


@given(st.lists(st.text()), st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,9}", fullmatch=True), st.text()))
def test_a_call_survives_being_written_and_read(positional: list[str], keywords: dict[str, str]) -> None:
    # A keyword named like call_text's own first parameter cannot be handed to it.
    keywords.pop("name", None)
    text = call_text("form", *positional, **keywords)
    assert parse_call(text, example=EXAMPLE) == Call("form", tuple(positional), keywords)


@given(st.text() | st.text(alphabet="ab1(),='\" "))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        call = parse_call(text, example=EXAMPLE)
    except ConfigError as error:
        assert EXAMPLE in str(error)
    else:
        assert call.name is not None or len(call.positional) == 1


def test_arguments_are_matched_by_position_and_by_name() -> None:
    arguments = read_arguments("ramp(1, to=2k, over=1m, steps=3, file=a b, shape=square)", (OTHER, FORM))
    assert arguments.form is FORM
    assert (arguments.number("from"), arguments.number("to"), arguments.number("over")) == (1, 2000, 60)
    assert (arguments.whole("steps"), arguments.text("file"), arguments.text("shape")) == (3, "a b", "square")


def test_arguments_that_are_not_given_are_none() -> None:
    arguments = read_arguments("ramp(1, 2)", (FORM,))
    assert arguments.optional_number("over") is None
    assert arguments.optional_whole("steps") is None
    assert arguments.optional_text("file") is None


def test_a_bare_value_stands_for_one_form() -> None:
    assert read_arguments(" 5k ", (FORM, OTHER), bare_form="burst").number("rate") == 5000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rump(1, 2)", "'rump' is none of ramp, burst; did you mean 'ramp'?; for example ramp(1, 50, over=60)"),
        ("RAMP(1, 2)", "'RAMP' is none of ramp, burst; did you mean 'ramp'?; for example ramp(1, 50, over=60)"),
        ("200", "'200' is not of the form name(arguments): ramp, burst; for example ramp(1, 50, over=60)"),
        (
            "ramp(1)",
            "ramp needs 'to': ramp(from, to[, steps][, over=][, file=][, shape=]); for example ramp(1, 50, over=60)",
        ),
        (
            "ramp",
            "ramp needs 'from' and 'to': ramp(from, to[, steps][, over=][, file=][, shape=]); "
            "for example ramp(1, 50, over=60)",
        ),
        (
            "ramp(1, 2, 3, 4)",
            "ramp: nothing takes '4' without a name: ramp(from, to[, steps][, over=][, file=][, shape=]); "
            "for example ramp(1, 50, over=60)",
        ),
        (
            "ramp(1, 2, ovr=4)",
            "ramp has no argument 'ovr'; did you mean 'over'?: ramp(from, to[, steps][, over=][, file=][, shape=]); "
            "for example ramp(1, 50, over=60)",
        ),
        ("ramp(1, 2, to=4)", "ramp: to is given twice, by position and by name"),
        (
            "ramp(1001, 2)",
            "ramp: from is '1001'; it must be a number from 0 up to 1000, for example ramp(1, 50, over=60)",
        ),
        ("ramp(x, 2)", "ramp: from is 'x'; it must be a number from 0 up to 1000, for example ramp(1, 50, over=60)"),
        ("ramp(1, 0)", "ramp: to is '0'; it must be a number above 0, for example ramp(1, 50, over=60)"),
        ("ramp(1, inf)", "ramp: to is 'inf'; it must be a number above 0, for example ramp(1, 50, over=60)"),
        (
            "ramp(1, 2, 1.5)",
            "ramp: steps is '1.5'; it must be a whole number from 1, for example ramp(1, 50, over=60)",
        ),
        (
            "ramp(1, 2, over=5k)",
            "ramp: over is '5k'; it must be a duration in seconds from 0, for example ramp(1, 50, over=60)",
        ),
        ("ramp(1, 2, shape=squar)", "ramp: shape is 'squar'; did you mean 'square'?: one of linear, square"),
        ("burst(-1)", "burst: rate is '-1'; it must be a number from 0, or inf, for example burst(5)"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_arguments(text, (FORM, OTHER), where="workload.yaml")
    assert str(caught.value) == f"workload.yaml: {message}"
