"""What a scrape shows of the moment, and the engine's counts over its restarts."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from headrace.admission.lengths import OutputLength
from headrace.messages.engine import EngineLoad
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.moment import Counts, EngineCounts, Sources

LOAD = EngineLoad(1, 0, 1, 4, 1, 4, 0, 0.1, 1, 0, 1, batch_cap=12, fragmentation=0.25, parked=3)


def load(**values: object) -> EngineLoad:
    return msgspec.structs.replace(LOAD, **values)


def counted(*loads: EngineLoad) -> Counts:
    counts = EngineCounts()
    for one in loads:
        counts.seen(one)
    return counts.totals


def test_counts_go_on_when_the_engine_starts_again_from_nothing() -> None:
    before = load(moves=5, victims=2, cut_steps=1, prefix_query_tokens=90, prefix_hit_tokens=40, prefix_saved_s=0.5)
    before = msgspec.structs.replace(before, kv_parked=7, kv_spills=3, kv_dropped=2, kv_conversions=6)
    assert counted(before, before) == (5, 2, 1, 90, 40, 0.5, 7, 3, 2, 6)
    assert counted(before, load(moves=1), load(moves=3, victims=1)) == (8, 3, 1, 90, 40, 0.5, 7, 3, 2, 6)
    assert counted(before, load(), before) == (10, 4, 2, 180, 80, 1.0, 14, 6, 4, 12)


def watched(*loads: EngineLoad) -> tuple[Metrics, list[EngineLoad]]:
    metrics, current = Metrics("1"), list(loads)
    metrics.watch(
        Sources(
            lanes=dict,
            load=lambda: current[-1],
            ready=lambda: None,
            lengths=lambda: {"a": OutputLength(20, 70)},
            ttft_errors=lambda: {"a": 0.5},
        )
    )
    return metrics, current


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Values by name and label values, in the order of the labels' names."""
    text = metrics.exposition().decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_engines_report_is_shown() -> None:
    reuse = {"prefix_query_tokens": 70, "prefix_hit_tokens": 30, "prefix_saved_s": 0.25}
    metrics, current = watched(load(moves=4, victims=1, cut_steps=2, **reuse))
    metrics.step_ended(current[-1])
    current.append(load(idle_residents=2, idle_resident_tokens=55, lane_shares={"a": 0.75, "b": 0.125}))
    found = samples(metrics)
    assert found["headrace_batch_cap",] == 12
    assert found["headrace_slot_fragmentation_ratio",] == 0.25
    assert found["headrace_parked_sequences",] == 3
    assert found["headrace_slot_moves_total",] == 4
    assert found["headrace_preemptions_total",] == 1
    assert found["headrace_cut_steps_total",] == 2
    assert found["headrace_prefix_query_tokens_total",] == 70
    assert found["headrace_prefix_hit_tokens_total",] == 30
    assert found["headrace_prefix_saved_seconds_total",] == 0.25
    assert found["headrace_prefix_idle_streams",] == 2
    assert found["headrace_prefix_idle_tokens",] == 55
    assert found["headrace_lane_engine_ratio", "a"] == 0.75
    assert found["headrace_lane_engine_ratio", "b"] == 0.125
    assert found["headrace_expected_output_tokens", "a", "mean"] == 20
    assert found["headrace_expected_output_tokens", "a", "p90"] == 70
    assert found["headrace_ttft_prediction_error_ratio", "a"] == 0.5


def test_the_strategy_in_force_is_shown_with_its_reason_and_nothing_before_there_is_one() -> None:
    metrics, current = watched(LOAD)
    assert not any(name[0] == "headrace_scheduling_strategy" for name in samples(metrics))
    current.append(load(strategy="auto:static", reason="offline: none of 93 requests has a target or streams"))
    assert {key: value for key, value in samples(metrics).items() if key[0] == "headrace_scheduling_strategy"} == {
        ("headrace_scheduling_strategy", "offline", "auto:static"): 1.0
    }


def test_an_engines_words_do_not_become_labels_without_end() -> None:
    metrics, current = watched(LOAD)
    seen = set()
    for number in range(100):
        current.append(load(strategy=f"made up {number}", reason=f"because of {number} " + "x" * 1000))
        seen |= {key for key in samples(metrics) if key[0] == "headrace_scheduling_strategy"}
    assert {strategy for _, _, strategy in seen} == {"other"}
    assert len(seen) == 17
    assert max(len(reason) for _, reason, _ in seen) == 80
