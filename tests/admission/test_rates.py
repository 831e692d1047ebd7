"""Where the engine's rates come from."""

from __future__ import annotations

import msgspec
import pytest

from headrace.admission.rates import EngineRates, UsualTimes, rates_of
from headrace.messages.engine import BandPlan, EngineLoad, ModelInfo, Ready, SelfMeasurement
from headrace.scheduling.knobs import SchedulingKnobs

KNOBS = SchedulingKnobs()
MEASURED = SelfMeasurement(prefill_tokens_per_s=400.0, decode_tokens_per_s=50.0, step_overhead_s=0.005)
LEARNED = EngineLoad(
    3, 0, 0, 1, 0, 1, 0, 0.1, 3, 0, 1, prefill_tokens_per_s=500.0, decode_step_s=0.03, batch_cap=6
)  # fmt: skip


def ready(measurement: SelfMeasurement | None = MEASURED) -> Ready:
    model = ModelInfo("m", "", "a", 0, 0, 4096, 4096, 1, 1)
    return Ready(model, [BandPlan(2048, 8, 1), BandPlan(4096, 2, 1)], 1, 1, measurement)


def test_before_anything_is_known_there_are_none() -> None:
    blank = msgspec.structs.replace(LEARNED, prefill_tokens_per_s=0.0, decode_step_s=0.0)
    assert rates_of(blank, None, KNOBS) is None
    assert rates_of(blank, ready(None), KNOBS) is None
    assert rates_of(None, ready(SelfMeasurement(0.0, 0.0, 0.0)), KNOBS) is None


def test_what_was_measured_at_start_serves_until_the_engine_has_learned() -> None:
    rates = rates_of(None, ready(), KNOBS)
    assert rates is not None
    assert (rates.prefill_tokens_per_s, rates.decode_step_s, rates.batch, rates.places) == (400.0, 0.02, 1, 10)
    rates = rates_of(LEARNED, ready(), KNOBS)
    assert rates is not None
    assert (rates.prefill_tokens_per_s, rates.decode_step_s, rates.batch, rates.places) == (500.0, 0.03, 4, 10)


def test_the_knob_bounds_the_places() -> None:
    rates = rates_of(LEARNED, ready(), SchedulingKnobs(max_num_seqs=2))
    assert rates is not None and rates.places == 2


@pytest.mark.parametrize(
    ("decode_step_s", "prefill_tokens_per_s", "chunk"),
    [(0.03, 1000.0, 120), (0.14, 1000.0, 64), (0.2, 1000.0, 64), (0.03, 1e6, 512)],
)
def test_a_chunk_fits_into_an_urgent_step_beside_the_decodes(
    decode_step_s: float, prefill_tokens_per_s: float, chunk: int
) -> None:
    """Of a step of 150 ms, what the decodes leave; never below the smallest chunk nor above the largest."""
    knobs = SchedulingKnobs(urgent_step_s=0.15, min_prefill_tokens=64, max_prefill_tokens=512)
    load = msgspec.structs.replace(LEARNED, decode_step_s=decode_step_s, prefill_tokens_per_s=prefill_tokens_per_s)
    rates = rates_of(load, ready(), knobs)
    assert rates is not None and rates.chunk_tokens == chunk


def test_usual_times_hardly_follow_a_machine_that_slows_down_for_seconds() -> None:
    """After two minutes at one speed, five seconds at half of it change the usual times by 4 %: 5 of 125 s. The first
    ones count at once."""
    fast = EngineRates(1000.0, 0.01, batch=1, places=16, chunk_tokens=256)
    slow = EngineRates(500.0, 0.02, batch=1, places=16, chunk_tokens=256)
    usual = UsualTimes()
    usual.note(fast, 0.0)
    assert usual.prefill_token_s == 1 / 1000.0 and usual.decode_token_s == fast.decode_token_s
    for tenth in range(1, 1200):
        usual.note(fast, tenth / 10)
    for tenth in range(1200, 1250):
        usual.note(slow, tenth / 10)
    assert usual.prefill_token_s == pytest.approx(1.04 / 1000.0, rel=0.01)
    assert usual.decode_token_s == pytest.approx(
        fast.decode_token_s + 0.04 * (slow.decode_token_s - fast.decode_token_s), rel=0.01
    )
