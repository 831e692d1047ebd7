"""Whether headrace is as much better than its peers as it set out to be: a row for each promise.

The figure is that of all rounds together; what it is compared with is the same figure of the rival that is best *in
that figure* (of llama-server with its defaults and with ``-b 256``), so no row rests on a rival that happened to do
badly in it. Only rounds that both sides ran are compared. Beside the ratio stands the ratio in each round, as median
and range: those of percentiles are the rounds' own, however small.

A p99 that too few answers support is no figure (``bench.statistics.quantiles``): the highest percentile that both
sides support stands in its place, and the row says which. Latencies are those of answered requests. A server that
answers fewer may look faster by that; each row says how many each side answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.harness import Spread
from benchmarks.peers.pool import Latency, Pool
from headrace.bench.report.units import NOTHING, show_number, show_seconds, show_share

Measured = Mapping[tuple[float, str, str], Mapping[int, Pool]]
"""(load, server, class of requests) -> round -> what happened."""

ALL = "all"
SHORT_CLASSES = ("short_generation", "dialogue")
LONG_CLASS = "long_document"
FULL_LOAD, OVERLOAD = 1.0, 1.5
ROUNDS = 3
"""Fewer than this are a look, not a proof."""
PROOF_PERCENTILES = ("p99", "p95", "p90", "p50")
NEARLY_ALL = 0.99
"""Where both sides answer this share, tokens/s are what was offered, not what the server is able to."""


@dataclass(frozen=True)
class Target:
    """What a ratio (headrace / rival) should be: at most or at least ``bound``, hopefully ``aim``."""

    bound: float
    aim: float | None = None
    at_most: bool = True

    def holds(self, ratio: float, bound: float) -> bool:
        return ratio <= bound if self.at_most else ratio >= bound


TTFT = Target(0.1, aim=0.04)
E2E = Target(0.15)
GOODPUT = Target(3.0, aim=5.0, at_most=False)
TOKENS = Target(1.0, aim=1.2, at_most=False)
LONG_MEAN = Target(1.3)
OWN_TOKENS = Target(2.9, at_most=False)
OWN_P99 = Target(0.6)
"""A P99 lower by 40 %, and 2.9 times the throughput, of our own simpler strategies."""


@dataclass(frozen=True)
class Verdict:
    """One promise. ``ours`` and ``theirs`` are in ``unit`` (s or /s) and None where there is no figure; ``rounds``
    are the ratios of the single rounds; ``stand_in`` names the percentile that stands for an unsupported p99."""

    load: float
    what: str
    against: str
    unit: str
    ours: float | None
    theirs: float | None
    target: Target
    rounds: tuple[float, ...] = ()
    stand_in: str | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return _ratio(self.ours, self.theirs)

    @property
    def met(self) -> bool | None:
        """None: there is no figure to say it by."""
        return None if self.ratio is None else self.target.holds(self.ratio, self.target.bound)

    @property
    def aim_met(self) -> bool | None:
        aim = self.target.aim
        return None if self.ratio is None or aim is None else self.target.holds(self.ratio, aim)

    @property
    def word(self) -> str:
        """The verdict in words."""
        if self.met is None:
            return "no figure"
        by = f" by {self.stand_in}" if self.stand_in else ""
        return ("aim met" if self.aim_met else "met" if self.met else "NOT met") + by

    def cells(self) -> list[str]:
        """For a table, as ``COLUMNS`` says."""
        show = show_seconds if self.unit == "s" else show_number
        sign = "<=" if self.target.at_most else ">="
        return [
            f"{self.load:.0%}",
            self.what,
            show(self.ours),
            self.against,
            show(self.theirs),
            _show_ratio(self.ratio),
            _show_rounds(self.rounds),
            f"{sign} {self.target.bound:g}",
            NOTHING if self.target.aim is None else f"{self.target.aim:g}",
            self.word,
            self.note,
        ]

    def plain(self) -> dict[str, object]:
        """For JSON. A ratio to nothing (0) has no number there: null, and ``met`` says what follows from it."""
        spread = Spread.of(self.rounds).plain() if self.rounds and all(map(math.isfinite, self.rounds)) else None
        return {
            "load": self.load,
            "what": self.what,
            "against": self.against,
            "unit": self.unit,
            "headrace": self.ours,
            "rival": self.theirs,
            "ratio": self.ratio if self.ratio is not None and math.isfinite(self.ratio) else None,
            "ratio_by_round": [ratio if math.isfinite(ratio) else None for ratio in self.rounds],
            "ratio_spread": spread,
            "target": self.target.bound,
            "aim": self.target.aim,
            "at_most": self.target.at_most,
            "percentile_in_place_of_p99": self.stand_in,
            "met": self.met,
            "aim_met": self.aim_met,
            "note": self.note,
        }


COLUMNS = [
    "load",
    "what",
    "headrace",
    "against",
    "its figure",
    "ratio",
    "by round",
    "target",
    "aim",
    "verdict",
    "note",
]


def verdicts(measured: Measured, *, subject: str, rivals: Sequence[str], simpler: Sequence[str] = ()) -> list[Verdict]:
    """Every promise that the measured loads and classes have figures for. ``subject`` is the server that made them,
    ``rivals`` are the peer's variants (the best one counts), ``simpler`` our own other strategies (each counts)."""
    loads = sorted({load for load, _, _ in measured})
    found: list[Verdict] = []
    for load in loads:
        sides = _Sides(measured, load, subject)
        found += _against_peer(sides, rivals)
        for name in simpler:
            found += _against_simpler(sides, name)
    return found


