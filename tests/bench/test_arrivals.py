"""Arrivals come as their process says: times against the distribution, counts that nobody rescaled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import erf, sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.bench.load.arrivals import ARRIVAL_FORMS, ClosedLoop, TraceReplay, parse_arrivals
from headrace.bench.load.traces import TraceOptions
from headrace.errors import ConfigError
from tests.bench.distributions import Floats, Z, assert_count, assert_drawn_from, assert_mean

_erf = np.vectorize(erf)
OPEN_TEXTS = [
    "constant(200)",
    "poisson(200)",
    "gamma(200, shape=0.5)",
    "ramp(0, 200, over=10)",
    "ramp(200, 10, over=10)",
    "burst(10, 300, at=2, length=3)",
    "burst(0, 300, at=1, length=1, every=4)",
]


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def times_s(text: str, duration_s: float, seed: int = 7) -> Floats:
    """Arrival times in seconds."""
    arrivals = parse_arrivals(text)
    assert not isinstance(arrivals, ClosedLoop)
    return arrivals.times_ns(rng(seed), duration_s) / 1e9


def counts_of(text: str, duration_s: float, seeds: int) -> NDArray[np.int64]:
    """The number of arrivals in runs with different seeds."""
    return np.array([len(times_s(text, duration_s, seed)) for seed in range(seeds)])


def test_constant_arrivals_are_evenly_spaced_from_the_start() -> None:
    arrivals = parse_arrivals("constant(4)")
    assert not isinstance(arrivals, ClosedLoop)
    assert arrivals.times_ns(rng(), 1).tolist() == [0, 250_000_000, 500_000_000, 750_000_000]
    assert len(times_s("constant(3)", 100)) == 300
    assert np.max(np.abs(np.diff(times_s("constant(3)", 100)) - 1 / 3)) <= 1e-9


def test_poisson_gaps_are_exponential() -> None:
    times = times_s("poisson(200)", 100)
    assert_drawn_from(np.diff(times, prepend=0), lambda gap: 1 - np.exp(-200 * gap))
    assert_count(len(times), 200 * 100)


def test_poisson_gaps_do_not_depend_on_the_gap_before() -> None:
    gaps = np.diff(times_s("poisson(200)", 100))
    # The lag-one correlation of independent gaps has a standard error of 1/sqrt(n).
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < Z / sqrt(len(gaps))


@pytest.mark.parametrize("text", ["poisson(200)", "ramp(200, 200)", "burst(200, 200, at=5, length=5)"])
def test_poisson_counts_per_second_are_as_dispersed_as_their_mean(text: str) -> None:
    counts = np.bincount(times_s(text, 200).astype(int), minlength=200)
    dispersion = np.var(counts, ddof=1) / np.mean(counts)
    # (n - 1) times the index of dispersion is chi-squared with n - 1 degrees: standard deviation sqrt(2 / (n - 1)).
    assert abs(dispersion - 1) < Z * sqrt(2 / (len(counts) - 1))


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("poisson(50)", 500.0),
        ("ramp(0, 100, over=10)", 500.0),
        ("burst(20, 80, at=1, length=5)", 500.0),
        ("gamma(50, shape=1)", 500.0),
    ],
)
def test_the_number_of_requests_is_left_to_chance(text: str, mean: float) -> None:
    """A generator that stretched its times to hit a count or a rate would give the same number with every seed."""
    counts = counts_of(text, 10, seeds=400)
    assert_mean(counts, mean)
    assert abs(np.var(counts, ddof=1) / mean - 1) < Z * sqrt(2 / (len(counts) - 1))


GAMMA_CDFS: dict[float, Callable[[Floats], Floats]] = {
    # Of the gap in units of scale = 1 / (rate shape).
    0.5: lambda x: _erf(np.sqrt(x)),
    1: lambda x: 1 - np.exp(-x),
    4: lambda x: 1 - np.exp(-x) * (1 + x + x**2 / 2 + x**3 / 6),
}


@pytest.mark.parametrize("shape", GAMMA_CDFS)
def test_gamma_gaps_have_the_shape_they_were_given(shape: float) -> None:
    gaps = np.diff(times_s(f"gamma(200, shape={shape})", 100), prepend=0)
    # Times are cut to whole nanoseconds, so a gap may seem up to 1 ns shorter: half of it is put back. For shape
    # 0.5, whose density is without bound at 0, 1 ns moves the distribution by sqrt(1e-9 * 100) = 0.0003.
    assert_drawn_from(gaps + 0.5e-9, lambda gap: GAMMA_CDFS[shape](gap * 200 * shape))


@pytest.mark.parametrize("shape", [0.1, 0.5, 1, 4])
def test_gamma_gaps_vary_by_one_over_the_root_of_their_shape(shape: float) -> None:
    gaps = np.diff(times_s(f"gamma(200, {shape})", 200), prepend=0)
    mean, centred = float(np.mean(gaps)), gaps - np.mean(gaps)
    second, third, fourth = (float(np.mean(centred**power)) for power in (2, 3, 4))
    cv = sqrt(second) / mean
    # The standard error of a coefficient of variation, to first order in those of mean and variance.
    variance = (fourth - second**2) / (4 * second**2) - third / (second * mean) + second / mean**2
    assert abs(cv - 1 / sqrt(shape)) < Z * cv * sqrt(variance / len(gaps))
    assert_mean(gaps, 1 / 200)


def ramp_area(t: Floats, first: float, last: float, over: float) -> Floats:
    """The integral of a ramp's rate from 0 to t."""
    inside = np.minimum(t, over)
    area: Floats = first * inside + (last - first) * inside**2 / (2 * over) + last * np.maximum(t - over, 0)
    return area


