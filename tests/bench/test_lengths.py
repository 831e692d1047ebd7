"""Lengths are drawn from the distribution that their text names, and the text survives being described."""

from __future__ import annotations

from math import erf, exp, log, sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from headrace.bench.load.empirical_lengths import sample_pairs
from headrace.bench.load.length_model import MAX_LENGTH_TOKENS
from headrace.bench.load.lengths import LENGTH_FORMS, LognormalLengths, parse_lengths
from headrace.errors import ConfigError
from tests.bench.distributions import Cdf, Floats, assert_mean, assert_variance, assert_whole_drawn_from

DRAWS = 20_000
_phi = np.vectorize(lambda z: (1 + erf(z / sqrt(2))) / 2)


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def uniform_cdf(first: int, last: int) -> Cdf:
    return lambda n: np.clip((n - first + 1) / (last - first + 1), 0, 1)


def normal_cdf(mean: float, std: float, low: int, high: int) -> Cdf:
    """Of a rounded normal, given that it lies in low..high: at most n is below n + 1/2."""
    at_low, at_high = _phi((low - 0.5 - mean) / std), _phi((high + 0.5 - mean) / std)
    return lambda n: np.clip((_phi((n + 0.5 - mean) / std) - at_low) / (at_high - at_low), 0, 1)


def lognormal_cdf(mu: float, sigma: float) -> Cdf:
    """Of a rounded lognormal whose lengths below 1 are raised to 1."""
    return lambda n: np.where(n < 1, 0.0, _phi((np.log(np.maximum(n, 1) + 0.5) - mu) / sigma))


def clamped(cdf: Cdf, low: int, high: int) -> Cdf:
    def bounded(n: Floats) -> Floats:
        return np.where(n < low, 0.0, np.where(n >= high, 1.0, cdf(n)))

    return bounded


Z99 = 2.3263478740408408

CASES: dict[str, Cdf] = {
    "uniform(512, 16k)": uniform_cdf(512, 16_000),
    "uniform(1, 3)": uniform_cdf(1, 3),
    "uniform(100, 1000, min=200, max=900)": clamped(uniform_cdf(100, 1000), 200, 900),
    "normal(512, 128)": normal_cdf(512, 128, 1, MAX_LENGTH_TOKENS),
    "normal(20, 3)": normal_cdf(20, 3, 1, MAX_LENGTH_TOKENS),
    "normal(100, 80)": normal_cdf(100, 80, 1, MAX_LENGTH_TOKENS),
    "normal(100, 80, min=50, max=130)": normal_cdf(100, 80, 50, 130),
    "lognormal(mean=200, sigma=0.8)": lognormal_cdf(log(200) - 0.32, 0.8),
    "lognormal(median=200, sigma=1.2)": lognormal_cdf(log(200), 1.2),
    "lognormal(median=200, p99=2000)": lognormal_cdf(log(200), log(10) / Z99),
    "lognormal(median=2, sigma=1.5)": lognormal_cdf(log(2), 1.5),
    "lognormal(median=200, sigma=1.2, min=50, max=2k)": clamped(lognormal_cdf(log(200), 1.2), 50, 2000),
}


@pytest.mark.parametrize("text", CASES)
def test_lengths_are_drawn_from_their_distribution(text: str) -> None:
    assert_whole_drawn_from(parse_lengths(text).sample(rng(), DRAWS), CASES[text])


@pytest.mark.parametrize("text", [*CASES, "fixed(700)", "lognormal(mean=200, p99=2000)", "normal(1, 50)"])
def test_the_stated_mean_is_the_mean_of_the_draws(text: str) -> None:
    lengths = parse_lengths(text)
    sample = lengths.sample(rng(3), DRAWS)
    if text == "fixed(700)":
        assert lengths.mean() == 700
        assert set(sample.tolist()) == {700}
    else:
        assert_mean(sample, lengths.mean())


@pytest.mark.parametrize(
    ("text", "variance"),
    [
        ("uniform(512, 16k)", (15_489**2 - 1) / 12),
        # Rounding adds 1/12 (Sheppard's correction).
        ("normal(5000, 100)", 100**2 + 1 / 12),
        # (exp(sigma^2) - 1) mean^2
        ("lognormal(mean=2000, sigma=0.5)", (exp(0.25) - 1) * 2000**2),
    ],
)
def test_lengths_vary_as_much_as_they_should(text: str, variance: float) -> None:
    assert_variance(parse_lengths(text).sample(rng(), DRAWS), variance)


