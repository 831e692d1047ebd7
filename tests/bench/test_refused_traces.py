"""Traces that cannot be read or sent: refused with file and line."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from headrace.bench.load.traces import TraceFile, TraceOptions
from headrace.errors import ConfigError
from tests.bench.trace_samples import AZURE, BAILIAN, BURSTGPT, HEADRACE, MOONCAKE, rows

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


DATE = "2023-11-16 18:15:46.68"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", ": is empty; a trace has a request a line"),
        ("\n \n", ": is empty; a trace has a request a line"),
        ("a,b\n", ", line 1: has the fields a, b: no trace format of azure, mooncake, burstgpt, bailian, headrace"),
        ('\n{"a": 1, "b": 2}', ", line 2: has the fields a, b: no trace format of azure, mooncake"),
        ("{", ", line 1: Input data was truncated"),
        ("[" * 9, ", line 1: has the fields [[[[[[[[[: no trace format"),
        (b"\xff\xfe", ", line 1: is not UTF-8 text (invalid start byte)"),
        (HEADER + DATE + ",1\n", ", line 2: has 2 cells; the header has 3"),
        (HEADER + f"{DATE},1,2\n{DATE},x,2\n", ", line 3: ContextTokens is 'x'; it must be a whole number from 0"),
        (HEADER + f"{DATE},1,-2\n", ", line 2: GeneratedTokens is '-2'; it must be a whole number from 0"),
        (HEADER + f"{DATE},1,2.5\n", ", line 2: GeneratedTokens is '2.5'; it must be a whole number from 0"),
        (HEADER + f"{DATE},1,200000000\n", ", line 2: GeneratedTokens is '200000000'; it must be"),
        (HEADER + "yesterday,1,2\n", ", line 2: TIMESTAMP is 'yesterday'; it must be a date such as 2023-11-16"),
        (HEADER + "2023-13-16 18:15:46,1,2\n", ", line 2: TIMESTAMP is '2023-13-16 18:15:46'; it must be a date"),
        (HEADER + f'{DATE},"1,2\n', ", line 2: is not a line of CSV: unexpected end of data"),
        (
            HEADER + f"{DATE},1,2\n2023-11-16 18:15:45.18,1,2\n",
            ", line 3: goes back in time by 1.5 s; sort the file by time",
        ),
        (BURSTGPT + "x,ChatGPT,1,2,3,API log", ", line 6: Timestamp is 'x'; it must be seconds from 0 to 1e+09"),
        (BURSTGPT + "nan,ChatGPT,1,2,3,API log", ", line 6: Timestamp is 'nan'; it must be seconds from 0 to 1e+09"),
        (BURSTGPT + "9,ChatGPT,1,2,3,API log", ", line 6: goes back in time by 109 s"),
        (
            MOONCAKE + '{"timestamp": 30000, "input_length": 5}',
            ", line 3: Object missing required field `output_length`",
        ),
        (MOONCAKE + '{"timestamp": "3"}', ", line 3: Expected `float`, got `str` - at `$.timestamp`"),
        (MOONCAKE + '{"timestamp": 1e300}', ", line 3: Expected `float` <= 1000000000000.0 - at `$.timestamp`"),
        (MOONCAKE + "{broken", ", line 3: JSON is malformed"),
        (MOONCAKE + "[" * 100_000, ", line 3: "),
        (
            BAILIAN + '{"chat_id": 1, "timestamp": 99, "input_length": 5, "output_length": -5}',
            ", line 6: Expected `int` >= 0 - at `$.output_length`",
        ),
        (
            BAILIAN + '{"chat_id": 1, "timestamp": 99, "input_length": 5, "output_length": 5, "turn": 0}',
            ", line 6: Expected `int` >= 1 - at `$.turn`",
        ),
        (
            HEADRACE + '{"at_s": 3, "input_tokens": 0, "output_tokens": 9}',
            ", line 5: Expected `int` >= 1 - at `$.input_tokens`",
        ),
        (
            HEADRACE + '{"at_s": 3, "input_tokens": 1, "output_tokens": 9, "header": {}}',
            ", line 5: Object contains unknown field `header`; did you mean 'headers'?",
        ),
        (
            HEADRACE + '{"at_s": 3, "input_tokens": 1, "output_tokens": 9, "zzz": {}}',
            ", line 5: Object contains unknown field `zzz` (known: at_s, input_tokens, output_tokens, class, lane,",
        ),
        (
            HEADRACE + '{"at_s": 3, "input_tokens": 1, "output_tokens": 9, "turn": 1}',
            ", line 5: has a turn without a session",
        ),
    ],
)
def test_a_malformed_trace_is_refused_with_file_and_line(content: str | bytes, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rows(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 'trace'}{problem}")


def test_a_format_that_the_file_is_not_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: has no column 'Timestamp' \(columns: TIMESTAMP, ContextTokens"):
        rows(tmp_path, AZURE, TraceOptions(format="burstgpt"))
    with pytest.raises(ConfigError, match="line 1: Object missing required field `chat_id`"):
        rows(tmp_path, MOONCAKE, TraceOptions(format="bailian"))
    with pytest.raises(ConfigError, match="line 1: JSON is malformed"):
        rows(tmp_path, AZURE, TraceOptions(format="headrace"))


def test_a_line_without_end_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "zeros").open("wb") as file:
        file.truncate(256 * 1024 * 1024)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="line 1: is longer than 16777216 bytes; this is no trace"):
            list(TraceFile(tmp_path / "zeros"))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The longest line allowed, and as much again while it is put together.
    assert peak_bytes < 3 * 16 * 1024 * 1024


@pytest.mark.parametrize(("name", "problem"), [("absent", "No such file or directory"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read_is_named(name: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        list(TraceFile(tmp_path / name))
    assert str(caught.value) == f"{tmp_path / name}: cannot be read: {problem}"


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no file name"):
        list(TraceFile(Path("a\x00b")))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"speed": 0}, "speed must be from 0.001 to 1e"),
        ({"speed": float("nan")}, "speed must be from 0.001 to 1e"),
        ({"start_s": -1}, "start must be from 0"),
        ({"duration_s": 0}, "duration above 0"),
        ({"limit": 0}, "must be at least 1"),
        ({"max_input_tokens": 0}, "must be at least 1"),
        ({"max_output_tokens": 0}, "must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TraceOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"at_s": 1, "input_tokens": 5, "output_tokens": 1, "lane": "a\\nb"}', "the lane 'a\\nb' is not fit"),
        ('{"at_s": 1, "input_tokens": 5, "output_tokens": 1, "session": "\\u0000"}', "the session"),
        ('{"at_s": 1, "input_tokens": 5, "output_tokens": 1, "headers": {"x-a": "\\r\\n"}}', "headers: not fit"),
        ('{"at_s": 1, "input_tokens": 5, "output_tokens": 1, "headers": {"a b": "c"}}', "headers: 'a b' is no name"),
        ('{"at_s": 1, "input_tokens": 5, "output_tokens": 1, "headers": {"Content-Length": "1"}}', "headers: "),
        ('{"at_s": 1, "input_tokens": 5, "output_tokens": 1, "hash_ids": [-1]}', "hash_ids"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_line(tmp_path: Path, line: str, problem: str) -> None:
    good = '{"at_s": 0, "input_tokens": 5, "output_tokens": 1, "lane": "chat", "headers": {"x-a": "b"}}'
    with pytest.raises(ConfigError) as caught:
        rows(tmp_path, f"{good}\n{line}\n")
    assert ", line 2: " in str(caught.value) and problem in str(caught.value)


@pytest.mark.parametrize("number", [-1, 2**63])
def test_hash_ids_are_numbers_that_texts_can_be_made_of(tmp_path: Path, number: int) -> None:
    line = f'{{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [{number}]}}'
    with pytest.raises(ConfigError, match=r"line 1: .*hash_ids"):
        rows(tmp_path, line)
    bailian = f'{{"chat_id": 1, "timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [{number}]}}'
    with pytest.raises(ConfigError, match=r"line 1: .*hash_ids"):
        rows(tmp_path, bailian)
