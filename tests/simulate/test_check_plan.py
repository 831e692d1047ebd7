"""Every promise of a step plan is checked: a plan that breaks one is found, one that keeps all is not."""

from __future__ import annotations

import re

import msgspec
import pytest

from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import SequenceState, Slot
from headrace.scheduling.step import Admission, Move, PrefillChunk, Promotion, SchedulerState, StepPlan
from headrace.simulate.check_plan import check_plan

BANDS = (Band(16, 3), Band(64, 1))


def decoding(name: str, stream: int, computed: int = 8, band: int = 0, lane: str = "") -> SequenceState:
    return SequenceState(
        name, 4, 60, 0, 0.0, known_tokens=computed + 1, computed_tokens=computed, slot=Slot(band, stream), lane=lane
    )


def waits(name: str, prompt: int = 6, lane: str = "") -> SequenceState:
    return SequenceState(name, prompt, prompt + 5, 0, 0.0, lane=lane)


def parked(name: str, known: int = 9) -> SequenceState:
    return SequenceState(name, 4, 60, 0, 0.0, known_tokens=known, computed_tokens=known - 1)


def state_of(
    running: list[SequenceState], waiting: list[SequenceState], *, step_tokens: int = 32, **knobs: object
) -> SchedulerState:
    """Streams that no running sequence has are free."""
    used = [sum(s.slot is not None and s.slot.band == band for s in running) for band in range(len(BANDS))]
    free = tuple(band.max_sequences - count for band, count in zip(BANDS, used, strict=True))
    values = msgspec.convert({"step_tokens": step_tokens, "max_prefill_tokens": 16, **knobs}, SchedulingKnobs)
    return SchedulerState(1.0, BANDS, free, waiting, running, values)


FULL = decoding("full", 1, computed=16)
HALF = SequenceState("half", 12, 60, 0, 0.0, computed_tokens=5, slot=Slot(0, 2))
TWO = [decoding("a", 0), decoding("b", 2)]
DECODE = ("a", "b")

GOOD: list[tuple[SchedulerState, StepPlan]] = [
    (state_of([], []), StepPlan()),
    (state_of(TWO, []), StepPlan(decode=DECODE)),
    (state_of(TWO, []), StepPlan(decode=DECODE, moves=(Move("b", 1),))),
    (state_of(TWO, [waits("w")]), StepPlan(decode=DECODE)),
    (
        state_of(TWO, [waits("w")]),
        StepPlan(decode=DECODE, admissions=(Admission("w", 0),), prefill=(PrefillChunk("w", 6),)),
    ),
    (
        state_of([decoding("a", 0), FULL, HALF], [waits("w")]),
        StepPlan(
            victims=("half",),
            admissions=(Admission("w", 0),),
            promotions=(Promotion("full", 1),),
            decode=("a", "full"),
            prefill=(PrefillChunk("w", 2),),
        ),
    ),
    (state_of([FULL, decoding("top", 0, band=1)], []), StepPlan(decode=("top",))),
    (state_of([], [parked("p")]), StepPlan(admissions=(Admission("p", 0),))),
    (state_of([], [waits("w")], merge_window_s=0.01), StepPlan(wait_s=0.01)),
    (state_of([], [waits("w", lane="x")], lane_caps={"x": 1}), StepPlan(wait_s=0.001)),
    (state_of([decoding("a", 0)], [waits("w")], max_num_seqs=1), StepPlan(decode=("a",))),
    (state_of(TWO, [], band_caps=[1, 1], lane_caps={"": 1}, max_num_seqs=1), StepPlan(decode=DECODE)),
]