@pytest.mark.parametrize(
    ("first", "last", "over", "duration_s"),
    [(10, 400, 60, 60), (0, 400, 60, 60), (400, 0, 60, 80), (400, 100, 20, 60), (50, 400, 100, 60), (200, 200, 9, 60)],
)
def test_a_ramp_follows_its_integral(first: float, last: float, over: float, duration_s: float) -> None:
    times = times_s(f"ramp({first}, {last}, over={over})", duration_s)
    total = float(ramp_area(np.array(duration_s), first, last, over))
    assert_count(len(times), total)
    assert_drawn_from(times, lambda t: ramp_area(t, first, last, over) / total)
    for t in np.linspace(0, duration_s, 12)[1:]:
        assert_count(int(np.sum(times < t)), float(ramp_area(t, first, last, over)))


def test_a_ramp_without_a_time_takes_the_whole_run() -> None:
    assert times_s("ramp(1, 50)", 60).tolist() == times_s("ramp(1, 50, over=1m)", 60).tolist()
    assert times_s("ramp(1, 50)", 30).tolist() != times_s("ramp(1, 50, over=1m)", 30).tolist()


@dataclass(frozen=True)
class Phase:
    start_s: float
    end_s: float
    rate: float


BURSTS = {
    "burst(20, 400, at=10, length=5)": [Phase(0, 10, 20), Phase(10, 15, 400), Phase(15, 60, 20)],
    "burst(100, 400, at=0, length=5)": [Phase(0, 5, 400), Phase(5, 60, 100)],
    "burst(20, 400, at=50, length=20)": [Phase(0, 50, 20), Phase(50, 60, 400)],
    "burst(20, 400, at=70, length=20)": [Phase(0, 60, 20)],
    "burst(0, 300, at=10, length=5, every=20)": [
        *(Phase(start, start + 5, 300) for start in (10, 30, 50)),
        *(Phase(start, end, 0) for start, end in ((0, 10), (15, 30), (35, 50), (55, 60))),
    ],
    "burst(400, 20, at=0.1, length=0.1, every=0.1)": [Phase(0, 0.1, 400), Phase(0.1, 60, 20)],
}


@pytest.mark.parametrize("text", BURSTS)
def test_a_burst_has_its_rate_in_every_phase(text: str) -> None:
    times = times_s(text, 60)
    for phase in BURSTS[text]:
        inside = times[(times >= phase.start_s) & (times < phase.end_s)]
        length_s = phase.end_s - phase.start_s
        if phase.rate == 0:
            assert len(inside) == 0
            continue
        assert_count(len(inside), phase.rate * length_s)
        assert_drawn_from((inside - phase.start_s) / length_s, lambda share: share)


@pytest.mark.parametrize("text", OPEN_TEXTS)
def test_times_are_sorted_whole_nanoseconds_of_the_run(text: str) -> None:
    arrivals = parse_arrivals(text)
    assert not isinstance(arrivals, ClosedLoop)
    times = arrivals.times_ns(rng(), 6)
    assert times.dtype == np.int64
    assert np.all(np.diff(times) >= 0)
    assert times[0] >= 0
    # The last second is served too: all of these have a rate of 10/s or more in it.
    assert 5_000_000_000 < times[-1] < 6_000_000_000


@pytest.mark.parametrize("text", OPEN_TEXTS)
def test_the_same_seed_gives_the_same_times_and_another_seed_others(text: str) -> None:
    assert times_s(text, 6, seed=1).tolist() == times_s(text, 6, seed=1).tolist()
    if not text.startswith("constant"):
        assert times_s(text, 6, seed=1).tolist() != times_s(text, 6, seed=2).tolist()


