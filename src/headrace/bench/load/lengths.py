"""Input and output lengths in tokens, from texts such as ``uniform(512, 16k)``.

Every length is a whole number of at least 1. Lengths outside ``min=`` and ``max=`` become the bound (``normal``
draws again instead). ``LENGTH_FORMS`` lists the forms.

Lognormal: X = exp(mu + sigma Z) with Z standard normal, rounded to the nearest whole number. Its median is
exp(mu), its mean exp(mu + sigma^2 / 2), its 99th percentile exp(mu + z sigma) with z = 2.3263. So

- mean, sigma: mu = ln mean - sigma^2 / 2
- median, sigma: mu = ln median
- median, p99: sigma = ln(p99 / median) / z
- mean, p99: sigma = z - sqrt(z^2 - 2 L) with L = ln(p99 / mean), the smaller root of sigma^2 / 2 - z sigma + L;
  there is one up to L = z^2 / 2, a p99 of 14.968 times the mean

The figures given describe the distribution before rounding and bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erf, exp, log, pi, sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.bench.load.distribution_forms import Arguments, Form, Param, read_arguments
from headrace.bench.load.distribution_text import call_text
from headrace.bench.load.empirical_lengths import empirical
from headrace.bench.load.length_model import MAX_LENGTH_TOKENS, UNBOUNDED, Bounds
from headrace.bench.load.length_model import Lengths as Lengths

Z_99 = 2.3263478740408408
"""The standard normal's 99th percentile."""
_LEAST_SHARE_INSIDE = 0.01
"""A normal with less than this inside its bounds is refused: it would not look like what was asked for."""

_BOUNDS = (
    Param("min", "whole", named=True, least=1, most=MAX_LENGTH_TOKENS),
    Param("max", "whole", named=True, least=1, most=MAX_LENGTH_TOKENS),
)


def _tokens(name: str) -> Param:
    return Param(name, "whole", required=True, least=1, most=MAX_LENGTH_TOKENS)


def _figure(name: str) -> Param:
    """A figure in tokens that is given by name."""
    return Param(name, "number", named=True, least=1, most=MAX_LENGTH_TOKENS)


LENGTH_FORMS = (
    Form("uniform", (_tokens("from"), _tokens("to"), *_BOUNDS), "every length in from..to", "uniform(512, 16384)"),
    Form("fixed", (_tokens("tokens"), *_BOUNDS), "always the same; a bare number means this", "fixed(512)"),
    Form(
        "normal",
        (
            Param("mean", "number", required=True, least=1, most=MAX_LENGTH_TOKENS),
            Param("std", "number", required=True, least=0.001, most=MAX_LENGTH_TOKENS),
            *_BOUNDS,
        ),
        "normal, rounded; lengths below 1 or outside min..max are drawn again",
        "normal(512, 128, max=2048)",
    ),
    Form(
        "lognormal",
        (
            _figure("mean"),
            _figure("median"),
            Param("sigma", "number", named=True, least=0.001, most=10),
            _figure("p99"),
            *_BOUNDS,
        ),
        "lognormal, rounded; by mean or median, and sigma (of the logarithm) or p99",
        "lognormal(mean=200, p99=2000)",
    ),
    Form(
        "empirical",
        (Param("file", "text", required=True), Param("column", "text"), *_BOUNDS),
        "from a file: a number a line, a CSV column, a JSON list or [[tokens, cumulative fraction], ...]; input and "
        "output from one file are drawn row by row together",
        "empirical(lengths.csv, column=input_tokens)",
    ),
)
"""What ``parse_lengths`` accepts; ``signature`` and ``summary`` are for ``--help`` and the docs."""


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Always ``tokens``, clamped."""

    tokens: int
    bounds: Bounds = UNBOUNDED

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return self.bounds.clamp(np.full(count, self.tokens, dtype=np.int64))

    def mean(self) -> float:
        return self.bounds.mean_of_uniform(self.tokens, self.tokens)

    def describe(self) -> str:
        return call_text("fixed", self.tokens, min=self.bounds.low, max=self.bounds.high)


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Every whole number in ``first..last``, both ends included, as likely as any other; then clamped."""

    first: int
    last: int
    bounds: Bounds = UNBOUNDED

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return self.bounds.clamp(rng.integers(self.first, self.last, size=count, endpoint=True))

    def mean(self) -> float:
        return self.bounds.mean_of_uniform(self.first, self.last)

    def describe(self) -> str:
        return call_text("uniform", self.first, self.last, min=self.bounds.low, max=self.bounds.high)


