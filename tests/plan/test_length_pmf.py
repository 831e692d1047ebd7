"""Probabilities of lengths are those of what the load generator draws."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.load.lengths import parse_lengths
from headrace.errors import ConfigError
from headrace.plan import length_pmf
from headrace.plan.seqs_plan import lengths_of

DRAWS = 200_000
FORMS = [
    "fixed(300)",
    "300",
    "uniform(10, 90)",
    "uniform(10, 90, min=30, max=50)",
    "normal(100, 40)",
    "normal(100, 40, min=90, max=180)",
    "lognormal(mean=120, p99=700)",
    "lognormal(median=40, sigma=0.5, min=20, max=90)",
]


def worst(drawn: np.ndarray, probabilities: np.ndarray) -> float:
    """The largest distance between the share of draws up to a length and its probability."""
    seen = np.bincount(np.minimum(drawn, len(probabilities) - 1), minlength=len(probabilities)) / len(drawn)
    return float(np.abs(np.cumsum(seen) - np.cumsum(probabilities)).max())


NEAR = 1.95 / np.sqrt(DRAWS)
"""Kolmogorov's bound: equal distributions are further apart in one of a thousand runs; the seed is fixed."""


@pytest.mark.parametrize("text", FORMS)
def test_what_is_drawn_has_these_probabilities(text: str) -> None:
    lengths = parse_lengths(text)
    probabilities = length_pmf.probabilities(lengths, 2000)
    assert probabilities.sum() == pytest.approx(1, abs=1e-12) and (probabilities >= 0).all()
    assert worst(lengths.sample(np.random.default_rng(1), DRAWS), probabilities) < NEAR


@pytest.mark.parametrize(
    "content", ["5\n5\n7\n100\n", "tokens\n3\n900\n", json.dumps({"cdf": [[10, 0.25], [100, 0.9], [400, 1.0]]})]
)
def test_files(content: str, tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text(content)
    lengths = parse_lengths("empirical(lengths.txt, min=4)", folder=tmp_path)
    probabilities = length_pmf.probabilities(lengths, 1000)
    assert worst(lengths.sample(np.random.default_rng(1), DRAWS), probabilities) < NEAR


def test_what_is_longer_than_the_context_ends_at_it() -> None:
    probabilities = length_pmf.probabilities(parse_lengths("uniform(1, 100)"), 40)
    assert len(probabilities) == 41 and probabilities[40] == pytest.approx(0.61)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(2, 100))
def test_the_end_of_a_sequence(prompt: int, first: int, more: int, context: int) -> None:
    """A fixed prompt and an answer of first..first+more: the sum, cut to the context."""
    inputs = length_pmf.probabilities(parse_lengths(f"{prompt}"), context)
    outputs = length_pmf.probabilities(parse_lengths(f"uniform({first}, {first + more})"), context)
    tokens = length_pmf.total_at_end(inputs, outputs, context)
    expected = np.zeros(context + 1)
    for answer in range(first, first + more + 1):
        expected[min(prompt + answer, context)] += 1 / (more + 1)
    assert np.allclose(np.pad(tokens, (0, context + 1 - len(tokens))), expected)


def test_a_moment_while_running() -> None:
    """An answer of 9 is met nine times as often as one of 1; both ways to compute it agree with the count by hand."""
    inputs, outputs = np.array([10, 10]), np.array([1, 9])
    by_rows = length_pmf.rows_while_running(inputs, outputs, 100)
    assert by_rows[11] == pytest.approx(2 / 10) and by_rows[12:20] == pytest.approx([1 / 10] * 8)
    answers = np.zeros(10)
    answers[[1, 9]] = 0.5
    apart = length_pmf.total_while_running(length_pmf.probabilities(parse_lengths("10"), 100), answers, 100)
    assert np.allclose(np.pad(apart, (0, len(by_rows) - len(apart))), by_rows)
    assert length_pmf.rows_while_running(inputs, outputs, 15)[15] == pytest.approx(1 / 6), "ends at the context"


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=300), st.lists(st.floats(0, 1), min_size=1, max_size=300))
def test_sums_by_transform_are_sums(first: list[float], second: list[float]) -> None:
    """As summed term by term, to 1e-9 of the largest; trailing zeros may go."""
    got = length_pmf.convolved(np.array(first), np.array(second))
    expected = np.convolve(first, second)
    assert np.allclose(np.pad(got, (0, len(expected) - len(got))), expected, atol=1e-9)
    assert (got >= 0).all()


def test_in_blocks() -> None:
    """A block that is begun counts whole."""
    tokens = np.zeros(300)
    tokens[[1, 128, 129, 256]] = 0.25
    assert length_pmf.in_blocks(tokens, 128).tolist() == [0, 0.5, 0.5, 0]


def test_rows_of_one_file_stay_together(tmp_path: Path) -> None:
    """Long prompts keep their own answers: 10+1000 and 1000+10 are both 1,010, and 2,000 never comes."""
    (tmp_path / "pairs.csv").write_text("in,out\n10,1000\n1000,10\n")
    path = tmp_path / "pairs.csv"
    forms = {"inputs": f"empirical({path}, column=in)", "outputs": f"empirical({path}, column=out)"}
    tokens = lengths_of(4096, **forms, trace=None, running=False).tokens
    assert np.flatnonzero(tokens).tolist() == [1010]


def test_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"at_s": 0, "input_tokens": 100, "output_tokens": 5}, {"at_s": 1, "input_tokens": 300, "output_tokens": 5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = lengths_of(4096, inputs=None, outputs=None, trace=path, running=False)
    assert lengths.mean == 205 and lengths.std == 100
    assert (lengths.percentile(0.5), lengths.percentile(0.99)) == (105, 305)
    assert "2 requests of" in lengths.words


def test_questions_that_cannot_be_answered(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("")
    for context, inputs, outputs, trace, message in (
        (1 << 23, "1", "1", None, "too many to compute"),
        (1, "1", "1", None, "at least 2 tokens"),
        (100, None, "1", None, "--input-length: is needed"),
        (100, "1", None, None, "--output-length: is needed"),
        (100, "1", None, path, "lengths of its own"),
        (100, None, None, path, "is empty"),
        (100, "sometimes", "1", None, "--input-length"),
    ):
        with pytest.raises(ConfigError, match=message):
            lengths_of(context, inputs=inputs, outputs=outputs, trace=trace, running=False)
