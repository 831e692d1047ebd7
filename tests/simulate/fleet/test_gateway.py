"""What the simulated gateway does: lanes, admission, routing, failures, scaling, prefixes, split replicas."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.bench.records import RequestRecord
from headrace.simulate.fleet.run import SimulatedRun
from tests.simulate.fleet.small import MIX, run_of, scenario_of, workload_of

ONE = {"all": {"input_length": 100, "output_length": 10}}


def outcomes(run: SimulatedRun) -> Counter[str]:
    return Counter(record.outcome for record in run.records)


def mean_ttft_s(run: SimulatedRun, chosen: str | None = None) -> float:
    times = [ttft_s(record) for record in run.records if chosen in (None, record.class_name) and record.first_ns]
    return sum(times) / len(times)


def ttft_s(record: RequestRecord) -> float:
    assert record.first_ns is not None and record.sent_ns is not None
    return (record.first_ns - record.sent_ns) / 1e9


def test_a_lone_request_takes_what_its_steps_take() -> None:
    """A prompt of 100 tokens: overhead 1 ms + 10 ms (weights, longer than 100 rows' computing), and its pairs; each
    further token a step of its own."""
    run = run_of(scenario_of(), workload_of("constant(1)", 1.0, ONE))
    (record,) = run.records
    assert record.first_ns is not None and record.end_ns is not None and record.sent_ns is not None
    assert (record.first_ns - record.sent_ns) / 1e9 == pytest.approx(0.011 + 1e-9 * 5050, abs=1e-6)
    gaps = [(later - before) / 1e9 for before, later in zip(record.chunk_ns, record.chunk_ns[1:], strict=False)]
    assert gaps == pytest.approx([0.011 + 1e-7 * (100 + n) for n in range(9)], abs=1e-6)
    assert record.outcome == "ok" and record.usage_seen and record.output_tokens == 10


def test_the_network_is_on_both_ways() -> None:
    """Sent when due, answered 20 ms later than without."""
    near = run_of(scenario_of(), workload_of("constant(1)", 1.0, ONE))
    far = run_of(scenario_of(gateway={"network_s": 0.01}), workload_of("constant(1)", 1.0, ONE))
    assert mean_ttft_s(far) - mean_ttft_s(near) == pytest.approx(0.02, abs=1e-6)
    assert far.records[0].sent_ns == far.records[0].due_ns


def test_admission_sheds_what_would_be_late() -> None:
    """Far beyond capacity: with admission many are shed with a Retry-After and the others are in time; without, nobody
    is shed and most are late."""
    workload = workload_of("poisson(300)", 20.0)
    shedding = run_of(scenario_of(), workload)
    patient = run_of(scenario_of(gateway={"admission": False}), workload)
    assert outcomes(shedding)["shed"] > 500 and outcomes(patient)["shed"] == 0
    shed = [record for record in shedding.records if record.outcome == "shed"]
    assert all(record.status == 429 and (record.retry_after_s or 0) >= 1 for record in shed)
    assert mean_ttft_s(shedding, "decision") < 0.5 * mean_ttft_s(patient, "document")


def test_a_lane_that_is_not_there_is_a_400() -> None:
    """Where a configuration names the lanes, as served; and what is illegal is refused with a right status."""
    classes = {"all": {**ONE["all"], "lane": "realtime"}}
    workload = workload_of("constant(10)", 5.0, classes, malformed={"share": 0.5})
    run = run_of(scenario_of(), workload)
    illegal = [record for record in run.records if record.malformed is not None]
    assert illegal and {record.outcome for record in illegal} == {"rejected"}
    from headrace.bench.results.judge import judge_refusal

    assert {judge_refusal(record) for record in illegal} == {"right"}


def test_a_prompt_longer_than_any_context_is_refused() -> None:
    """400, as the real gateway says."""
    run = run_of(
        scenario_of(engine={"max_context_tokens": 64}), workload_of("constant(5)", 2.0, {"all": {**ONE["all"]}})
    )
    assert {(record.outcome, record.status) for record in run.records} == {("rejected", 400)}


def test_a_dead_replica_loses_what_it_had() -> None:
    """What had tokens is cut, what had none is tried elsewhere once, or is a 503 where nothing may be retried."""
    fault = {"kind": "dies", "replica": "main/0", "at_s": 5.0, "for_s": 5.0, "noticed_s": 0.5}
    workload = workload_of("poisson(40)", 12.0)
    for retries in (0, 1):
        run = run_of(scenario_of(faults=[fault], gateway={"retries": retries, "admission": False}), workload)
        assert outcomes(run)["cut"] > 0
        assert (outcomes(run)["http_error"] > 0) == (retries == 0)
        cut = [record for record in run.records if record.outcome == "cut"]
        assert all(record.chunk_ns and record.chunk_ns[-1] <= 5.0e9 < (record.end_ns or 0) for record in cut)


def test_a_slow_replica_gets_less_where_waits_are_looked_at() -> None:
    """Ten times as slow for the whole run: by predicted wait it gets a smaller part than by turns."""
    fault = {"kind": "slow", "replica": "main/0", "at_s": 0.0, "for_s": 100.0, "factor": 10.0}
    parts = {}
    for routing in ("round-robin", "least-wait"):
        run = run_of(
            scenario_of(faults=[fault], gateway={"routing": routing, "admission": False}), workload_of(duration_s=20.0)
        )
        slow, fast = run.groups[0].replicas
        parts[routing] = slow.routed / (slow.routed + fast.routed)
    assert parts["round-robin"] == pytest.approx(0.5, abs=0.01)
    assert parts["least-wait"] < 0.3


def test_stale_metrics_send_too_many_to_one() -> None:
    """Looked at once in five seconds, the replica that was emptiest gets everything until the next look."""
    fresh = run_of(scenario_of(gateway={"routing": "least-wait"}), workload_of("poisson(60)", 20.0))
    stale = run_of(
        scenario_of(gateway={"routing": "least-wait", "metrics_interval_s": 5.0}), workload_of("poisson(60)", 20.0)
    )
    assert mean_ttft_s(stale, "chat") > 1.2 * mean_ttft_s(fresh, "chat")


def test_a_group_grows_with_its_load_and_shrinks_after_it() -> None:
    """From 1 replica to more in a burst, each after its warm-up, and back when it has been calm."""
    scaling = {"least": 1, "most": 6, "interval_s": 2.0, "warmup_s": 5.0, "calm_s": 20.0}
    engine = {"stated": {"weights_s": 1e-3, "row_s": 1e-4}}
    groups = {"main": {"replicas": 1, "engine": engine, "scaling": scaling, "price_per_hour": 3.6}}
    workload = workload_of("burst(2, 150, at=20, length=60)", 200.0, ONE)
    run = run_of(scenario_of(groups=groups, gateway={"admission": False}), workload, drain_s=300.0)
    group = run.groups[0]
    assert group.most_replicas >= 3
    assert 1.0 < group.mean_replicas < group.most_replicas
    paid_s = sum(one.paid_s for one in group.replicas)
    assert group.cost == pytest.approx(paid_s * 3.6 / 3600)
    assert group.replicas[0].paid_s == pytest.approx(run.info.wall_s)
    assert set(outcomes(run)) == {"ok"}


def test_shared_prefixes_are_computed_once() -> None:
    """Prompts of 1,100 tokens that share 1,024: their first tokens come sooner than where nothing is kept."""
    classes = {"all": {"input_length": 76, "output_length": 5, "shared_prefix": {"tokens": 1024, "count": 2}}}
    workload = workload_of("poisson(15)", 20.0, classes)
    kept = run_of(scenario_of(engine={"prefix_cache": True}), workload)
    computed = run_of(scenario_of(engine={"prefix_cache": False}), workload)
    assert mean_ttft_s(kept) < 0.5 * mean_ttft_s(computed)
    replicas = kept.groups[0].replicas
    hits = sum(one.hit_tokens for one in replicas) / sum(one.asked_tokens for one in replicas)
    assert 0.8 < hits < 1024 / 1100
    assert any(record.cached_tokens == 1024 for record in kept.records)


def test_prefix_routing_finds_more_in_caches() -> None:
    """Conversations over four replicas: more of their prompts is found where their last turn was."""
    classes = {
        "chat": {
            "input_length": 60,
            "output_length": 20,
            "session": {"turns": "uniform(3, 8)", "think_ms": 1000},
        }
    }
    groups = {"main": {"replicas": 4, "engine": {"stated": {"weights_s": 0.01, "row_s": 1e-4}}}}
    shares = {}
    for routing in ("random", "prefix", "gateway"):
        run = run_of(
            scenario_of(groups=groups, gateway={"routing": routing}), workload_of("poisson(20)", 30.0, classes)
        )
        replicas = run.groups[0].replicas
        shares[routing] = sum(one.hit_tokens for one in replicas) / sum(one.asked_tokens for one in replicas)
    assert shares["prefix"] > 1.5 * shares["random"]
    assert shares["gateway"] > 1.5 * shares["random"]


def test_split_replicas_pass_the_kv_on() -> None:
    """The first token comes from a prefill replica; the second after its KV's journey: 100 tokens of 1 MB at 1 GB/s are
    0.1 s."""
    engine = {"stated": {"weights_s": 0.01, "row_s": 1e-4}, "kv_bytes_per_token": 1_000_000}
    groups = {
        "prompts": {"role": "prefill", "engine": engine},
        "tokens": {"role": "decode", "engine": engine},
    }
    run = run_of(
        scenario_of(groups=groups, link={"gb_per_s": 1.0, "latency_s": 0.001}), workload_of("constant(1)", 1.0, ONE)
    )
    (record,) = run.records
    assert record.outcome == "ok" and record.output_tokens == 10
    gaps = [(later - before) / 1e9 for before, later in zip(record.chunk_ns, record.chunk_ns[1:], strict=False)]
    assert gaps[0] == pytest.approx(0.1 + 0.001 + 0.01, abs=1e-6)
    assert gaps[1:] == pytest.approx([0.01] * 8, abs=1e-6)
    assert [sum(one.steps for one in group.replicas) for group in run.groups] == [1, 9]


def test_a_closed_loop_keeps_its_users_busy() -> None:
    """Never more in flight than users, and each sends again as soon as its answer is there."""
    run = run_of(scenario_of(), workload_of("closed(3)", 5.0, ONE))
    assert run.peak_in_flight == 3
    assert run.info.concurrency == 3
    by_user = Counter(record.user for record in run.records)
    assert len(by_user) == 3 and min(by_user.values()) > 20
    last = max(record.due_ns for record in run.records)
    assert last < 5e9


def test_a_later_turn_waits_for_the_one_before() -> None:
    """Also where its time came long before."""
    classes = {
        "chat": {"input_length": 50, "output_length": 200, "session": {"turns": 3, "think_ms": 10}},
    }
    run = run_of(scenario_of(), workload_of("poisson(2)", 10.0, classes), drain_s=200.0)
    by_turn = {(record.session, record.turn): record for record in run.records}
    later = [record for record in run.records if record.turn]
    assert later
    for record in later:
        before = by_turn[record.session, record.turn - 1]
        assert record.ready_ns >= (before.end_ns or 0) - 1
        assert record.ready_ns >= record.due_ns


def test_what_the_drain_does_not_see_end_is_cancelled() -> None:
    """Its record says what it had."""
    classes = {"all": {"input_length": 50, "output_length": 400}}
    run = run_of(scenario_of(), workload_of("constant(2)", 2.0, classes), drain_s=1.0)
    assert set(outcomes(run)) == {"cancelled"}
    assert all(0 < record.output_tokens < 400 for record in run.records)


def test_lanes_hold_where_first_come_does_not() -> None:
    """At a load of about nine tenths with documents, headrace's own policy keeps decisions in time at the cost of
    documents; first come, first served does not."""
    workload = workload_of("poisson(62)", 30.0, {**MIX, "document": {**MIX["document"], "weight": 2}})
    p99 = {}
    for policy in ("vllm", "hybrid"):
        run = run_of(
            scenario_of(engine={"policy": policy, "scheduling": {"urgent_step_s": 0.06}}, gateway={"admission": False}),
            workload,
            drain_s=300.0,
        )
        decisions = sorted([((r.end_ns or 0) - r.due_ns) / 1e9 for r in run.records if r.class_name == "decision"])
        p99[policy] = decisions[int(0.99 * len(decisions))]
    assert p99["hybrid"] < 0.7 * p99["vllm"]