@dataclass(frozen=True, slots=True)
class NormalLengths:
    """A normal of this mean and standard deviation, rounded, given that it lies within the bounds: draws outside
    are drawn again, so no length piles up at a bound."""

    mean_tokens: float
    std_tokens: float
    bounds: Bounds = UNBOUNDED

    @property
    def share_inside(self) -> float:
        """The share of the normal that rounds to a length within the bounds."""
        low, high = self._edges()
        return _phi(high) - _phi(low)

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        lengths = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            wanted = int((count - filled) / self.share_inside * 1.05) + 16
            drawn = np.rint(rng.normal(self.mean_tokens, self.std_tokens, size=wanted))
            inside = drawn[(drawn >= self.bounds.least) & (drawn <= self.bounds.most)][: count - filled]
            lengths[filled : filled + len(inside)] = inside
            filled += len(inside)
        return lengths

    def mean(self) -> float:
        # The mean of a truncated normal: mu + sigma (density(low) - density(high)) / share inside.
        low, high = self._edges()
        return self.mean_tokens + self.std_tokens * (_density(low) - _density(high)) / self.share_inside

    def describe(self) -> str:
        bounds = self.bounds
        return call_text("normal", self.mean_tokens, self.std_tokens, min=bounds.low, max=bounds.high)

    def _edges(self) -> tuple[float, float]:
        """The bounds in standard deviations from the mean, half a token further out: what rounds to them."""
        low = (self.bounds.least - 0.5 - self.mean_tokens) / self.std_tokens
        return low, (self.bounds.most + 0.5 - self.mean_tokens) / self.std_tokens


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """A lognormal by two figures (see the module for the formulas), rounded and clamped. Exactly one of
    ``mean_tokens`` and ``median_tokens`` and one of ``log_sigma`` and ``p99_tokens`` is set."""

    mean_tokens: float | None = None
    median_tokens: float | None = None
    log_sigma: float | None = None
    p99_tokens: float | None = None
    bounds: Bounds = UNBOUNDED

    @property
    def sigma(self) -> float:
        """The standard deviation of the logarithm."""
        if self.log_sigma is not None:
            return self.log_sigma
        assert self.p99_tokens is not None
        if self.median_tokens is not None:
            return log(self.p99_tokens / self.median_tokens) / Z_99
        assert self.mean_tokens is not None
        ratio = log(self.p99_tokens / self.mean_tokens)
        # The module's root, multiplied out: no difference of two near numbers when p99 is close to the mean.
        return 2 * ratio / (Z_99 + sqrt(max(Z_99**2 - 2 * ratio, 0.0)))

    @property
    def mu(self) -> float:
        """The mean of the logarithm."""
        if self.median_tokens is not None:
            return log(self.median_tokens)
        assert self.mean_tokens is not None
        return log(self.mean_tokens) - self.sigma**2 / 2

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        logarithms = rng.normal(self.mu, self.sigma, size=count)
        highest = log(self.bounds.most + 1.0)  # cut here, before exp can overflow; the clamp below is the bound
        lengths = np.rint(np.exp(np.minimum(logarithms, highest))).astype(np.int64)
        return self.bounds.clamp(lengths)

    def mean(self) -> float:
        # E[clamp(X, a, b)] = a P(X < a) + b P(X > b) + E[X; a <= X <= b]; the last term is the mean times the
        # same normal shares shifted by sigma.
        mu, sigma = self.mu, self.sigma
        low = (log(self.bounds.least) - mu) / sigma
        high = (log(self.bounds.most) - mu) / sigma
        inside = exp(mu + sigma**2 / 2) * (_phi(high - sigma) - _phi(low - sigma))
        return self.bounds.least * _phi(low) + self.bounds.most * _phi(-high) + inside

    def describe(self) -> str:
        return call_text(
            "lognormal",
            mean=self.mean_tokens,
            median=self.median_tokens,
            sigma=self.log_sigma,
            p99=self.p99_tokens,
            min=self.bounds.low,
            max=self.bounds.high,
        )


def parse_lengths(text: str, *, folder: Path | None = None, where: str = "") -> Lengths:
    """The distribution that ``text`` names (``LENGTH_FORMS``); a bare number is a fixed length.

    ``folder`` is what a relative file name is relative to (the working directory when it is None). ``where`` says
    in an error where the text stood. Raises ConfigError.
    """
    arguments = read_arguments(text, LENGTH_FORMS, bare_form="fixed", where=where)
    bounds = Bounds(arguments.optional_whole("min"), arguments.optional_whole("max"))
    if bounds.least > bounds.most:
        raise arguments.error(f"min={bounds.low} is above max={bounds.high}")
    match arguments.form.name:
        case "fixed":
            return FixedLengths(arguments.whole("tokens"), bounds)
        case "uniform":
            return _uniform(arguments, bounds)
        case "normal":
            return _normal(arguments, bounds)
        case "lognormal":
            return _lognormal(arguments, bounds)
        case _:
            path = Path(arguments.text("file"))
            return empirical(path if folder is None else folder / path, arguments.optional_text("column"), bounds)


def _uniform(arguments: Arguments, bounds: Bounds) -> UniformLengths:
    first, last = arguments.whole("from"), arguments.whole("to")
    if first > last:
        raise arguments.error(f"from={first} is above to={last}")
    return UniformLengths(first, last, bounds)


def _normal(arguments: Arguments, bounds: Bounds) -> NormalLengths:
    lengths = NormalLengths(arguments.number("mean"), arguments.number("std"), bounds)
    if lengths.share_inside < _LEAST_SHARE_INSIDE:
        raise arguments.error(
            f"only {lengths.share_inside:.2%} of it lies in {bounds.least}..{bounds.most} tokens "
            f"(at least {_LEAST_SHARE_INSIDE:.0%} must)"
        )
    return lengths


def _lognormal(arguments: Arguments, bounds: Bounds) -> LognormalLengths:
    mean, median = arguments.optional_number("mean"), arguments.optional_number("median")
    sigma, p99 = arguments.optional_number("sigma"), arguments.optional_number("p99")
    if (mean is None) == (median is None):
        raise arguments.error("give one of mean and median")
    if (sigma is None) == (p99 is None):
        raise arguments.error("give one of sigma and p99")
    if p99 is not None:
        middle, name = (median, "median") if median is not None else (mean, "mean")
        assert middle is not None
        if p99 <= middle:
            raise arguments.error(f"p99 must be above the {name}")
        if mean is not None and p99 >= mean * exp(Z_99**2 / 2):
            raise arguments.error(
                "no lognormal has a p99 of 14.968 times its mean or more; raise the mean, or give the median"
            )
    return LognormalLengths(mean, median, sigma, p99, bounds)


def _phi(z: float) -> float:
    """The standard normal's cumulative distribution."""
    return (1 + erf(z / sqrt(2))) / 2


def _density(z: float) -> float:
    """The standard normal's density."""
    return exp(-z * z / 2) / sqrt(2 * pi)
