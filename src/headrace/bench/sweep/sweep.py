"""The search for the highest rate that holds the SLO: measurements so far in, the next one out.

**Holds, fails, undecided.** At a rate, every lane has good and offered requests, pooled over the rate's trials.
The rate *holds* when the lower end of every lane's Wilson interval reaches the target share, it *fails* when
some lane's upper end is below it, and is *undecided* between. An undecided rate is measured again, each time
twice as long, up to ``trials`` times; if it is undecided still, it does not count as holding. Looking several
times would loosen the confidence, so each look's interval has the level 1 - (1 - confidence) / looks
(Bonferroni): the stated confidence is that of one rate's verdict over all its looks. It takes requests as
independent; near saturation they are not quite, so give every trial time for many busy periods.

**Search.** From ``start_rps`` doubled while it holds, or halved while it does not, until two neighbouring
rates enclose the limit; then the geometric mean of the two, until they are within ``tolerance``. The answer is
measured ``confirmations`` times more, because a rate that was chosen for having held was perhaps lucky; should it
not hold with that, the search goes on below it.

**The answer** is the highest holding rate below every rate that did not hold. A higher rate that held, and a
lane whose attainment is better at a higher rate beyond noise, contradict the idea of one limit: ``notes`` say so.

**Too few requests.** No fewer than z^2 * target / (1 - target) requests can show a target, all of them good: 618
in every lane for 99 %. Where the lowest rate's trials cannot bring as many, the search ends and says so.

A trial in which the generator was late says nothing about the server: it counts for nothing and is repeated
like an undecided one. A rate at which every trial is such is the generator's limit, and the result says it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from headrace.bench.records import RequestRecord, RunInfo
from headrace.bench.report.units import show_number, show_percent, show_share
from headrace.bench.results.figures import Limits, Summary
from headrace.bench.results.summary import summarise
from headrace.bench.statistics.intervals import Interval, Share, newcombe, two_sided_z, wilson
from headrace.bench.sweep.sweep_result import LaneTrial, RatePoint, SweepResult, SweepSettings, Trial, Verdict
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NextTrial:
    """What to measure next."""

    rate_rps: float
    duration_s: float


Measure = Callable[[int, NextTrial], tuple[RunInfo, Iterable[RequestRecord]]]
"""Measures the trial with this number (from 0) and returns what happened."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Why the search is over."""

    reason: Literal[
        "found",
        "holds_at_highest",
        "nothing_holds",
        "generator_limit",
        "too_few_requests",
        "out_of_trials",
        "interrupted",
    ]


def check_settings(settings: SweepSettings) -> None:
    """Raises ConfigError for settings under which the search cannot work."""
    rules = (
        ("target", 0 < settings.target < 1, "must lie between 0 and 1"),
        ("confidence", 0 < settings.confidence < 1, "must lie between 0 and 1"),
        ("tolerance", settings.tolerance > 0, "must be above 0"),
        ("trials", settings.trials >= 1, "must be at least 1"),
        ("confirmations", settings.confirmations >= 0, "must not be negative"),
        ("duration_s", settings.duration_s > 0, "must be above 0"),
        ("lowest_rps", settings.lowest_rps > 0, "must be above 0"),
        (
            "start_rps",
            settings.lowest_rps <= settings.start_rps <= settings.highest_rps,
            f"must lie between lowest_rps ({settings.lowest_rps:g}) and highest_rps ({settings.highest_rps:g})",
        ),
    )
    for name, holds, message in rules:
        if not holds:
            raise ConfigError(f"{message}, not at {getattr(settings, name):g}", where=f"sweep.{name}")


def next_step(trials: Sequence[Trial], settings: SweepSettings) -> NextTrial | Finished:
    """The next measurement, or the end. Pure: the same trials give the same step."""
    points = points_of(trials, settings)
    if not points:
        return NextTrial(settings.start_rps, settings.duration_s)
    if len(trials) >= settings.most_trials:
        return Finished("out_of_trials")
    for point in points:
        if point.verdict in ("undecided", "invalid") and point.trials < settings.trials:
            if _short_lane(point, settings) is not None and point.rate_rps == points[0].rate_rps:
                return Finished("too_few_requests")  # a lower rate would have still fewer
            return NextTrial(point.rate_rps, settings.duration_s * 2**point.trials)
    below, above = bracket(points)
    if above is None:
        assert below is not None
        if below.rate_rps >= settings.highest_rps:
            return _confirmed(below, settings) or Finished("holds_at_highest")
        return NextTrial(min(below.rate_rps * 2, settings.highest_rps), settings.duration_s)
    if below is None:
        if above.rate_rps <= settings.lowest_rps:
            return Finished("generator_limit" if above.verdict == "invalid" else "nothing_holds")
        return NextTrial(max(above.rate_rps / 2, settings.lowest_rps), settings.duration_s)
    middle = _between(below.rate_rps, above.rate_rps)
    if above.rate_rps / below.rate_rps <= 1 + settings.tolerance or not below.rate_rps < middle < above.rate_rps:
        done = Finished("generator_limit" if above.verdict == "invalid" else "found")
        return _confirmed(below, settings) or done
    return NextTrial(middle, settings.duration_s)