@pytest.mark.parametrize(
    ("text", "mean", "p99"),
    [
        ("lognormal(mean=200, p99=2000)", 200, 2000),
        ("lognormal(mean=200, p99=201)", 200, 201),
        ("lognormal(mean=1000, p99=14968)", 1000, 14_968),
        ("lognormal(mean=200, sigma=0.8)", 200, exp(log(200) - 0.32 + Z99 * 0.8)),
        ("lognormal(median=200, p99=2000)", 200 * exp((log(10) / Z99) ** 2 / 2), 2000),
    ],
)
def test_a_lognormal_has_the_mean_and_the_percentile_it_was_given(text: str, mean: float, p99: float) -> None:
    lengths = parse_lengths(text)
    assert isinstance(lengths, LognormalLengths)
    # Before rounding and bounds; the tolerance is floating-point arithmetic's.
    assert exp(lengths.mu + lengths.sigma**2 / 2) == pytest.approx(mean, rel=1e-9)
    assert exp(lengths.mu + Z99 * lengths.sigma) == pytest.approx(p99, rel=1e-9)


def test_a_bare_number_is_a_fixed_length() -> None:
    assert parse_lengths("512") == parse_lengths("fixed(512)")
    assert parse_lengths("16k").mean() == 16_000
    assert parse_lengths("16ki").mean() == 16_384


def test_bounds_clamp_a_fixed_length() -> None:
    assert parse_lengths("fixed(512, max=100)").sample(rng(), 3).tolist() == [100, 100, 100]
    assert parse_lengths("fixed(512, min=1k)").mean() == 1000


def test_a_normal_does_not_pile_up_at_its_bounds() -> None:
    sample = parse_lengths("normal(100, 80, min=50, max=130)").sample(rng(), DRAWS)
    assert sample.min() == 50
    assert sample.max() == 130
    # At most 1/70 of the draws on any of the 81 lengths; clamping would put 36 % on 130.
    assert np.bincount(sample).max() < DRAWS / 50


def test_the_widest_lognormal_stays_a_number_of_tokens() -> None:
    # exp(ln 1e8 + 10 z): a draw in a hundred is beyond 1e18, one in a million beyond 64 bits.
    sample = parse_lengths("lognormal(median=100m, sigma=10)").sample(rng(), DRAWS)
    assert sample.min() == 1
    assert sample.max() == MAX_LENGTH_TOKENS
    # Half of the draws are above the median, which is the largest length: within 4 standard errors.
    assert abs(np.mean(sample == MAX_LENGTH_TOKENS) - 0.5) < 4 * 0.5 / sqrt(DRAWS)


def test_the_same_seed_draws_the_same_lengths_and_another_seed_others() -> None:
    for text in CASES:
        lengths = parse_lengths(text)
        first = lengths.sample(rng(1), 100)
        assert first.dtype == np.int64
        assert first.tolist() == lengths.sample(rng(1), 100).tolist()
        assert first.tolist() != lengths.sample(rng(2), 100).tolist()


