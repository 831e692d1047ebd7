"""The random processes behind open arrivals: a rate over time in, offsets from the run's start out.

Every ``times_ns(rng, duration_s)`` gives the sorted offsets, in nanoseconds, of the arrivals in [0, duration), at
most ``count`` of them when that is set; ``duration_s`` is above 0. The same generator state gives the same times,
and a longer run begins with the times of a shorter one (a ramp without ``over_s`` excepted: its slope is the
run's). All raise ConfigError when a run would hold more than ``MAX_ARRIVALS``.

Changing rates are inhomogeneous Poisson processes, by inversion: with L(t) the integral of the rate from 0 to t,
the arrivals of a Poisson process of rate 1 at u1, u2, ... lie at L^-1(u1), L^-1(u2), ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from headrace.bench.load.distribution_text import call_text
from headrace.errors import ConfigError

MAX_ARRIVALS = 20_000_000
"""More are refused before they fill the memory."""

MAX_BURSTS = 1_000_000

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Constant:
    """Request i is sent at i / rate: the first one at once. An infinite rate sends ``count`` at once."""

    rate_per_s: float
    count: int | None = None

    def times_ns(self, rng: np.random.Generator, duration_s: float) -> NDArray[np.int64]:
        """``rng`` is not used."""
        expected = _expected(self.rate_per_s * duration_s, self.count)
        if self.rate_per_s == inf:
            return np.zeros(expected, dtype=np.int64)
        return _cut(np.arange(expected + 1) / self.rate_per_s, duration_s, self.count)

    def describe(self) -> str:
        return call_text("constant", self.rate_per_s, count=self.count)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Exponential gaps: arrivals independent of each other. An infinite rate sends ``count`` at once."""

    rate_per_s: float
    count: int | None = None

    def times_ns(self, rng: np.random.Generator, duration_s: float) -> NDArray[np.int64]:
        expected = _expected(self.rate_per_s * duration_s, self.count)
        if self.rate_per_s == inf:
            return np.zeros(expected, dtype=np.int64)
        units = _unit_renewals(rng.standard_exponential, self.rate_per_s * duration_s, self.count)
        return _cut(units / self.rate_per_s, duration_s, self.count)

    def describe(self) -> str:
        return call_text("poisson", self.rate_per_s, count=self.count)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps from a gamma distribution with this mean rate, the first one from the run's start; their coefficient
    of variation is 1/sqrt(shape). An infinite rate sends ``count`` at once."""

    rate_per_s: float
    shape: float
    count: int | None = None

    def times_ns(self, rng: np.random.Generator, duration_s: float) -> NDArray[np.int64]:
        expected = _expected(self.rate_per_s * duration_s, self.count)
        if self.rate_per_s == inf:
            return np.zeros(expected, dtype=np.int64)

        def gaps(count: int) -> Seconds:
            return rng.gamma(self.shape, 1 / self.shape, size=count)

        units = _unit_renewals(gaps, self.rate_per_s * duration_s, self.count)
        return _cut(units / self.rate_per_s, duration_s, self.count)

    def describe(self) -> str:
        return call_text("gamma", self.rate_per_s, shape=self.shape, count=self.count)


@dataclass(frozen=True, slots=True)
class Ramp:
    """A Poisson process whose rate goes linearly from ``from_per_s`` to ``to_per_s`` over ``over_s`` seconds (None:
    the whole run) and stays there."""

    from_per_s: float
    to_per_s: float
    over_s: float | None = None
    count: int | None = None

    def times_ns(self, rng: np.random.Generator, duration_s: float) -> NDArray[np.int64]:
        over_s = duration_s if self.over_s is None else self.over_s
        slope = (self.to_per_s - self.from_per_s) / over_s
        ramped_s = min(over_s, duration_s)
        ramped = ramped_s * (self.from_per_s + slope * ramped_s / 2)
        area = ramped + (duration_s - ramped_s) * self.to_per_s
        _expected(area, self.count)
        units = _unit_renewals(rng.standard_exponential, area, self.count)
        rising, steady = units[units < ramped], units[units >= ramped]
        # L(t) = from t + slope t^2 / 2, solved for t; in this form nothing cancels and a slope of 0 divides well.
        root = np.sqrt(np.maximum(self.from_per_s**2 + 2 * slope * rising, 0.0))
        denominator = self.from_per_s + root
        times = np.divide(2 * rising, denominator, out=np.zeros_like(rising), where=denominator > 0)
        if len(steady):
            times = np.concatenate((times, ramped_s + (steady - ramped) / self.to_per_s))
        return _cut(times, duration_s, self.count)

    def describe(self) -> str:
        return call_text("ramp", self.from_per_s, self.to_per_s, over=self.over_s, count=self.count)


@dataclass(frozen=True, slots=True)
class Burst:
    """A Poisson process at ``base_per_s``, and at ``peak_per_s`` for ``length_s`` from second ``at_s`` on; with
    ``every_s`` set, again each time that it has passed."""

    base_per_s: float
    peak_per_s: float
    at_s: float
    length_s: float
    every_s: float | None = None
    count: int | None = None

    def times_ns(self, rng: np.random.Generator, duration_s: float) -> NDArray[np.int64]:
        starts_s, lengths_s, rates = self._phases(duration_s)
        areas = lengths_s * rates
        ends = np.cumsum(areas)
        area = float(ends[-1]) if len(ends) else 0.0
        _expected(area, self.count)
        units = _unit_renewals(rng.standard_exponential, area, self.count)
        phase = np.searchsorted(ends, units, side="right")
        times = starts_s[phase] + (units - (ends - areas)[phase]) / rates[phase]
        return _cut(times, duration_s, self.count)

    def describe(self) -> str:
        return call_text(
            "burst",
            self.base_per_s,
            self.peak_per_s,
            at=self.at_s,
            length=self.length_s,
            every=self.every_s,
            count=self.count,
        )

    def _phases(self, duration_s: float) -> tuple[Seconds, Seconds, Seconds]:
        """Start, length and rate of every stretch of constant rate in the run in which anything is sent."""
        bursts = 0
        if duration_s > self.at_s:
            bursts = 1 if self.every_s is None else ceil((duration_s - self.at_s) / self.every_s)
        if bursts > MAX_BURSTS:
            raise ConfigError(f"{bursts} bursts are more than a run may hold ({MAX_BURSTS}); make every= longer")
        at_s = self.at_s + np.arange(bursts) * (self.every_s or 0.0)
        inner = np.stack((at_s, at_s + self.length_s), axis=1).ravel()
        edges = np.concatenate((np.zeros(1), inner, np.full(1, duration_s)))
        # Bursts that touch may overlap by a rounding error, and the last one may outlast the run.
        edges = np.minimum(np.maximum.accumulate(edges), duration_s)
        rates = np.full(len(edges) - 1, self.base_per_s)
        rates[1::2] = self.peak_per_s
        lengths_s = np.diff(edges)
        sent = (lengths_s > 0) & (rates > 0)
        return edges[:-1][sent], lengths_s[sent], rates[sent]


def _expected(area: float, count: int | None) -> int:
    """About how many arrivals there will be, rounded up."""
    wanted = area if count is None else min(area, count)
    if wanted > MAX_ARRIVALS:
        raise ConfigError(
            f"about {wanted:.3g} requests are more than a run may hold ({MAX_ARRIVALS}); "
            "lower the rate or the duration, or give a count"
        )
    return ceil(wanted)


def _unit_renewals(gaps: Callable[[int], Seconds], area: float, count: int | None) -> Seconds:
    """Sums of gaps of mean 1 below ``area``; no more than ``count``."""
    drawn: list[Seconds] = []
    held, reached = 0, 0.0
    while reached < area and (count is None or held < count):
        wanted = int((area - reached) * 1.01) + 64
        chunk = gaps(wanted if count is None else min(wanted, count - held))
        drawn.append(chunk)
        held += len(chunk)
        reached += float(np.sum(chunk))
    if not drawn:
        return np.zeros(0)
    # One running sum over all of them, so that the sums do not depend on where the chunks were cut.
    sums = np.cumsum(np.concatenate(drawn))
    return sums[sums < area]


def _cut(times_s: Seconds, duration_s: float, count: int | None) -> NDArray[np.int64]:
    """Whole nanoseconds, before the run's end, at most ``count``."""
    times = np.floor(times_s * 1e9).astype(np.int64)
    return times[times < round(duration_s * 1e9)][:count]
