"""Lengths from files: four kinds of file, pairs from one row, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.load.empirical_lengths import CdfLengths, EmpiricalLengths, sample_pairs
from headrace.bench.load.lengths import Lengths, parse_lengths
from headrace.errors import ConfigError
from tests.bench.distributions import Cdf, assert_mean, assert_whole_drawn_from

DRAWS = 20_000
SHARED = Path(__file__).parents[3] / "shared" / "data"


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def in_file(folder: Path, content: str | bytes, arguments: str = "") -> Lengths:
    """The distribution of a file with this content."""
    (folder / "lengths").write_bytes(content.encode() if isinstance(content, str) else content)
    return parse_lengths(f"empirical(lengths{arguments})", folder=folder)


def values(lengths: Lengths) -> list[int]:
    assert isinstance(lengths, EmpiricalLengths)
    return [int(length) for length in lengths.values]


@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        ("3\n1\n\n# the last two\n4\n1\n", ""),
        ("3\r\n1\r\n4.0\r\n1", ""),
        ("\ufeff3\n1\n4\n1\n", ""),
        ("[3, 1, 4.0, 1]", ""),
        ("\n[\n3, 1,\n4, 1]\n", ""),
        ("tokens\n3\n1\n4\n1\n", ""),
        ("tokens\n3\n1\n4\n1\n", ", tokens"),
        ('in, out\n9,3\n9,1\n9,"4"\n9,1\n', ", column=out"),
        ("Request tokens,x\n3,9\n1,9\n4,9\n1,9", ", column=Request tokens"),
    ],
)
def test_a_file_is_read_by_what_it_holds(content: str, arguments: str, tmp_path: Path) -> None:
    lengths = in_file(tmp_path, content, arguments)
    assert values(lengths) == [3, 1, 4, 1]
    assert lengths.mean() == 2.25


def test_every_row_is_as_likely_as_any_other(tmp_path: Path) -> None:
    sample = in_file(tmp_path, "[3, 1, 4, 1]").sample(rng(), DRAWS)
    assert_whole_drawn_from(sample, lambda n: np.select([n < 1, n < 3, n < 4], [0.0, 0.5, 0.75], 1.0))


def test_bounds_clamp_the_rows(tmp_path: Path) -> None:
    lengths = in_file(tmp_path, "[0, 10, 1000]", ", min=5, max=100")
    assert set(lengths.sample(rng(), 100).tolist()) == {5, 10, 100}
    assert lengths.mean() == 115 / 3


CDF = [[64, 0.25], [128, 0.25], [256, 0.75], [1024, 1.0]]


def cdf_of(points: list[list[float]], least: int = 1, most: int = 10**9) -> Cdf:
    """The cumulative distribution through these points, straight between them, and clamped."""
    tokens, fractions = zip(*([[0, 0.0], *points]), strict=True)
    return lambda n: np.where(n < least, 0.0, np.where(n >= most, 1.0, np.interp(n, tokens, fractions)))


@pytest.mark.parametrize("content", [json.dumps(CDF), json.dumps({"cdf": CDF, "source": "a test"})])
def test_a_cumulative_distribution_keeps_its_fractions(content: str, tmp_path: Path) -> None:
    lengths = in_file(tmp_path, content)
    assert isinstance(lengths, CdfLengths)
    sample = lengths.sample(rng(), DRAWS)
    assert_whole_drawn_from(sample, cdf_of(CDF))
    assert not np.any((sample > 64) & (sample <= 128))
    # Bins 1..64, 129..256, 257..1024 with shares 1/4, 1/2, 1/4.
    assert lengths.mean() == (32.5 + 2 * 192.5 + 640.5) / 4
    assert_mean(sample, lengths.mean())


class EdgeDraws(np.random.Generator):
    """A generator whose ``random`` falls exactly on the fractions of ``CDF``, as it may once in 2^53 draws."""

    def random(self, *_: Any, **__: Any) -> Any:
        return np.array([0.0, 0.25, 0.75])


def test_a_draw_on_a_point_lies_in_the_share_above_it(tmp_path: Path) -> None:
    lengths = in_file(tmp_path, json.dumps([[32, 0.0], *CDF]))
    sample = lengths.sample(EdgeDraws(np.random.PCG64(7)), 3)
    assert [33 <= sample[0] <= 64, 129 <= sample[1] <= 256, 257 <= sample[2] <= 1024] == [True, True, True]


def test_bounds_clamp_a_cumulative_distribution(tmp_path: Path) -> None:
    lengths = in_file(tmp_path, json.dumps(CDF), ", min=60, max=200")
    sample = lengths.sample(rng(), DRAWS)
    assert_whole_drawn_from(sample, cdf_of(CDF, 60, 200))
    assert_mean(sample, lengths.mean())


def test_two_columns_of_one_file_are_drawn_from_the_same_rows(tmp_path: Path) -> None:
    rows = [(n, 10_000 - n) for n in range(1, 200)]
    (tmp_path / "pairs.csv").write_text("input,output\n" + "\n".join(f"{a},{b}" for a, b in rows))
    inputs = parse_lengths("empirical(pairs.csv, column=input)", folder=tmp_path)
    outputs = parse_lengths("empirical(./pairs.csv, column=output, min=9850)", folder=tmp_path)
    drawn = sample_pairs(inputs, outputs, rng(), 1000)
    assert all(
        output == max(10_000 - own, 9850) for own, output in zip(*(part.tolist() for part in drawn), strict=True)
    )
    assert_whole_drawn_from(drawn[0], lambda n: np.clip(n / 199, 0, 1))


def test_two_files_are_drawn_independently(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("\n".join(str(n) for n in range(1, 1000)))
    first, second = (parse_lengths(f"empirical({name})", folder=tmp_path) for name in ("a", "b"))
    inputs, outputs = sample_pairs(first, second, rng(), DRAWS)
    # The correlation of independent draws has a standard error of 1/sqrt(n); 4 of them are passed once in 16,000.
    assert abs(np.corrcoef(inputs, outputs)[0, 1]) < 4 / np.sqrt(DRAWS)


@pytest.mark.parametrize("name", ["plain.csv", "with space.csv", "a,b.csv", 'it\'s (1)="2".csv'])
def test_a_file_s_distribution_is_described_by_a_text_that_reads_it_again(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("a b,c\n5,6\n7,8\n")
    quoted = '"' + name.replace('"', '""') + '"'
    lengths = parse_lengths(f"empirical({quoted}, column=a b, max=6)", folder=tmp_path)
    again = parse_lengths(lengths.describe())
    assert again == lengths
    assert values(again) == [5, 7]
    (tmp_path / "cdf").write_text(json.dumps(CDF))
    from_cdf = parse_lengths("empirical(cdf, min=2)", folder=tmp_path)
    assert parse_lengths(from_cdf.describe()) == from_cdf


@pytest.mark.parametrize(
    ("content", "arguments", "problem"),
    [
        ("", "", "holds no lengths: it is empty"),
        ("\n# nothing\n", "", "holds no lengths: it is empty"),
        ("tokens\n", "", "holds no lengths below its header"),
        ("5\nx\n", "", "line 2: 'x' is no number of tokens"),
        ("5\n\n1.5\n", "", "line 3: must be a whole number of tokens from 1 to 100000000, and is '1.5'"),
        ("5\n-1\n", "", "line 2: must be a whole number of tokens from 1 to 100000000, and is '-1'"),
        ("5\nnan\n", "", "line 2: must be a whole number of tokens from 1 to 100000000, and is 'nan'"),
        ("5\n1e9\n", "", "line 2: must be a whole number of tokens from 1 to 100000000, and is '1e9'"),
        ("5\n0\n", "", "line 2: is 0 tokens; a length is at least 1: say min=1 to raise it"),
        ("5\n6\n", ", column=a", "has no columns, so column 'a' is not in it; leave column out"),
        ("[5]", ", column=a", "has no columns, so column 'a' is not in it; leave column out"),
        ("5,6\n7,8\n", "", "line 1: holds numbers where a CSV names its columns; add a header line"),
        ("a,b\n7,8\n", "", "line 1: has several columns ('a', 'b'); say which, for example column=a"),
        ("input,b\n7,8\n", ", inptu", "line 1: has no column 'inptu'; did you mean 'input'? (columns: 'input', 'b')"),
        ("a,a\n7,8\n", ", a", "line 1: has two columns 'a' (columns: 'a', 'a')"),
        ("a,b\n7,8\n9\n", ", a", "line 3: has 1 cells, the header has 2"),
        ("a,b\n7,8\n,9\n", ", a", "line 3, column 'a': '' is no number of tokens"),
        ('a,b\n7,8\n"9,9\n', ", a", "line 3: is not a line of CSV: unexpected end of data"),
        (b"a\n7\n\xff\n", "", "line 3: is not UTF-8 text (invalid start byte)"),
        ("[5,", "", "is not JSON: Input data was truncated"),
        (b'[5,\n"\xff"]', "", "is not JSON: "),
        ("[" * 100_000, "", "is not JSON: "),
        ("[]", "", "must be a list of lengths"),
        ('{"lengths": [5]}', "", "must be a list of lengths"),
        ("[5, true]", "", "item 1: True is no number of tokens"),
        ("[5, null]", "", "item 1: None is no number of tokens"),
        ("[[5, 0.5], 7]", "", "point 1: must be [tokens, cumulative fraction], and is 7"),
        ("[[5, 0.5], [7]]", "", "point 1: must be [tokens, cumulative fraction], and is [7]"),
        ("[[5, 0.5], [7, 1.5]]", "", "point 1: has the fraction 1.5; it must be from 0 to 1"),
        ("[[5, 0.5], [5, 1]]", "", "point 1: goes back from [5, 0.5] to [5, 1.0]; tokens must rise"),
        ("[[5, 0.5], [7, 0.4]]", "", "point 1: goes back from [5, 0.5] to [7, 0.4]; tokens must rise"),
        ("[[5, 0.5], [7, 0.9]]", "", "ends at the fraction 0.9; the last one must be 1"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    content: str | bytes, arguments: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        in_file(tmp_path, content, arguments)
    message = str(caught.value).removeprefix(str(tmp_path / "lengths"))
    assert message.removeprefix(",").removeprefix(":").lstrip().startswith(problem)


@pytest.mark.parametrize(
    ("name", "problem"), [("absent", "cannot be read: No such file or directory"), (".", "is not a regular file")]
)
def test_a_file_that_cannot_be_read_is_named(name: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_lengths(f"empirical({name})", folder=tmp_path)
    assert str(tmp_path) in str(caught.value)


@settings(max_examples=200)
@given(content=st.binary() | st.text(alphabet='0123456789,.-[]{}":\n\r#cdf').map(str.encode))
def test_any_file_gives_lengths_or_a_config_error(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("lengths")
    try:
        lengths = in_file(folder, content)
    except ConfigError:
        return
    assert lengths.sample(rng(), 5).min() >= 1


def test_sharegpt_pairs_keep_their_rows() -> None:
    path = SHARED / "sharegpt-8k-lengths" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    inputs = parse_lengths(f"empirical({path}, column=num_prefill_tokens)")
    outputs = parse_lengths(f"empirical({path}, column=num_decode_tokens)")
    rows = set(zip(values(inputs), values(outputs), strict=True))
    assert len(values(inputs)) == 30_731
    drawn = sample_pairs(inputs, outputs, rng(), DRAWS)
    assert set(zip(*(part.tolist() for part in drawn), strict=True)) <= rows
    assert_mean(drawn[0], inputs.mean())
    assert_mean(drawn[1], outputs.mean())


@pytest.mark.parametrize("name", ["azure", "lmsys", "lmsys_multiturn", "agent_heavy"])
def test_fleet_sim_distributions_are_read_as_they_are(name: str) -> None:
    path = SHARED / "length-cdfs-fleet-sim" / f"{name}_cdf.json"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    document = json.loads(path.read_text())
    points = document["cdf"] if isinstance(document, dict) else document
    assert_whole_drawn_from(parse_lengths(f"empirical({path})").sample(rng(), DRAWS), cdf_of(points))
