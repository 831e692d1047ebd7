"""The search for the highest rate that holds: pure steps, and whole searches against servers with known limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from headrace.bench.records import RequestRecord, RunInfo
from headrace.bench.statistics.intervals import wilson
from headrace.bench.sweep.sweep import Finished, NextTrial, check_settings, next_step, points_of, result_of, sweep
from headrace.bench.sweep.sweep_result import (
    LaneTrial,
    SweepResult,
    SweepSettings,
    Trial,
    rate_lines,
    sweep_from_json,
    sweep_rows,
    sweep_table,
    sweep_to_json,
)
from headrace.errors import ConfigError
from tests.bench.bench_records import answered, run_info

SETTINGS = SweepSettings(start_rps=4.0, duration_s=100.0, tolerance=0.05)


def _trial(rate: float, good: int, offered: int = 2000, **changes: Any) -> Trial:
    return Trial(rate, 100.0, {"chat": LaneTrial(good, offered)}, **changes)


def _holds(rate: float) -> Trial:
    return _trial(rate, 2000)


def _fails(rate: float) -> Trial:
    return _trial(rate, 1000)


def _search(attained: Callable[[float], float], plan: SweepSettings, rng: np.random.Generator | None) -> SweepResult:
    """A whole search against a server that attains ``attained(rate)``: drawn, or exactly where ``rng`` is None."""
    trials: list[Trial] = []
    while isinstance(step := next_step(trials, plan), NextTrial):
        offered = round(step.rate_rps * step.duration_s)
        share = attained(step.rate_rps)
        good = int(rng.binomial(offered, share)) if rng is not None else math.floor(offered * share)
        trials.append(Trial(step.rate_rps, step.duration_s, {"chat": LaneTrial(good, offered)}))
        assert len(trials) <= plan.most_trials
    return result_of(trials, plan, step)


def test_the_search_begins_at_the_start() -> None:
    assert next_step([], SETTINGS) == NextTrial(4.0, 100.0)


def test_it_doubles_while_it_holds_and_halves_while_it_does_not() -> None:
    assert next_step([_holds(4)], SETTINGS) == NextTrial(8.0, 100.0)
    assert next_step([_holds(4), _holds(8)], SETTINGS) == NextTrial(16.0, 100.0)
    assert next_step([_fails(4)], SETTINGS) == NextTrial(2.0, 100.0)


def test_between_two_rates_it_takes_their_geometric_mean() -> None:
    assert next_step([_holds(4), _fails(16)], SETTINGS) == NextTrial(8.0, 100.0)


def test_a_rate_holds_when_the_lower_end_reaches_the_target_and_fails_when_the_upper_end_is_below() -> None:
    for good in range(1900, 2001):
        (point,) = points_of([_trial(4, good)], SETTINGS)
        interval = wilson(good, 2000, SETTINGS.z)
        truth = "holds" if interval.low >= 0.99 else "fails" if interval.high < 0.99 else "undecided"
        assert point.verdict == truth, good
        assert (point.lows["chat"], point.highs["chat"]) == (interval.low, interval.high)


def test_a_good_average_over_too_few_requests_is_undecided() -> None:
    (point,) = points_of([_trial(4, 100, 100)], SETTINGS)
    assert point.verdict == "undecided"


def test_every_lane_must_hold() -> None:
    lanes = {"chat": LaneTrial(2000, 2000), "docs": LaneTrial(1500, 2000)}
    (point,) = points_of([Trial(4.0, 100.0, lanes)], SETTINGS)
    assert point.verdict == "fails"
    too_few = {"chat": LaneTrial(2000, 2000), "docs": LaneTrial(50, 50)}
    (point,) = points_of([Trial(4.0, 100.0, too_few)], SETTINGS)
    assert point.verdict == "undecided"


def test_an_undecided_rate_is_measured_again_twice_as_long_up_to_the_limit() -> None:
    trials = [_holds(4), _trial(8, 1981)]
    assert next_step(trials, SETTINGS) == NextTrial(8, 200.0)
    trials.append(_trial(8, 1981))
    assert next_step(trials, SETTINGS) == NextTrial(8, 400.0)
    trials.append(_trial(8, 1981))
    assert points_of(trials, SETTINGS)[1].verdict == "undecided"
    assert next_step(trials, SETTINGS) == NextTrial(5.657, 100.0), "then it counts as not holding"


def test_trials_of_a_rate_are_pooled() -> None:
    (point,) = points_of([_trial(4, 400, 400), _trial(4, 399, 400), _trial(4, 1200, 1200)], SETTINGS)
    assert (point.lanes["chat"].good, point.lanes["chat"].offered, point.trials) == (1999, 2000, 3)
    assert point.verdict == "holds"


def test_looking_several_times_is_paid_for() -> None:
    # Three trials and one confirmation: each look at 1 - 0.05 / 4.
    assert SETTINGS.z == pytest.approx(2.4977, abs=1e-4)


def test_the_answer_is_measured_once_more_and_dropped_when_it_does_not_hold_then() -> None:
    close = [_holds(4), _holds(7.8), _fails(8)]
    assert next_step(close, SETTINGS) == NextTrial(7.8, 100.0)
    assert next_step([*close, _holds(7.8)], SETTINGS) == Finished("found")
    unlucky = [*close, _trial(7.8, 1500)]
    assert next_step(unlucky, SETTINGS) == NextTrial(5.586, 100.0), "on between 4 and 7.8"


def test_no_rate_holds() -> None:
    plan = msgspec.structs.replace(SETTINGS, lowest_rps=1.0)
    trials = [_fails(4), _fails(2), _fails(1)]
    assert next_step(trials, plan) == Finished("nothing_holds")
    result = result_of(trials, plan, Finished("nothing_holds"))
    assert result.answer_rps is None
    assert result.finding.startswith("No rate from 1 requests/s up was shown to hold 99 %")


def test_too_few_requests_are_said_instead_of_searched_through() -> None:
    assert SETTINGS.fewest_requests == 618
    at_least, fewer = LaneTrial(618, 618), LaneTrial(617, 617)
    assert points_of([Trial(4.0, 100.0, {"docs": at_least})], SETTINGS)[0].verdict == "holds"
    assert points_of([Trial(4.0, 100.0, {"docs": fewer})], SETTINGS)[0].verdict == "undecided"
    # 88 in the first trial, at most 7 times as many in all three: 616.
    trials = [Trial(4.0, 100.0, {"chat": LaneTrial(2000, 2000), "docs": LaneTrial(88, 88)})]
    end = next_step(trials, SETTINGS)
    assert end == Finished("too_few_requests")
    result = result_of(trials, SETTINGS, Finished("too_few_requests"))
    assert result.answer_rps is None
    assert "lane 'docs' had 88 requests, and no fewer than 618 can show 99 %" in result.finding
    enough = [Trial(4.0, 100.0, {"docs": LaneTrial(89, 89)})]
    assert next_step(enough, SETTINGS) == NextTrial(4.0, 200.0)


def test_every_rate_holds() -> None:
    plan = msgspec.structs.replace(SETTINGS, highest_rps=10.0)
    trials = [_holds(4), _holds(8)]
    assert next_step(trials, plan) == NextTrial(10.0, 100.0)
    trials += [_holds(10.0), _holds(10.0)]
    assert next_step(trials, plan) == Finished("holds_at_highest")
    result = result_of(trials, plan, Finished("holds_at_highest"))
    assert result.answer_rps == 10.0
    assert "the limit lies above it" in result.finding


def test_a_late_generator_says_nothing_about_the_server() -> None:
    late = _trial(8, 2000, invalid=["the generator sent late"])
    trials = [_holds(4), late]
    assert next_step(trials, SETTINGS) == NextTrial(8, 200.0), "tried again"
    trials += [late, late]
    assert points_of(trials, SETTINGS)[1].verdict == "invalid"
    closer = [*trials, _holds(4), _holds(5.657), _holds(6.727), _holds(7.337), _holds(7.662), _holds(7.662)]
    end = next_step(closer, SETTINGS)
    assert end == Finished("generator_limit")
    assert isinstance(end, Finished)
    result = result_of(closer, SETTINGS, end)
    assert result.answer_rps == 7.662
    assert "the generator itself was too slow to tell" in result.finding
    assert any("3 trials (at 8 requests/s) were invalid" in note for note in result.notes)


def test_one_valid_trial_among_late_ones_is_enough() -> None:
    late = _trial(4, 0, invalid=["the generator sent late"])
    (point,) = points_of([late, _holds(4)], SETTINGS)
    assert (point.verdict, point.valid_trials, point.lanes["chat"].good) == ("holds", 1, 2000)


def test_the_search_ends_in_any_case() -> None:
    plan = msgspec.structs.replace(SETTINGS, most_trials=3, tolerance=1e-6)
    trials = [_holds(4), _holds(8), _fails(16)]
    assert next_step(trials, plan) == Finished("out_of_trials")
    result = result_of(trials, plan, Finished("out_of_trials"))
    assert result.answer_rps == 8
    assert result.finding.endswith("The search ended before it came closer.")


def test_a_rate_that_fails_below_one_that_holds_is_reported() -> None:
    trials = [_holds(2), _fails(4), _holds(8), _fails(16)]
    result = result_of(trials, SETTINGS, Finished("found"))
    assert result.answer_rps == 2, "the highest below every rate that did not hold"
    assert "Not monotone: 4 requests/s fails, and 8 requests/s holds." in result.notes


def test_attainment_that_rises_with_the_rate_beyond_noise_is_reported() -> None:
    result = result_of([_holds(2), _trial(4, 1000), _trial(8, 1600)], SETTINGS, Finished("found"))
    (note,) = result.notes
    assert note.startswith("Not monotone: lane 'chat' attained 50.0 % at 4 requests/s and 80.0 % at 8 requests/s")
    by_chance = result_of([_holds(2), _trial(4, 1600), _trial(8, 1610)], SETTINGS, Finished("found"))
    assert by_chance.notes == []


@settings(max_examples=60)
@given(st.floats(0.05, 5000), st.floats(0.1, 1000))
def test_a_sharp_limit_is_found_within_the_tolerance(limit: float, start: float) -> None:
    plan = SweepSettings(start_rps=start, duration_s=1e5, lowest_rps=0.001, most_trials=80)
    result = _search(lambda rate: 1.0 if rate <= limit else 0.5, plan, None)
    assert result.reason == "found"
    assert result.answer_rps is not None and result.first_not_holding_rps is not None
    assert result.answer_rps <= limit < result.first_not_holding_rps <= result.answer_rps * 1.05 * (1 + 1e-9)
    assert result.notes == []


def test_false_answers_are_rarer_than_the_confidence_allows() -> None:
    """Servers at exactly the target up to 20 requests/s, a hair above it below and far under it beyond: an answer
    there or beyond would be a rate that does not hold."""
    rng = np.random.default_rng(8)
    plan = SweepSettings(start_rps=20.0, duration_s=60.0, most_trials=12)

    def attained(rate: float) -> float:
        return 0.9999 if rate < 19.9 else 0.9899

    searches = 300
    results = [_search(attained, plan, rng) for _ in range(searches)]
    false = sum(result.answer_rps is not None and result.answer_rps >= 19.9 for result in results)
    # At most half of a twentieth at each rate tried beyond; one such rate lies near, plus four standard deviations.
    assert false <= searches * 0.025 + 4 * math.sqrt(searches * 0.025 * 0.975)
    assert sum(result.answer_rps is not None for result in results) > searches * 0.95


def _measured(step: NextTrial, *, interrupted: bool = False) -> tuple[RunInfo, list[RequestRecord]]:
    """By a server that answers in 100 ms up to 9 requests/s and in 900 ms above."""
    ttft_ms = 100 if step.rate_rps <= 9 else 900
    count = int(step.rate_rps * step.duration_s)
    records = [answered(i, i * 1000 / step.rate_rps, ttft_ms=ttft_ms, gaps_ms=(10,)) for i in range(count)]
    slos = {"chat": {"ttft_s": 0.5}}
    info = run_info(duration_s=step.duration_s, wall_s=step.duration_s + 1, slos=slos, simulated=True)
    return msgspec.structs.replace(info, interrupted=interrupted), records


PLAN = SweepSettings(start_rps=8.0, duration_s=120.0, tolerance=0.1, confirmations=0)


def test_measuring_is_left_to_the_caller() -> None:
    """Who is asked for one trial after the other, each with its number, and hears of each."""
    asked: list[tuple[int, float]] = []

    def measure(number: int, step: NextTrial) -> tuple[RunInfo, list[RequestRecord]]:
        asked.append((number, step.rate_rps))
        return _measured(step)

    heard: list[Trial] = []
    result = sweep(measure, PLAN, on_trial=heard.append)
    assert result is not None and result.answer_rps == 8.723
    assert asked == list(enumerate([8.0, 16.0, 11.31, 9.512, 8.723]))
    assert heard == result.trials
    assert result.points[0].lanes["chat"].ttft_p99_s == 0.1
    assert any(note.startswith("Simulated") for note in result.notes)


@pytest.mark.parametrize("between", [False, True], ids=["in a run", "between runs"])
def test_an_interrupted_search_tells_what_it_has(between: bool) -> None:
    """Two trials were whole: the answer so far, and that it was interrupted. Without any there is nothing to tell."""

    def search(whole: int) -> SweepResult | None:
        def measure(number: int, step: NextTrial) -> tuple[RunInfo, list[RequestRecord]]:
            if number == whole and between:
                raise KeyboardInterrupt
            return _measured(step, interrupted=number == whole)

        return sweep(measure, PLAN)

    assert search(0) is None
    found = search(2)
    assert found is not None and found.reason == "interrupted"
    assert [trial.rate_rps for trial in found.trials] == [8.0, 16.0]
    assert (found.answer_rps, found.first_not_holding_rps) == (8.0, 16.0)
    assert found.finding.endswith("The search was interrupted.")
    assert sweep_from_json(sweep_to_json(found)) == found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", 1.0),
        ("confidence", 0.0),
        ("tolerance", 0.0),
        ("trials", 0),
        ("confirmations", -1),
        ("duration_s", 0.0),
    ],
)
def test_settings_that_cannot_work_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"sweep.{field}: must"):
        check_settings(msgspec.structs.replace(SETTINGS, **{field: value}))


def test_a_start_outside_its_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sweep.start_rps: must lie between lowest_rps \(5\)"):
        check_settings(msgspec.structs.replace(SETTINGS, lowest_rps=5.0))


def test_the_result_as_json_table_and_lines() -> None:
    lanes = {"chat": LaneTrial(1999, 2000, 0.2, 1.5), "docs[1]": LaneTrial(1998, 2000)}
    trials = [Trial(4.0, 100.0, lanes, 3.9, 120.0), _fails(8.0), _trial(16.0, 0, invalid=["late"])]
    result = result_of(trials, SETTINGS, Finished("out_of_trials"))
    assert sweep_from_json(sweep_to_json(result)) == result
    with pytest.raises(ConfigError, match=r"x.json: is no result"):
        sweep_from_json(b"{}", where="x.json")
    rows = sweep_rows(result)
    assert [row[:3] for row in rows] == [
        ["4", "holds", "chat"],
        ["", "", "docs[1]"],
        ["8", "fails", "chat"],
        ["16", "invalid", "–"],
    ]
    console = Console(width=140)
    with console.capture() as captured:
        console.print(sweep_table(result))
    text = captured.get()
    assert "docs[1]" in text and result.finding[:40] in text and result.notes[0][:40] in text
    chat, docs = rate_lines(result)
    assert (chat.name, chat.numbers.rates_rps, chat.numbers.values) == ("chat", [4.0, 8.0], [0.9995, 0.5])
    assert (docs.name, docs.numbers.rates_rps) == ("docs[1]", [4.0])