BAD: list[tuple[str, SchedulerState, StepPlan]] = [
    ("who may not be there", state_of(TWO, []), StepPlan(decode=("a", "x"))),
    ("twice", state_of(TWO, []), StepPlan(decode=("a", "a"))),
    ("who may not be there", state_of(TWO, []), StepPlan(victims=("b",), decode=DECODE)),
    ("who may not be there", state_of(TWO, []), StepPlan(decode=("a",), prefill=(PrefillChunk("w", 1),))),
    (
        "who may not be there",  # it is not admitted
        state_of(TWO, [waits("w")]),
        StepPlan(decode=("a",), prefill=(PrefillChunk("w", 1),)),
    ),
    ("decode and prefill", state_of(TWO, []), StepPlan(decode=DECODE, prefill=(PrefillChunk("a", 1),))),
    ("does not exist", state_of([], [waits("w")]), StepPlan(admissions=(Admission("w", 2),))),
    (
        "streams for 1 \\+ 0 free",
        state_of(TWO, [waits("v"), waits("w")]),
        StepPlan(decode=DECODE, admissions=(Admission("v", 0), Admission("w", 0))),
    ),
    ("which is taken", state_of(TWO, []), StepPlan(decode=DECODE, moves=(Move("b", 0),))),
    ("moves from", state_of([decoding("a", 0)], []), StepPlan(decode=("a",), moves=(Move("a", 1),))),
    ("moves from", state_of(TWO, []), StepPlan(decode=DECODE, moves=(Move("b", -1),))),
    ("has room", state_of(TWO, []), StepPlan(decode=DECODE, promotions=(Promotion("a", 1),))),
    ("downwards", state_of([FULL], []), StepPlan(decode=("full",), promotions=(Promotion("full", 0),))),
    (
        "enters a band of 16",
        state_of(TWO, [waits("w", 20)]),
        StepPlan(decode=DECODE, admissions=(Admission("w", 0),)),
    ),
    (
        "max_num_seqs is 2",
        state_of(TWO, [waits("w")], max_num_seqs=2),
        StepPlan(decode=DECODE, admissions=(Admission("w", 0),)),
    ),
    (
        "its cap is 1",
        state_of([decoding("a", 0, lane="x")], [waits("w", lane="x")], lane_caps={"x": 1}),
        StepPlan(decode=("a",), admissions=(Admission("w", 0),)),
    ),
    (
        "its cap is 2",
        state_of(TWO, [waits("w")], band_caps=[2]),
        StepPlan(decode=DECODE, admissions=(Admission("w", 0),)),
    ),
    ("step_tokens is 1", state_of(TWO, [], step_tokens=1), StepPlan(decode=DECODE)),
    (
        "max_prefill_tokens 2",
        state_of([HALF], [], max_prefill_tokens=2),
        StepPlan(prefill=(PrefillChunk("half", 3),)),
    ),
    ("is in decode and has 7", state_of([HALF], []), StepPlan(decode=("half",))),
    ("filled its band", state_of([FULL, *TWO], []), StepPlan(decode=("a", "b", "full"))),
    ("may have 1 to 7", state_of([HALF], []), StepPlan(prefill=(PrefillChunk("half", 8),))),
    ("may have 1 to 7", state_of([HALF], []), StepPlan(prefill=(PrefillChunk("half", 0),))),
    (
        "beyond its band",
        state_of([SequenceState("long", 30, 60, 0, 0.0, computed_tokens=10, slot=Slot(0, 0))], []),
        StepPlan(prefill=(PrefillChunk("long", 10),)),
    ),
    ("computes and waits", state_of(TWO, []), StepPlan(decode=DECODE, wait_s=1.0)),
    ("waits -1", state_of([], [waits("w")]), StepPlan(wait_s=-1.0)),
    ("nothing runs and a could", state_of(TWO, []), StepPlan()),
    ("nothing runs and a could", state_of(TWO, []), StepPlan(wait_s=0.001)),
    ("nothing runs, w could enter", state_of([], [waits("w")]), StepPlan()),
    ("nothing runs, w could enter", state_of([FULL], [waits("w")]), StepPlan()),
    ("nothing runs, w could enter", state_of([], [waits("w")], merge_window_s=0.01), StepPlan(wait_s=0.02)),
]


@pytest.mark.parametrize(("state", "plan"), GOOD)
def test_a_plan_that_keeps_its_promises_has_no_problem(state: SchedulerState, plan: StepPlan) -> None:
    """Also when more is running than a cap that was turned down allows, and nothing enters."""
    assert check_plan(state, plan) == []


@pytest.mark.parametrize(("words", "state", "plan"), BAD)
def test_a_plan_that_breaks_one_is_found(words: str, state: SchedulerState, plan: StepPlan) -> None:
    """Each with its own words."""
    problems = check_plan(state, plan)
    assert any(re.search(words, problem) for problem in problems), problems