def bracket(points: Sequence[RatePoint]) -> tuple[RatePoint | None, RatePoint | None]:
    """The highest holding rate below every one that does not hold, and the lowest one that does not."""
    above = next((point for point in points if point.verdict != "holds"), None)
    holding = [
        point for point in points if point.verdict == "holds" and (above is None or point.rate_rps < above.rate_rps)
    ]
    return (holding[-1] if holding else None), above


def points_of(trials: Sequence[Trial], settings: SweepSettings) -> list[RatePoint]:
    """The trials pooled by rate, ascending, each rate with its verdict."""
    return [
        _point(rate, [trial for trial in trials if trial.rate_rps == rate], settings)
        for rate in sorted({trial.rate_rps for trial in trials})
    ]


def trial_of(rate_rps: float, duration_s: float, summary: Summary) -> Trial:
    """What the search needs of one measurement's summary."""
    lanes = {}
    for group in summary.lanes:
        ttft, e2e = (group.latencies[name].percentiles["p99"] for name in ("ttft_s", "e2e_s"))
        lanes[group.name] = LaneTrial(
            good=group.good,
            offered=group.offered,
            ttft_p99_s=None if ttft is None else ttft.value,
            e2e_p99_s=None if e2e is None else e2e.value,
        )
    return Trial(
        rate_rps=rate_rps,
        duration_s=duration_s,
        lanes=lanes,
        goodput_rps=summary.whole.goodput_rps,
        output_tokens_per_s=summary.whole.output_tokens_per_s,
        simulated=summary.run.simulated,
        invalid=summary.invalid,
    )


def sweep(
    measure: Measure,
    settings: SweepSettings,
    *,
    limits: Limits | None = None,
    on_trial: Callable[[Trial], None] | None = None,
) -> SweepResult | None:
    """Search with real measurements, one after the other. ``on_trial`` hears of each one.

    An interruption, a run that was interrupted or Ctrl-C between two, ends the search with the trials that were whole;
    None when there is none. Raises ConfigError for settings under which the search cannot work, and what ``measure``
    and ``on_trial`` raise.
    """
    check_settings(settings)
    trials: list[Trial] = []
    while isinstance(step := next_step(trials, settings), NextTrial):
        try:
            info, records = measure(len(trials), step)
        except KeyboardInterrupt:
            info, records = None, ()
        if info is None or info.interrupted:
            return result_of(trials, settings, Finished("interrupted")) if trials else None
        trials.append(trial_of(step.rate_rps, step.duration_s, summarise(info, records, limits)))
        if on_trial is not None:
            on_trial(trials[-1])
    return result_of(trials, settings, step)


def result_of(trials: Sequence[Trial], settings: SweepSettings, end: Finished) -> SweepResult:
    """The result of a search that ended with ``end``, after one trial or more."""
    points = points_of(trials, settings)
    below, above = bracket(points)
    return SweepResult(
        settings=settings,
        answer_rps=None if below is None else below.rate_rps,
        first_not_holding_rps=None if above is None else above.rate_rps,
        reason=end.reason,
        finding=_finding(below, above, settings, end),
        notes=_contradictions(points, settings) + _warnings(trials),
        points=points,
        trials=list(trials),
    )


def _point(rate_rps: float, trials: Sequence[Trial], settings: SweepSettings) -> RatePoint:
    valid = [trial for trial in trials if not trial.invalid]
    names = sorted({name for trial in valid for name in trial.lanes})
    pooled = {name: _pooled([trial.lanes[name] for trial in valid if name in trial.lanes]) for name in names}
    intervals = {name: wilson(lane.good, lane.offered, settings.z) for name, lane in pooled.items() if lane.offered > 0}
    return RatePoint(
        rate_rps=rate_rps,
        trials=len(trials),
        valid_trials=len(valid),
        verdict=_verdict(intervals, settings.target) if valid else "invalid",
        lanes=pooled,
        lows={name: interval.low for name, interval in intervals.items()},
        highs={name: interval.high for name, interval in intervals.items()},
        goodput_rps=sum([trial.goodput_rps for trial in valid]) / len(valid) if valid else None,
        output_tokens_per_s=sum([trial.output_tokens_per_s for trial in valid]) / len(valid) if valid else None,
    )


def _verdict(intervals: dict[str, Interval], target: float) -> Verdict:
    if any(interval.high < target for interval in intervals.values()):
        return "fails"
    if intervals and all(interval.low >= target for interval in intervals.values()):
        return "holds"
    return "undecided"


