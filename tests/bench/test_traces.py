"""Traces are read row by row as their format says, cut and scaled as asked, and refused with file and line."""

from __future__ import annotations

import csv
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.load.traces import TRACE_FORMATS, TraceFile, TraceOptions, TraceRow
from headrace.errors import ConfigError
from tests.bench.trace_samples import AZURE, BAILIAN, BURSTGPT, HEADRACE, MOONCAKE, json_lines, rows, trace

SHARED = Path(__file__).parents[3] / "shared" / "data"


S = 1_000_000_000


AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:01+02:00,2399,6
"""


BURSTGPT_SESSIONS = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
1,a,2.5,ChatGPT,10,20,30,Conversation log
2,b,2.5,ChatGPT,11,21,32,Conversation log
3,,2.5,ChatGPT,12,22,34,API log
4,a,2.5,ChatGPT,13,0,13,Conversation log
5,a,2.5,ChatGPT,14,24,38,Conversation log
"""


SAMPLES = {
    "azure": AZURE,
    "mooncake": MOONCAKE,
    "burstgpt": BURSTGPT,
    "bailian": BAILIAN,
    "headrace": HEADRACE,
}


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
