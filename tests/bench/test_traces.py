"""Traces are read row by row as their format says, cut and scaled as asked, and refused with file and line."""

from __future__ import annotations

import csv
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.load.traces import TRACE_FORMATS, TraceFile, TraceOptions, TraceRow
from headrace.errors import ConfigError

SHARED = Path(__file__).parents[3] / "shared" / "data"
S = 1_000_000_000

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-17 18:15:46.6805901,879,55"""

AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:01+02:00,2399,6
"""

MOONCAKE = """\
{"timestamp": 0, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [0, 7]}
"""

BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
45.5,ChatGPT,300,0,300,Conversation log
118,GPT-4,417,276,693,Conversation log
"""

BURSTGPT_SESSIONS = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
1,a,2.5,ChatGPT,10,20,30,Conversation log
2,b,2.5,ChatGPT,11,21,32,Conversation log
3,,2.5,ChatGPT,12,22,34,API log
4,a,2.5,ChatGPT,13,0,13,Conversation log
5,a,2.5,ChatGPT,14,24,38,Conversation log
"""


def json_lines(*lines: dict[str, object]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def bailian(chat: int, parent: int, at_s: float, inputs: int, outputs: int, kind: str, turn: int, *ids: int) -> str:
    """A line as the Bailian traces have it."""
    lengths = {"input_length": inputs, "output_length": outputs}
    return json_lines(
        {"chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, **lengths, "type": kind, "turn": turn}
        | {"hash_ids": list(ids)}
    )


BAILIAN = (
    bailian(55, -1, 1.5, 40, 10, "text", 1, 1, 2, 3)
    + bailian(56, -1, 2.0, 17, 5, "file", 1, 9, 8)
    + bailian(159, 55, 61.114, 64, 13, "text", 2, 1, 2, 3, 4)
    + bailian(160, 159, 70, 80, 13, "text", 3, 1, 2, 3, 4, 5)
    + bailian(161, 7, 71, 80, 13, "search", 4, 6)
)

CHAT: dict[str, object] = {"class": "chat", "lane": "live", "session": "x"}
HEADRACE = json_lines(
    {"at_s": 0.25, "input_tokens": 100, "output_tokens": 7},
    {"at_s": 1, "input_tokens": 200, "output_tokens": 8, **CHAT, "headers": {"x-tenant-id": "t"}},
    {"at_s": 2, "input_tokens": 300, "output_tokens": 9, **CHAT, "hash_ids": [4, 5], "block_tokens": 128},
    {"at_s": 2, "input_tokens": 300, "output_tokens": 9, "session": "y", "turn": 4},
)

SAMPLES = {
    "azure": AZURE,
    "mooncake": MOONCAKE,
    "burstgpt": BURSTGPT,
    "bailian": BAILIAN,
    "headrace": HEADRACE,
}


def trace(folder: Path, content: str | bytes, options: TraceOptions | None = None) -> TraceFile:
    path = folder / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return TraceFile(path, options or TraceOptions())


def rows(folder: Path, content: str | bytes, options: TraceOptions | None = None) -> list[TraceRow]:
    return list(trace(folder, content, options))


def test_azure_dates_count_from_the_first_row(tmp_path: Path) -> None:
    assert rows(tmp_path, AZURE) == [
        TraceRow(0, 374, 44),
        TraceRow(4_314_579_000, 396, 109),
        TraceRow(86_400 * S + 100, 879, 55),
    ]


def test_azure_dates_may_have_a_zone_and_no_fraction(tmp_path: Path) -> None:
    assert [row.at_ns for row in rows(tmp_path, AZURE_2024)] == [0, S - 9_930_000]


def test_mooncake_rows_name_their_blocks_of_512_tokens(tmp_path: Path) -> None:
    assert rows(tmp_path, MOONCAKE) == [
        TraceRow(0, 1500, 500, (0, 1, 2), 512),
        TraceRow(27_482_000_000, 6955, 52, (0, 7), 512),
    ]


def test_burstgpt_failures_are_passed_over_and_counted(tmp_path: Path) -> None:
    file = trace(tmp_path, BURSTGPT)
    assert list(file) == [
        TraceRow(5 * S, 472, 18, class_name="Conversation log"),
        TraceRow(45 * S, 1087, 230, class_name="API log"),
        TraceRow(118 * S, 417, 276, class_name="Conversation log"),
    ]
    assert file.empty_rows == 1


def test_burstgpt_failures_can_be_replayed_with_one_token(tmp_path: Path) -> None:
    file = trace(tmp_path, BURSTGPT, TraceOptions(keep_empty=True))
    assert list(file)[2] == TraceRow(45_500_000_000, 300, 1, class_name="Conversation log")
    assert file.empty_rows == 1


def test_burstgpt_sessions_are_conversations(tmp_path: Path) -> None:
    got = [(row.session, row.turn, row.parent) for row in rows(tmp_path, BURSTGPT_SESSIONS)]
    # The failed turn is one of the conversation's, though it is not sent: the next one follows the one before it.
    assert got == [("a", 0, None), ("b", 0, None), (None, 0, None), ("a", 2, 0)]
    kept = rows(tmp_path, BURSTGPT_SESSIONS, TraceOptions(keep_empty=True))
    assert [(row.turn, row.parent) for row in kept if row.session == "a"] == [(0, None), (1, 0), (2, 3)]


def test_bailian_chains_are_conversations_named_by_their_first_turn(tmp_path: Path) -> None:
    got = rows(tmp_path, BAILIAN)
    assert got[2] == TraceRow(61_114_000_000, 64, 13, (1, 2, 3, 4), 16, "55", 1, 0, class_name="text")
    assert [(row.session, row.turn, row.parent) for row in got] == [
        ("55", 0, None),
        ("56", 0, None),
        ("55", 1, 0),
        ("55", 2, 2),
        # Its earlier turns came before the trace began.
        ("7", 3, None),
    ]
    assert [row.class_name for row in got] == ["text", "file", "text", "text", "search"]


def test_our_own_rows_carry_everything(tmp_path: Path) -> None:
    assert rows(tmp_path, HEADRACE) == [
        TraceRow(S // 4, 100, 7),
        TraceRow(S, 200, 8, session="x", lane="live", class_name="chat", headers={"x-tenant-id": "t"}),
        TraceRow(2 * S, 300, 9, (4, 5), 128, "x", 1, 1, "live", "chat"),
        TraceRow(2 * S, 300, 9, session="y", turn=4),
    ]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_format_is_recognised_by_the_first_line(name: str, tmp_path: Path) -> None:
    file = trace(tmp_path, "\ufeff\n" + SAMPLES[name])
    first = next(iter(file))
    assert file.format == name
    # Saying the format changes nothing.
    assert next(iter(trace(tmp_path, SAMPLES[name], TraceOptions(format=file.format)))) == first


def test_every_format_has_a_sample_here() -> None:
    assert set(SAMPLES) == set(TRACE_FORMATS)


def test_a_trace_can_be_read_again(tmp_path: Path) -> None:
    file = trace(tmp_path, BURSTGPT)
    assert list(file) == list(file)
    assert file.empty_rows == 1


def test_speed_divides_the_times(tmp_path: Path) -> None:
    assert [row.at_ns for row in rows(tmp_path, BURSTGPT, TraceOptions(speed=2))] == [2.5 * S, 22.5 * S, 59 * S]
    assert [row.at_ns for row in rows(tmp_path, BURSTGPT, TraceOptions(speed=0.5))] == [10 * S, 90 * S, 236 * S]


def test_a_window_is_cut_in_the_trace_s_own_time_and_starts_at_zero(tmp_path: Path) -> None:
    def at_s(**options: float) -> list[float]:
        return [row.at_ns / S for row in rows(tmp_path, BURSTGPT, TraceOptions(**options))]  # type: ignore[arg-type]

    assert at_s(start_s=45) == [0, 73]
    assert at_s(start_s=45, duration_s=73) == [0]
    assert at_s(start_s=45, duration_s=73.000001, speed=10) == [0, 7.3]
    assert at_s(start_s=4, duration_s=60) == [1, 41]
    assert at_s(start_s=200) == []


def test_turns_before_the_window_still_name_their_conversation(tmp_path: Path) -> None:
    got = rows(tmp_path, BAILIAN, TraceOptions(start_s=61))
    assert [(row.session, row.turn, row.parent) for row in got] == [("55", 1, None), ("55", 2, 0), ("7", 3, None)]


def test_failures_outside_the_window_are_not_counted(tmp_path: Path) -> None:
    file = trace(tmp_path, BURSTGPT, TraceOptions(start_s=100))
    assert len(list(file)) == 1
    assert file.empty_rows == 0


def test_lengths_are_cut_to_the_largest_allowed_and_prefixes_with_them(tmp_path: Path) -> None:
    got = rows(tmp_path, BAILIAN, TraceOptions(max_input_tokens=33, max_output_tokens=10))
    assert [(row.input_tokens, row.output_tokens) for row in got] == [(33, 10), (17, 5), (33, 10), (33, 10), (33, 10)]
    # 33 tokens begin three blocks of 16.
    assert [row.hash_ids for row in got] == [(1, 2, 3), (9, 8), (1, 2, 3), (1, 2, 3), (6,)]


def test_a_limit_ends_the_reading(tmp_path: Path) -> None:
    content = MOONCAKE + "not a line of a trace\n"
    assert len(rows(tmp_path, content, TraceOptions(limit=2))) == 2
    with pytest.raises(ConfigError, match="line 3"):
        rows(tmp_path, content, TraceOptions(limit=3))


def test_rows_come_before_the_rest_is_read(tmp_path: Path) -> None:
    reading = iter(trace(tmp_path, AZURE + "\n" + "2020,1,2\n"))
    assert [next(reading).input_tokens for _ in range(3)] == [374, 396, 879]
    with pytest.raises(ConfigError, match="line 5"):
        next(reading)


def test_a_large_trace_is_not_held_in_memory(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 100000, "output_length": 50, "hash_ids": [' + "123456, " * 195 + "7]}\n"
    content = "".join(line % number for number in range(5000))
    file = trace(tmp_path, content)
    tracemalloc.start()
    try:
        count = sum(1 for _ in file)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 5000
    assert len(content) > 8_000_000
    # A few lines and rows, buffers, decoders: far below the file.
    assert peak_bytes < 500_000


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


_header_texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E))
_own_rows = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": st.integers(0, 10**6).map(lambda milliseconds: milliseconds / 1000),
            "input_tokens": st.integers(1, 10**6),
            "output_tokens": st.integers(1, 10**6),
        },
        optional={
            "class": st.text(),
            "lane": _header_texts,
            "session": st.sampled_from(["a", "b"]),
            "headers": st.dictionaries(st.from_regex(r"x-[a-z0-9_-]+", fullmatch=True), _header_texts),
        },
    ),
    min_size=1,
).map(lambda made: sorted(made, key=lambda row: float(str(row["at_s"]))))


