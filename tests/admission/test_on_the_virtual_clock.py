"""Predictions and decisions against the engine's own scheduling, on the virtual clock.

One lane of short requests, prompts of 30 to 250 tokens and about 25 tokens of output, TTFT target 1 s and E2E target
4 s, on the measured step times of a small model. About 4.5 requests a second are what the engine can take.
"""

from __future__ import annotations

import math
from statistics import median

import pytest

from headrace.admission.decide import AdmissionLimits
from headrace.lanes.lane import SLO, Lane, Overload
from headrace.messages.engine import BandPlan, ModelInfo, Ready
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.simulate.door import Door
from headrace.simulate.requests import Targets, VirtualRequest
from headrace.simulate.simulation import Simulation
from headrace.simulate.step_times import SMOLLM2_2_THREADS
from headrace.simulate.virtual_engine import EngineShape, VirtualEngine

TARGETS = SLO(p99_ttft_s=1.0, p99_e2e_s=4.0)
LIMITS = AdmissionLimits(max_queue=10**6, lane_max_queue=None, lane_max_running=None)
READY = Ready(ModelInfo("m", "", "a", 0, 0, 2048, 2048, 1, 1), [BandPlan(2048, 32, 1)], 1, 1, None)
DURATION_S = 60.0


def good(door: Door) -> float:
    """The share of all requests, shed ones included, that met both targets."""
    return sum([record.good for _, record in door.let_in]) / (len(door.let_in) + len(door.shed))


def serve(rate_per_s: float, overload: Overload, patience: float = 1.0) -> Door:
    simulation = Simulation(seed=1)
    shape = EngineShape((Band(2048, 32),), noise=0.1)
    engine = VirtualEngine(shape, SMOLLM2_2_THREADS, simulation.random("engine"), knobs=SchedulingKnobs())
    lane = Lane(priority=10, slo=TARGETS, overload=overload, patience=patience)
    door = Door(engine, {"short": lane}, SMOLLM2_2_THREADS)
    targets = Targets(ttft_s=TARGETS.p99_ttft_s, e2e_s=TARGETS.p99_e2e_s)
    draw = simulation.random("arrivals")
    now_s = 0.0
    requests: list[VirtualRequest] = []
    while now_s < DURATION_S:
        now_s += draw.expovariate(rate_per_s)
        prompt, output = draw.randint(30, 250), 1 + min(100, int(draw.expovariate(1 / 25)))
        requests.append(VirtualRequest(f"r{now_s}", now_s, prompt, output, "short", None, lane.priority, targets))
    simulation.add(*door.feed(requests))
    simulation.run()
    door.front.ledger.check_integrity()
    return door


@pytest.mark.parametrize(("rate_per_s", "lowest", "highest"), [(3.0, 0.7, 1.6), (6.0, 0.3, 2.2)])
def test_predictions_are_right_below_and_beyond_what_the_engine_can_take(
    rate_per_s: float, lowest: float, highest: float
) -> None:
    """Of the ratios of what happened to what was predicted, the median is within a tenth of one and nine of ten are
    between ``lowest`` and ``highest``. Beyond what it can take, the engine lets requests pass that are still in time,
    which the prediction does not know: some come in 0.4 of the time, others in 1.9 times of it (the bounds leave room
    for other random numbers)."""
    ratios = sorted(
        record.ttft_s / verdict.predicted.ttft_s
        for verdict, record in serve(rate_per_s, "queue").let_in
        if record.ttft_s is not None and verdict.predicted is not None
    )
    assert median(ratios) == pytest.approx(1.0, abs=0.1)
    assert ratios[len(ratios) // 10] > lowest
    assert ratios[-len(ratios) // 10] < highest


def test_shedding_keeps_those_in_time_that_are_let_in() -> None:
    """At a third more than the engine can take, the queue of a lane that sheds nothing makes nearly all late. Of those
    let in one in twenty may be: predictions are medians, the step times vary, and what came later may pass (7 of 294
    with this seed)."""
    queued, shed = serve(6.0, "queue"), serve(6.0, "shed")
    assert good(shed) > 3 * good(queued)
    late = [record for _, record in shed.let_in if record.ttft_s is None or record.ttft_s > 1.0]
    assert len(late) <= 0.05 * len(shed.let_in)


def test_next_to_nobody_is_shed_while_the_engine_can_take_all() -> None:
    """Three requests of a burst may be, of some 180: the lane has no patience at all."""
    door = serve(3.0, "shed")
    assert len(door.shed) <= 3
    assert len(door.let_in) > 150


def test_patience_beyond_the_target_makes_everybody_wait_so_long() -> None:
    """The queue grows until the predicted wait is what the patience allows."""
    patient = serve(10.0, "shed", patience=10.0)
    waits_s = [record.ttft_s for _, record in patient.let_in if record.ttft_s is not None]
    assert median(waits_s[len(waits_s) // 2 :]) > 5.0
    assert good(serve(10.0, "shed", patience=1.0)) > 3 * good(patient)


def test_retry_after_is_when_the_engine_would_have_been_ready() -> None:
    """Of those shed because a queue of ten seconds is there, nobody is told less than it takes to drain it to the
    target, nor much more."""
    for verdict, _ in serve(10.0, "shed", patience=10.0).shed:
        assert verdict.predicted is not None and verdict.raw is not None
        decode_s = min(verdict.predicted.decode_s, verdict.raw.decode_only_s)
        late_s = max(verdict.predicted.ttft_s - 1.0, verdict.predicted.ttft_s + decode_s - 4.0)
        assert math.isclose(verdict.decision.retry_after_s, late_s, rel_tol=1e-6)