def _pooled(lanes: Sequence[LaneTrial]) -> LaneTrial:
    """Counts added; the latencies of the longest trial, which is the last one: percentiles cannot be pooled."""
    return LaneTrial(
        good=sum([lane.good for lane in lanes]),
        offered=sum([lane.offered for lane in lanes]),
        ttft_p99_s=lanes[-1].ttft_p99_s,
        e2e_p99_s=lanes[-1].e2e_p99_s,
    )


def _short_lane(point: RatePoint, settings: SweepSettings) -> str | None:
    """A lane that will have too few requests to be shown to hold, even after all the trials that a rate may have."""
    growth = (2**settings.trials - 1) / (2**point.trials - 1)
    short = [name for name in point.lows if point.lanes[name].offered * growth < settings.fewest_requests]
    return min(short, key=lambda name: point.lanes[name].offered, default=None)


def _confirmed(point: RatePoint, settings: SweepSettings) -> NextTrial | None:
    """One more trial of the answer, while it has had none since it was found."""
    if point.valid_trials > settings.confirmations or point.trials >= settings.looks:
        return None
    return NextTrial(point.rate_rps, settings.duration_s)


def _between(low: float, high: float) -> float:
    """The geometric mean, with four digits where these still lie between the two."""
    middle = math.sqrt(low * high)
    short = float(f"{middle:.4g}")
    return short if low < short < high else middle


def _finding(below: RatePoint | None, above: RatePoint | None, settings: SweepSettings, end: Finished) -> str:
    text = _found(below, above, settings, end)
    return f"{text} The search was interrupted." if end.reason == "interrupted" else text


def _found(below: RatePoint | None, above: RatePoint | None, settings: SweepSettings, end: Finished) -> str:
    slo = f"{show_percent(settings.target)} of every lane's requests within their SLO"
    sure = f"confidence {show_percent(settings.confidence)}"
    if below is None:
        assert above is not None
        lane = _short_lane(above, settings) if end.reason == "too_few_requests" else None
        if lane is not None:
            return (
                f"{show_number(above.rate_rps)} requests/s cannot be decided: lane {lane!r} had "
                f"{above.lanes[lane].offered:,} requests, and no fewer than {settings.fewest_requests:,} can show "
                f"{show_percent(settings.target)}. Use longer trials, a higher start or a lower target."
            )
        if above.verdict == "invalid":
            return f"The generator itself could not offer {show_number(above.rate_rps)} requests/s: nothing was learnt."
        return f"No rate from {show_number(above.rate_rps)} requests/s up was shown to hold {slo} ({sure})."
    rate = show_number(below.rate_rps)
    if end.reason == "holds_at_highest":
        return f"{rate} requests/s, the highest rate tried, holds {slo} ({sure}); the limit lies above it."
    if above is None:
        return f"{rate} requests/s holds {slo} ({sure}); the search ended before it found one that does not."
    other = show_number(above.rate_rps)
    if above.verdict == "invalid":
        return f"{rate} requests/s holds {slo} ({sure}); at {other} the generator itself was too slow to tell."
    does_not = "fails" if above.verdict == "fails" else "could not be shown to hold"
    text = f"{rate} requests/s is the highest rate found that holds {slo} ({sure}); {other} {does_not}."
    return f"{text} The search ended before it came closer." if end.reason == "out_of_trials" else text


def _contradictions(points: Sequence[RatePoint], settings: SweepSettings) -> list[str]:
    """What does not agree with "every rate up to a limit holds and none above it"."""
    found = []
    for lower, higher in combinations(points, 2):
        if lower.verdict == "fails" and higher.verdict == "holds":
            found.append(
                f"Not monotone: {show_number(lower.rate_rps)} requests/s fails, and "
                f"{show_number(higher.rate_rps)} requests/s holds."
            )
    pairs = [
        (lower, higher, name)
        for lower, higher in combinations(points, 2)
        for name in sorted(set(lower.lows) & set(higher.lows))
    ]
    z = two_sided_z(1 - (1 - settings.confidence) / max(1, len(pairs)))
    for lower, higher, name in pairs:
        a, b = lower.lanes[name], higher.lanes[name]
        if newcombe(Share(a.good, a.offered), Share(b.good, b.offered), z).low > 0:
            found.append(
                f"Not monotone: lane {name!r} attained {show_share(a.good / a.offered)} at "
                f"{show_number(lower.rate_rps)} requests/s and {show_share(b.good / b.offered)} at "
                f"{show_number(higher.rate_rps)} requests/s, more than noise explains."
            )
    return found


def _warnings(trials: Sequence[Trial]) -> list[str]:
    found = []
    if any(trial.simulated for trial in trials):
        found.append("Simulated: these rates are those of a model, not of a server.")
    invalid = [trial for trial in trials if trial.invalid]
    if invalid:
        rates = ", ".join(sorted({show_number(trial.rate_rps) for trial in invalid}))
        found.append(f"{len(invalid)} trials (at {rates} requests/s) were invalid and count for nothing.")
    return found