@dataclass(frozen=True)
class _Sides:
    """The measured pools at one load, ours and anybody's."""

    measured: Measured
    load: float
    subject: str

    def pair(self, rival: str, name: str) -> _Pair | None:
        """Both sides of one class over the rounds that both ran; None when there is none."""
        ours = self.measured.get((self.load, self.subject, name), {})
        theirs = self.measured.get((self.load, rival, name), {})
        common = sorted(ours.keys() & theirs.keys())
        if not common:
            return None
        return _Pair(self.load, name, rival, [ours[number] for number in common], [theirs[number] for number in common])

    def pairs(self, rivals: Sequence[str], name: str) -> list[_Pair]:
        return [pair for rival in rivals if (pair := self.pair(rival, name)) is not None]


Figure = Callable[[Pool], float | None]


class _Pair:
    """One class of requests at one load, ours and one rival's, round by round and together."""

    def __init__(self, load: float, name: str, rival: str, ours: Sequence[Pool], theirs: Sequence[Pool]) -> None:
        self.load = load
        self.name = name
        self.rival = rival
        self.ours = Pool.together(ours)
        self.theirs = Pool.together(theirs)
        self._rounds = list(zip(ours, theirs, strict=True))

    def by_round(self, figure: Figure) -> tuple[float, ...]:
        """The ratio in every round that has both figures."""
        ratios = [_ratio(figure(ours), figure(theirs)) for ours, theirs in self._rounds]
        return tuple([ratio for ratio in ratios if ratio is not None])

    def answered(self) -> str:
        """Who answered how much, for a row about answered requests."""
        return f"answered {show_share(self.ours.answered_share)}, the other {show_share(self.theirs.answered_share)}"

    def fates(self) -> str:
        """The same in counts, with what was shed."""
        return f"{_fates(self.ours)}; the other {_fates(self.theirs)}"


def _against_peer(sides: _Sides, rivals: Sequence[str]) -> Iterator[Verdict]:
    if sides.load == FULL_LOAD:
        for name in SHORT_CLASSES:
            yield from _percentile_rows(sides.pairs(rivals, name), "ttft_s", TTFT)
            yield from _percentile_rows(sides.pairs(rivals, name), "e2e_s", E2E)
    whole = sides.pairs(rivals, ALL)
    if sides.load == OVERLOAD:
        yield from _rate_rows(whole, "goodput", lambda pool: pool.goodput_rps, GOODPUT)
    yield from _rate_rows(whole, "total tokens/s", lambda pool: pool.tokens_per_s, TOKENS)
    yield from _long_rows(sides.pairs(rivals, LONG_CLASS))