@pytest.mark.parametrize("text", OPEN_TEXTS)
def test_a_longer_run_begins_as_a_shorter_one(text: str) -> None:
    long, short = times_s(text, 60), times_s(text, 6)
    assert long[long < 6].tolist() == short.tolist()


@pytest.mark.parametrize("seed", range(10))
def test_very_bursty_gaps_fill_the_run_however_often_they_are_drawn(seed: int) -> None:
    """Where gaps vary this much, a first draw of about as many as are expected often falls short of the run."""
    long, short = times_s("gamma(200, shape=0.02)", 60, seed), times_s("gamma(200, shape=0.02)", 5, seed)
    assert long[long < 5].tolist() == short.tolist()
    assert np.all(np.diff(long) >= 0)
    # 12,000 gaps: a standard deviation of sqrt(12,000 / 0.02) = 775 requests.
    assert abs(len(long) - 12_000) < 4 * 775


@pytest.mark.parametrize("text", OPEN_TEXTS)
def test_a_count_keeps_the_first_requests(text: str) -> None:
    counted = text.removesuffix(")") + ", count=17)"
    assert times_s(counted, 60).tolist() == times_s(text, 60)[:17].tolist()
    # A count that the run does not reach changes nothing.
    assert times_s(text.removesuffix(")") + ", count=1m)", 6).tolist() == times_s(text, 6).tolist()


@pytest.mark.parametrize("text", ["poisson(inf, count=1000)", "constant(inf, count=1k)", "gamma(inf, 0.5, count=1k)"])
def test_an_infinite_rate_sends_everything_at_once(text: str) -> None:
    assert times_s(text, 60).tolist() == [0] * 1000


def test_a_rate_near_zero_may_send_nothing() -> None:
    assert times_s("poisson(1e-9)", 60).tolist() == []
    assert times_s("burst(0, 5, at=100, length=1)", 60).tolist() == []


def test_a_closed_loop_has_users_and_no_times() -> None:
    assert parse_arrivals("closed(32)") == ClosedLoop(32, 0)
    assert parse_arrivals("closed(users=32, think=500ms)") == ClosedLoop(32, 0.5)


def test_a_trace_replays_its_own_times(tmp_path: Path) -> None:
    rows = [f'{{"at_s": {at}, "input_tokens": 10, "output_tokens": 2}}\n' for at in (0.5, 1, 4, 8)]
    (tmp_path / "own.jsonl").write_text("".join(rows))
    replay = parse_arrivals("trace(own.jsonl, speed=2)", folder=tmp_path)
    assert isinstance(replay, TraceReplay)
    assert replay.times_ns(rng(), 3).tolist() == [250_000_000, 500_000_000, 2_000_000_000]
    assert [row.input_tokens for row in replay.rows()] == [10] * 4


def test_a_trace_takes_options() -> None:
    text = (
        "trace('a b.csv', format=azure, speed=.5, start=1m, duration=10, "
        "limit=1k, max_input=8k, max_output=99, empty=keep)"
    )
    options = TraceOptions("azure", 0.5, 60, 10, 1000, 8000, 99, True)
    assert parse_arrivals(text) == TraceReplay(Path("a b.csv"), options)


def test_a_run_that_would_fill_the_memory_is_refused() -> None:
    arrivals = parse_arrivals("poisson(1m)")
    assert not isinstance(arrivals, ClosedLoop)
    with pytest.raises(ConfigError, match=r"about 6e\+07 requests are more than a run may hold \(20000000\)"):
        arrivals.times_ns(rng(), 60)
    # With a count it is a small run.
    assert len(times_s("poisson(1m, count=5)", 60)) == 5
    with pytest.raises(ConfigError, match="bursts are more than a run may hold"):
        times_s("burst(1, 2, at=0, length=1ms, every=1ms)", 1e7)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "poison(200)",
            "'poison' is none of poisson, constant, gamma, ramp, burst, closed, trace; did you mean 'poisson'?",
        ),
        ("200", "'200' is not of the form name(arguments): poisson, constant, gamma, ramp, burst, closed, trace"),
        ("poisson(0)", "poisson: rate is '0'; it must be a number above 0 up to 1000000, or inf"),
        ("poisson(inf)", "poisson: an infinite rate needs a count, such as count=1000"),
        ("gamma(10)", "gamma needs 'shape': gamma(rate, shape[, count=])"),
        ("gamma(10, burstiness=2)", "gamma has no argument 'burstiness'"),
        ("gamma(10, 0)", "gamma: shape is '0'; it must be a number from 0.01 up to 1000"),
        ("ramp(0, 0)", "ramp: from and to are both 0, so nothing is ever sent"),
        ("ramp(1, 50, over=0)", "ramp: over is '0'; it must be a duration in seconds from 0.001"),
        ("ramp(inf, 50)", "ramp: from is 'inf'; it must be a number from 0 up to 1000000"),
        ("burst(1, 2)", "burst needs 'at' and 'length': burst(base, peak, at=, length=[, every=][, count=])"),
        ("burst(1, 2, at=1, length=5, every=2)", "burst: every=2 is shorter than length=5, so bursts would overlap"),
        ("closed(0)", "closed: users is '0'; it must be a whole number from 1"),
        ("closed(1.5)", "closed: users is '1.5'; it must be a whole number from 1"),
        ("trace()", "trace needs 'file': trace(file[, format=]"),
        ("trace(a, format=azuer)", "trace: format is 'azuer'; did you mean 'azure'?: one of azure, mooncake, burstgpt"),
        ("trace(a, speed=0)", "trace: speed is '0'; it must be a number from 0.001 up to 1000000"),
    ],
)
def test_wrong_arrivals_are_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arrivals(text, where="--arrivals")
    assert str(caught.value).startswith(f"--arrivals: {problem}")