def test_pairs_of_unrelated_distributions_are_independent() -> None:
    inputs, outputs = sample_pairs(parse_lengths("uniform(1, 1k)"), parse_lengths("uniform(1, 1k)"), rng(), DRAWS)
    # The correlation of independent draws has a standard error of 1/sqrt(n); 4 of them are passed once in 16,000.
    assert abs(np.corrcoef(inputs, outputs)[0, 1]) < 4 / sqrt(DRAWS)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("uniform(16k, 512)", "uniform: from=16000 is above to=512"),
        ("uniform(1, 2, min=9, max=8)", "uniform: min=9 is above max=8"),
        ("uniform(0, 2)", "uniform: from is '0'; it must be a whole number from 1"),
        ("512.5", "fixed: tokens is '512.5'; it must be a whole number from 1"),
        ("normal(5, 1, min=100)", "normal: only 0.00% of it lies in 100..100000000 tokens (at least 1% must)"),
        ("lognormal(200, 0.8)", "lognormal: nothing takes '200' without a name"),
        ("lognormal(sigma=1)", "lognormal: give one of mean and median"),
        ("lognormal(mean=1, median=1, sigma=1)", "lognormal: give one of mean and median"),
        ("lognormal(mean=200)", "lognormal: give one of sigma and p99"),
        ("lognormal(mean=200, sigma=1, p99=300)", "lognormal: give one of sigma and p99"),
        ("lognormal(mean=200, p99=200)", "lognormal: p99 must be above the mean"),
        ("lognormal(median=200, p99=20)", "lognormal: p99 must be above the median"),
        ("lognormal(mean=200, p99=2994)", "lognormal: no lognormal has a p99 of 14.968 times its mean or more"),
        ("lognorm(mean=200)", "'lognorm' is none of uniform, fixed, normal, lognormal, empirical; did you mean"),
    ],
)
def test_wrong_lengths_are_refused_with_the_reason_and_an_example(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lengths(text, where="classes.chat.input_length")
    assert str(caught.value).startswith(f"classes.chat.input_length: {problem}")
    assert "for example" in str(caught.value)


def test_every_form_has_a_line_of_help_and_an_example_that_is_one(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("input_tokens,output_tokens\n5,6\n")
    for form in LENGTH_FORMS:
        assert form.signature.startswith(f"{form.name}(")
        assert form.summary
        assert parse_lengths(form.example, folder=tmp_path).mean() >= 1


_whole = st.integers(1, MAX_LENGTH_TOKENS)
_figure = st.floats(1, MAX_LENGTH_TOKENS)
_bounds = st.sampled_from(["", ", min=5", ", max=700", ", min=20, max=1k"])
_texts = st.one_of(
    st.builds("{}".format, _whole),
    st.builds("fixed({}{})".format, _whole, _bounds),
    st.builds("uniform({}, {}{})".format, _whole, _whole, _bounds),
    st.builds("normal({}, {}{})".format, _figure, st.floats(0.001, 1e4), _bounds),
    st.builds(
        "lognormal({}={}, sigma={}{})".format,
        st.sampled_from(["mean", "median"]),
        _figure,
        st.floats(0.001, 10),
        _bounds,
    ),
    st.builds("lognormal({}={}, p99={}{})".format, st.sampled_from(["mean", "median"]), _figure, _figure, _bounds),
)


@given(_texts)
def test_a_described_distribution_reads_back_as_itself_and_keeps_its_promises(text: str) -> None:
    try:
        lengths = parse_lengths(text)
    except ConfigError:
        reject()
    again = parse_lengths(lengths.describe())
    assert again == lengths
    assert again.describe() == lengths.describe()
    sample = lengths.sample(rng(), 20)
    low, high = (int(part) if part else None for part in _said_bounds(lengths.describe()))
    assert sample.min() >= (low or 1)
    assert sample.max() <= (high or MAX_LENGTH_TOKENS)
    # Half a token: the mean of what is rounded is stated without the rounding.
    assert (low or 1) - 0.5 <= lengths.mean() <= (high or MAX_LENGTH_TOKENS) + 0.5


def _said_bounds(text: str) -> tuple[str, str]:
    """What stands behind ``min=`` and ``max=``."""
    values = [text.partition(f"{key}=")[2].rstrip(")").partition(",")[0] for key in ("min", "max")]
    return values[0], values[1]


_PARTS = ["(", ")", ",", "=", "'", '"', " ", "\x00", "\ud800", "/", ".", "k", "1", "512", "1e300", "-1", "inf", "nan"]
_NAMES = [*(form.name for form in LENGTH_FORMS), "min", "max", "mean", "p99", "column"]
_words = st.lists(st.sampled_from(_NAMES + _PARTS), max_size=12)


@settings(max_examples=300)
@given(st.text() | st.builds("".join, _words) | st.builds("uniform({})".format, st.text()))
def test_any_text_gives_lengths_or_a_config_error(text: str) -> None:
    try:
        lengths = parse_lengths(text)
    except ConfigError:
        return
    assert lengths.sample(rng(), 5).min() >= 1
