"""When an arrival's tokens will come: by hand-made cases of the formula, and its properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.admission.predict import (
    MOST_UTILISATION,
    Arrival,
    Backlog,
    LaneWork,
    Waiting,
    predict,
    predict_idle,
)
from headrace.admission.rates import EngineRates
from tests.admission.values import RATES, arrival, arrivals, backlogs, engine_rates


def backlog(
    since_progress_s: float = 0.0, tenants: dict[str | None, Waiting] | None = None, **lanes: LaneWork
) -> Backlog:
    return Backlog(lanes, tenants or {}, since_progress_s)


def test_an_idle_engine_takes_the_time_of_the_prompt_and_of_each_further_token() -> None:
    prediction = predict_idle(arrival(500, output_tokens=11), RATES)
    assert prediction.ttft_s == pytest.approx(0.5)
    assert prediction.finish_s == pytest.approx(0.5 + 10 * 0.02)


def test_a_short_prompt_takes_at_least_one_step() -> None:
    assert predict_idle(arrival(1), RATES).ttft_s == pytest.approx(0.02)


def test_prompts_of_as_urgent_lanes_are_ahead_and_those_of_less_urgent_ones_are_not() -> None:
    waiting = Waiting(1, 1000, 10)
    same = predict(backlog(other=LaneWork(10, waiting=waiting, weight=100)), arrival(100), RATES)
    less = predict(backlog(other=LaneWork(11, waiting=waiting, weight=100)), arrival(100), RATES)
    assert same.ttft_s == pytest.approx(1.1)
    assert less.ttft_s == pytest.approx(0.1)


def test_what_has_aged_in_a_less_urgent_lane_is_ahead() -> None:
    """Ten points take ten seconds: of what has come evenly over twenty, half has waited long enough."""
    less = LaneWork(20, waiting=Waiting(10, 1000, 100), oldest_s=20.0, weight=1e-3)
    rates = replace(RATES, ageing_s=10.0)
    assert predict(backlog(other=less), arrival(100), rates).ttft_s == pytest.approx(0.6)
    assert predict(backlog(other=replace(less, oldest_s=9.9)), arrival(100), rates).ttft_s == pytest.approx(0.1)


def test_less_urgent_prompts_do_not_delay_the_decode_and_others_do() -> None:
    waiting = Waiting(1, 500, 10)
    less = predict(backlog(other=LaneWork(11, waiting=waiting)), arrival(100), RATES)
    same = predict(backlog(other=LaneWork(10, waiting=waiting)), arrival(100), RATES)
    assert less.decode_s == pytest.approx(10 * 0.02)
    assert same.decode_s == pytest.approx(10 * RATES.decode_s(2) + 0.5)


def test_every_chunk_brings_a_decode_of_what_runs_until_that_has_ended() -> None:
    running = LaneWork(50, running=1, running_output_tokens=1000)
    ending = replace(running, running_output_tokens=2)
    assert predict(backlog(other=running), arrival(500), RATES).ttft_s == pytest.approx(0.5 + 5 * 0.02)
    assert predict(backlog(other=ending), arrival(500), RATES).ttft_s == pytest.approx(0.5 + 2 * 0.02)


def test_what_comes_more_urgent_on_the_way_overtakes() -> None:
    """Half of the engine asked for by a more urgent lane doubles the wait; the rate is taken for MOST_UTILISATION at
    most. The lane itself has nothing waiting, so its share of the engine is not at stake."""
    half = LaneWork(5, arriving_prefill_tokens_per_s=300, arriving_output_tokens_per_s=200)
    flood = replace(half, arriving_prefill_tokens_per_s=1e6)
    waiting = LaneWork(10, waiting=Waiting(1, 900, 1), weight=1000)
    by_half = predict(backlog(other=half, same=waiting), arrival(100), RATES)
    by_flood = predict(backlog(other=flood, same=waiting), arrival(100), RATES)
    assert by_half.ttft_s == pytest.approx(1.0 * 2)
    assert by_flood.ttft_s == pytest.approx(1.0 / (1 - MOST_UTILISATION))


def test_a_flood_of_a_more_urgent_lane_leaves_a_lane_its_share() -> None:
    """With weights 3 and 1, a quarter of the engine is the lane's: its 100 tokens take four times as long, not the
    100 seconds of the flood."""
    flood = LaneWork(0, weight=3.0, waiting=Waiting(100, 100_000, 1000))
    roomy = replace(RATES, places=1000)
    assert predict(backlog(flood=flood), arrival(100), roomy).ttft_s == pytest.approx(0.4)


def test_of_another_tenants_flood_as_much_counts_as_the_tenant_has_itself() -> None:
    flood = Waiting(100, 50_000, 1000)
    tenants: dict[str | None, Waiting] = {"flood": flood}
    own = LaneWork(10, waiting=flood)
    roomy = replace(RATES, places=1000)
    victim = predict(backlog(tenants=tenants, own=own), arrival(100, tenant="calm"), roomy)
    flooder = predict(backlog(tenants=tenants, own=own), arrival(100, tenant="flood"), roomy)
    assert victim.ttft_s == pytest.approx(0.2)
    assert flooder.ttft_s == pytest.approx(50.1)


def test_half_of_what_waits_may_have_been_computed_since_the_last_first_token() -> None:
    own = LaneWork(10, waiting=Waiting(1, 10_000, 10))
    tenants: dict[str | None, Waiting] = {None: own.waiting}
    fresh, after_2_s, stuck = (
        predict(backlog(since, tenants, own=own, idle=LaneWork(50)), arrival(100, weight=1e-3), RATES).ttft_s
        for since in (0.0, 2.0, 1000.0)
    )
    assert fresh == pytest.approx(10.1)
    # By its share alone nothing is taken off, and the lane is alone: the share is everything.
    assert after_2_s == pytest.approx(8.1)
    assert stuck == pytest.approx(5.1)


def test_more_sequences_than_places_wait_for_the_end_of_some() -> None:
    """8 places, all taken, 80 tokens to come: one eighth of them must be made, by a batch of 8 in 27 ms a step."""
    full = LaneWork(10, weight=1000, running=8, running_output_tokens=80)
    prediction = predict(backlog(other=full), arrival(1), RATES)
    step_s = RATES.decode_s(8)
    assert step_s == pytest.approx(0.027)
    assert prediction.ttft_s == pytest.approx(80 / 8 * step_s / 8 + 0.02 + step_s)


def test_less_urgent_sequences_hold_no_place() -> None:
    full = LaneWork(11, weight=1000, running=8, running_output_tokens=80)
    assert predict(backlog(other=full), arrival(1), RATES).ttft_s == pytest.approx(0.02 + RATES.decode_s(8))


def test_a_full_lane_waits_for_its_own() -> None:
    own = LaneWork(10, running=2, running_output_tokens=100)
    capped = predict(backlog(own=own), arrival(1, lane_places=2), RATES).ttft_s
    free = predict(backlog(own=own), arrival(1), RATES).ttft_s
    assert capped == pytest.approx(free + 100 / 2 * RATES.decode_s(2) / 2)


def test_a_smaller_batch_is_not_slower_and_a_larger_one_takes_a_row_more_each() -> None:
    rates = replace(RATES, batch=4, decode_step_s=0.04)
    assert [rates.decode_s(n) for n in (0, 1, 4, 10)] == pytest.approx([0.0, 0.037, 0.04, 0.046])
    steep = replace(rates, prefill_tokens_per_s=10.0)
    assert steep.decode_s(1) == pytest.approx(0.01)


def _later(before: Arrival, now: Backlog, more: Backlog, rates: EngineRates) -> None:
    first, second = predict(now, before, rates), predict(more, before, rates)
    # Rounding: the same sums in another order.
    assert second.ttft_s >= first.ttft_s * (1 - 1e-9)
    assert second.finish_s >= first.finish_s * (1 - 1e-9)


@given(backlogs(), arrivals, engine_rates, st.sampled_from("abc"), st.integers(0, 20), st.data())
def test_more_work_ahead_never_predicts_an_earlier_time(
    now: Backlog, new: Arrival, rates: EngineRates, lane: str, priority: int, data: st.DataObject
) -> None:
    """Whatever a sequence more is and wherever it stands: in a lane, at a stage, with tokens to come."""
    before = now.lanes.get(lane, LaneWork(priority))
    prompt, output = data.draw(st.integers(0, 20_000)), data.draw(st.integers(0, 2000))
    if data.draw(st.booleans()):
        older_s = data.draw(st.floats(before.oldest_s, 1000))
        more = replace(before, waiting=before.waiting.plus(Waiting(1, prompt, output)), oldest_s=older_s)
    else:
        more = replace(before, running=before.running + 1, running_output_tokens=before.running_output_tokens + output)
    more = replace(more, arriving_prefill_tokens_per_s=more.arriving_prefill_tokens_per_s + prompt)
    _later(new, now, replace(now, lanes={**now.lanes, lane: more}), rates)


@given(backlogs(), arrivals, engine_rates, st.sampled_from([None, "x", "y"]), st.data())
def test_more_work_of_any_tenant_never_predicts_an_earlier_time(
    now: Backlog, new: Arrival, rates: EngineRates, tenant: str | None, data: st.DataObject
) -> None:
    more = Waiting(1, data.draw(st.integers(0, 20_000)), data.draw(st.integers(0, 2000)))
    tenants = {**now.tenants, tenant: now.tenants.get(tenant, Waiting()).plus(more)}
    _later(new, now, replace(now, tenants=tenants), rates)


@given(backlogs(), arrivals, engine_rates)
def test_an_idle_engine_is_never_slower(now: Backlog, new: Arrival, rates: EngineRates) -> None:
    idle = predict_idle(new, rates)
    _later(new, Backlog({}, {}), now, rates)
    assert 0 < idle.ttft_s <= idle.finish_s