def test_every_form_has_a_line_of_help_and_an_example_that_is_one() -> None:
    for form in ARRIVAL_FORMS:
        assert form.signature.startswith(f"{form.name}(")
        assert form.summary
        assert parse_arrivals(form.example).describe().startswith(f"{form.name}(")


_rate = st.floats(0.001, 1e6) | st.integers(1, 10**6)
_zero_or_rate = st.just(0) | _rate
_seconds = st.floats(0.001, 100) | st.sampled_from(["20ms", "1m", "0.5h"])
_count = st.sampled_from(["", ", count=1", ", count=5k"])
_texts = st.one_of(
    st.builds("{}({}{})".format, st.sampled_from(["poisson", "constant"]), _rate, _count),
    st.builds("gamma({}, shape={}{})".format, _rate, st.floats(0.01, 1000), _count),
    st.builds("ramp({}, {}, over={}{})".format, _zero_or_rate, _zero_or_rate, _seconds, _count),
    st.builds("ramp({}, {}{})".format, _zero_or_rate, _zero_or_rate, _count),
    st.builds("burst({}, {}, at={}, length={}{})".format, _zero_or_rate, _rate, _seconds, _seconds, _count),
    st.builds("burst({}, {}, at=0, length=2ms, every={}{})".format, _zero_or_rate, _rate, _seconds, _count),
)


@given(_texts)
def test_described_arrivals_read_back_as_themselves_and_keep_their_promises(text: str) -> None:
    try:
        arrivals = parse_arrivals(text)
    except ConfigError:
        reject()
    again = parse_arrivals(arrivals.describe())
    assert again == arrivals
    assert again.describe() == arrivals.describe()
    assert not isinstance(arrivals, ClosedLoop)
    times = arrivals.times_ns(rng(), 0.01)
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < 10_000_000))
    # At most 10,000 are expected in 10 ms; a gamma of shape 0.01 may have many times as many.
    assert len(times) <= 1 or "count=1)" not in text


_options = st.builds(
    TraceOptions,
    st.sampled_from([None, "azure", "mooncake", "burstgpt", "bailian", "headrace"]),
    st.floats(0.001, 1e6),
    st.floats(0, 1e9),
    st.none() | st.floats(1e-9, 1e9),
    *([st.none() | st.integers(1, 20_000_000)] * 3),
    st.booleans(),
)


@given(st.text(min_size=1).filter(lambda name: name.isprintable()), _options)
def test_a_described_trace_reads_back_as_itself(name: str, options: TraceOptions) -> None:
    replay = TraceReplay(Path(name), options)
    assert parse_arrivals(replay.describe()) == replay


@given(st.integers(1, 10**6), st.floats(0, 1e6))
def test_a_described_closed_loop_reads_back_as_itself(users: int, think_s: float) -> None:
    assert parse_arrivals(ClosedLoop(users, think_s).describe()) == ClosedLoop(users, think_s)


_PARTS = ["(", ")", ",", "=", "'", '"', " ", "\x00", "\ud800", "/", ".", "s", "1", "512", "1e300", "-1", "inf", "nan"]
_NAMES = [*(form.name for form in ARRIVAL_FORMS), "rate", "count", "over", "at", "length", "every", "users", "format"]


@settings(max_examples=300)
@given(st.text() | st.builds("".join, st.lists(st.sampled_from(_NAMES + _PARTS), max_size=12)))
def test_any_text_gives_arrivals_or_a_config_error(text: str) -> None:
    try:
        arrivals = parse_arrivals(text)
    except ConfigError:
        return
    assert parse_arrivals(arrivals.describe()) == arrivals