@given(_own_rows)
def test_what_is_written_in_our_format_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, object]]
) -> None:
    got = rows(tmp_path_factory.mktemp("own"), json_lines(*written))
    for number, (row, said) in enumerate(zip(got, written, strict=True)):
        assert row.at_ns == round(float(str(said["at_s"])) * 1000) * 1_000_000
        assert (row.input_tokens, row.output_tokens) == (said["input_tokens"], said["output_tokens"])
        assert (row.class_name, row.lane, row.session) == (said.get("class"), said.get("lane"), said.get("session"))
        assert row.headers == said.get("headers", {})
        earlier = [at for at in range(number) if row.session is not None and got[at].session == row.session]
        assert row.parent == (earlier[-1] if earlier else None)
        assert row.turn == len(earlier)


@settings(max_examples=200)
@given(
    content=st.binary()
    | st.builds(
        "{}\n{}".format,
        st.sampled_from([sample.splitlines()[0] for sample in SAMPLES.values()]),
        st.text(alphabet='0123456789,.-[]{}":\n\r abcdehist_tokens'),
    ).map(str.encode)
)
def test_any_file_gives_rows_or_a_config_error(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        got = rows(tmp_path_factory.mktemp("any"), content)
    except ConfigError:
        return
    assert all(row.input_tokens >= 1 and row.output_tokens >= 1 and row.at_ns >= 0 for row in got)


def shared(name: str) -> Path:
    """A reference file, where the machine has it."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.mark.parametrize(("name", "count"), [("conv", 19_366), ("code", 8_819)])
def test_the_azure_traces_are_read_whole(name: str, count: int) -> None:
    path = shared(f"azure-llm-2023/AzureLLMInferenceTrace_{name}.csv")
    got = list(TraceFile(path))
    with path.open(newline="") as file:
        cells = list(csv.reader(file))[1:]
    assert len(got) == len(cells) == count
    assert [(str(row.input_tokens), str(row.output_tokens)) for row in got] == [(line[1], line[2]) for line in cells]
    # Dates hold 100 ns; numpy's own reading of them is the other opinion.
    dates = np.array([line[0] for line in cells], dtype="datetime64[ns]")
    assert [row.at_ns for row in got] == (dates - dates[0]).astype(np.int64).tolist()


def test_the_azure_conversation_trace_has_its_published_means() -> None:
    got = list(TraceFile(shared("azure-llm-2023/AzureLLMInferenceTrace_conv.csv")))
    # Published to these digits: 1155 in, 211 out, 5.5 requests/s.
    assert round(np.mean([row.input_tokens for row in got])) == 1155
    assert round(np.mean([row.output_tokens for row in got])) == 211
    assert round(len(got) / (got[-1].at_ns / S), 1) == 5.5


def test_the_mooncake_trace_has_its_published_prefix_hits() -> None:
    got = list(TraceFile(shared("mooncake-fast25/conversation_trace.jsonl")))
    assert len(got) == 12_031
    assert round(np.mean([row.input_tokens for row in got])) == 12_035
    assert round(np.mean([row.output_tokens for row in got])) == 343
    assert got[-1].at_ns == 3_536_999_000_000
    blocks = Counter(block for row in got for block in row.hash_ids)
    # An ideal prefix cache hits 36.6 % of the blocks: every block but its first use.
    assert round(1 - len(blocks) / blocks.total(), 3) == 0.366
    assert all(len(row.hash_ids) == -(-row.input_tokens // 512) for row in got)


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
