"""Steps that are computed together give the same times and tokens as one by one."""

from __future__ import annotations

from functools import partial
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.step import StepPolicy
from headrace.simulate.baselines.policies import PolicyName, baseline_policy, is_baseline, knobs_for
from headrace.simulate.requests import RequestRecord, Targets, VirtualRequest
from headrace.simulate.simulation import Event
from headrace.simulate.step_times import MeasuredTimes
from tests.simulate.rig import Rig

TIMES = MeasuredTimes([(1, 10.0), (64, 20.0)], context_s=1e-6, pair_s=1e-8, copy_s_per_token=0.0, source="a test")
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def run(policy: PolicyName, requests: list[VirtualRequest], *, joins: bool, kv_tokens: int | None = None) -> Rig:
    """All requests through one engine, an abort among them."""
    own: StepPolicy | None = baseline_policy(policy)
    rig = Rig(
        [Band(2048, 16)],
        times=TIMES,
        policy=own,
        knobs=knobs_for(policy, SchedulingKnobs(), told=True),
        checked=False,
        token_times=True,
        shape={
            "layout": "fused",
            "joins_decodes": joins,
            "kv_tokens": kv_tokens,
            "kv_travels": not is_baseline(policy),
            "watermarks": not is_baseline(policy),
            "overhead_s": 0.001,
        },
    )
    engine = rig.engine
    for request in requests:
        rig.simulation.add(Event(request.arrived_s, partial(engine.submit, request)))
    if requests:
        first = requests[0]
        rig.simulation.add(Event(first.arrived_s + 0.4, lambda now_s: engine.abort(first.request_id, now_s)))
    rig.run()
    return rig


def facts(record: RequestRecord) -> tuple[object, ...]:
    return (
        record.outcome,
        record.admitted_s,
        record.first_token_s,
        record.last_token_s,
        record.ended_s,
        record.output_tokens,
        record.preempted,
        tuple(record.token_s or ()),
    )


REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 4),
        st.integers(1, 400),
        st.integers(1, 120),
        st.sampled_from([0, 10, 50]),
        st.sampled_from([Targets(), Targets(ttft_s=0.5), Targets(tpot_s=0.05), Targets(e2e_s=1.0)]),
        st.sampled_from(["a", "b"]),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(drawn=REQUESTS, policy=st.sampled_from(POLICIES), kv_tokens=st.sampled_from([None, 20_000]))
def test_joined_steps_are_single_steps_to_the_bit(
    drawn: list[tuple[float, int, int, int, Targets, str]], policy: PolicyName, kv_tokens: int | None
) -> None:
    """Whatever arrives when, under each policy: every token has the same time."""
    requests = [
        VirtualRequest(f"r{n}", at_s, prompt, output, lane, tenant=lane, priority=priority, targets=targets)
        for n, (at_s, prompt, output, priority, targets, lane) in enumerate(sorted(drawn, key=lambda one: one[0]))
    ]
    single = run(policy, requests, joins=False, kv_tokens=kv_tokens)
    joined = run(policy, requests, joins=True, kv_tokens=kv_tokens)
    for name, record in single.engine.records.items():
        assert facts(joined.record(name)) == facts(record)
    assert joined.engine.steps == single.engine.steps
    assert joined.engine.busy_s == pytest.approx(single.engine.busy_s)
    assert joined.simulation.happened <= single.simulation.happened


def test_a_long_answer_takes_few_events() -> None:
    """A thousand tokens alone: runs double up to their longest."""
    rig = run("hybrid", [VirtualRequest("a", 0.0, 10, 8), VirtualRequest("b", 1.0, 10, 1000)], joins=True)
    assert rig.record("b").output_tokens == 1000
    assert rig.engine.steps > 1000 and rig.simulation.happened < 60