def _against_simpler(sides: _Sides, rival: str) -> Iterator[Verdict]:
    yield from _rate_rows(sides.pairs([rival], ALL), "total tokens/s", lambda pool: pool.tokens_per_s, OWN_TOKENS)
    yield from _rate_rows(sides.pairs([rival], ALL), "goodput", lambda pool: pool.goodput_rps, OWN_TOKENS)
    for name in SHORT_CLASSES:
        yield from _percentile_rows(sides.pairs([rival], name), "ttft_s", OWN_P99)
        yield from _percentile_rows(sides.pairs([rival], name), "e2e_s", OWN_P99)


def _percentile_rows(pairs: Sequence[_Pair], latency: Latency, target: Target) -> Iterator[Verdict]:
    if not pairs:
        return
    what = f"{'TTFT' if latency == 'ttft_s' else 'E2E'} {{}}, {pairs[0].name}"
    for percentile in PROOF_PERCENTILES:
        supported = [pair for pair in pairs if pair.ours.supports(percentile) and pair.theirs.supports(percentile)]
        if supported:
            break
    else:
        yield _without_figure(pairs[0], what.format("p99"), target)
        return
    best = min(supported, key=lambda pair: pair.theirs.percentile_s(latency, percentile) or math.inf)
    left_out = [pair.rival for pair in pairs if pair not in supported]
    notes = [best.answered(), *[f"{rival} answered too few to compare" for rival in left_out]]
    if percentile != "p99":
        answered = min(best.ours.answered, best.theirs.answered)
        notes.insert(0, f"{answered} answers do not support a p99")
    yield Verdict(
        load=best.load,
        what=what.format(percentile),
        against=best.rival,
        unit="s",
        ours=best.ours.percentile_s(latency, percentile),
        theirs=best.theirs.percentile_s(latency, percentile),
        target=target,
        rounds=best.by_round(lambda pool: pool.observed_s(latency, percentile)),
        stand_in=None if percentile == "p99" else percentile,
        note="; ".join(notes),
    )


def _rate_rows(pairs: Sequence[_Pair], what: str, figure: Figure, target: Target) -> Iterator[Verdict]:
    if not pairs:
        return
    best = max(pairs, key=lambda pair: figure(pair.theirs) or 0.0)
    all_answered = all((pool.answered_share or 0.0) >= NEARLY_ALL for pool in (best.ours, best.theirs))
    yield Verdict(
        load=best.load,
        what=what,
        against=best.rival,
        unit="/s",
        ours=figure(best.ours),
        theirs=figure(best.theirs),
        target=target,
        rounds=best.by_round(figure),
        note="both answered what was offered: no more was asked for" if all_answered else best.answered(),
    )


def _long_rows(pairs: Sequence[_Pair]) -> Iterator[Verdict]:
    if not pairs:
        return
    what = f"E2E mean, {LONG_CLASS}"
    answered = [pair for pair in pairs if pair.theirs.answered]
    if not answered:
        yield _without_figure(pairs[0], what, LONG_MEAN)
        return
    best = min(answered, key=lambda pair: pair.theirs.e2e_mean_s or math.inf)
    yield Verdict(
        load=best.load,
        what=what,
        against=best.rival,
        unit="s",
        ours=best.ours.e2e_mean_s,
        theirs=best.theirs.e2e_mean_s,
        target=LONG_MEAN,
        rounds=best.by_round(lambda pool: pool.e2e_mean_s),
        note=best.fates(),
    )


def _without_figure(pair: _Pair, what: str, target: Target) -> Verdict:
    return Verdict(pair.load, what, pair.rival, "s", None, None, target, note=pair.fates())


def _fates(pool: Pool) -> str:
    return f"answered {pool.answered} of {pool.offered}, shed {pool.shed}"


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    """Infinite where the rival has nothing (0) and we have something; None where neither has."""
    if ours is None or theirs is None or ours == theirs == 0:
        return None
    return math.inf if theirs == 0 else ours / theirs


def _show_ratio(ratio: float | None) -> str:
    if ratio is None:
        return NOTHING
    return "∞" if math.isinf(ratio) else f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.2f}"


def _show_rounds(ratios: Sequence[float]) -> str:
    if not ratios:
        return NOTHING
    spread = Spread.of(ratios)
    return f"{_show_ratio(spread.median)} ({_show_ratio(spread.low)} to {_show_ratio(spread.high)})"
