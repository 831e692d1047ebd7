"""The generator's own health, and what makes a run not valid."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from typing import Any

import pytest

from headrace.bench.drive.health import Collector, HealthProbe, machine_facts, raise_file_limit
from headrace.bench.records import GENERATOR_FAULT, GeneratorHealth, RequestRecord
from headrace.bench.results.validity import SEND_LAG_LIMIT_S, validity
from tests.bench.simulated_loop import SimulatedLoop, simulate

MS = 1_000_000
HEALTHY = GeneratorHealth(0.3, 0.001, 10)


def record(lag_ms: float | None, **fields: Any) -> RequestRecord:
    sent_ns = None if lag_ms is None else 1000 * MS + round(lag_ms * MS)
    return RequestRecord(index=0, class_name="c", outcome="ok", due_ns=0, ready_ns=1000 * MS, sent_ns=sent_ns, **fields)


# Validity


def test_a_run_within_its_limits_is_valid() -> None:
    found = validity([record(1)] * 99 + [record(500)], HEALTHY)
    assert found.valid
    assert found.send_lag_p99_s == pytest.approx(0.001)
    assert found.send_lag_limit_s == SEND_LAG_LIMIT_S == 0.010


def test_sending_late_makes_it_invalid_and_says_how_late_and_what_the_limit_is() -> None:
    found = validity([record(1)] * 98 + [record(30)] * 2, HEALTHY)
    assert not found.valid
    assert found.send_lag_p99_s == pytest.approx(0.030)
    assert "send lag p99 30 ms, limit 10 ms" in found.reasons[0]


def test_the_limit_is_the_callers() -> None:
    records = [record(30)] * 100
    assert validity(records, HEALTHY, send_lag_limit_s=0.05).valid
    assert not validity(records, HEALTHY, send_lag_limit_s=0.02).valid


def test_lag_counts_from_when_a_request_could_be_sent() -> None:
    late_turn = RequestRecord(index=0, class_name="c", outcome="ok", due_ns=0, ready_ns=900 * MS, sent_ns=901 * MS)
    assert validity([late_turn] * 100, HEALTHY).valid


def test_a_busy_or_lagging_generator_is_invalid() -> None:
    assert "95% of a core" in validity([record(1)], GeneratorHealth(0.95, 0.001, 1)).reasons[0]
    assert "p99 of 20 ms" in validity([record(1)], GeneratorHealth(0.5, 0.020, 1)).reasons[0]


def test_failures_of_the_generators_machine_make_it_invalid() -> None:
    failed = record(1, error=GENERATOR_FAULT + "Too many open files")
    found = validity([failed, failed, *[record(1)] * 200], HEALTHY)
    assert found.reasons == ("2 requests failed because of the generator's machine: Too many open files",)


def test_a_run_that_sent_nothing_is_invalid() -> None:
    assert validity([], HEALTHY).reasons == ("nothing was sent",)
    assert validity([record(None)], HEALTHY).reasons == ("nothing was sent",)


# The probe


def probe_in_simulated_time(block_ms: dict[int, int]) -> GeneratorHealth:
    """A second (about 50 probes: the p99 is the worst) in which at some times the loop stands still for a while."""
    loop = SimulatedLoop()

    async def go() -> GeneratorHealth:
        probe = HealthProbe(loop.now_ns, cpu_ns=lambda: loop.now_ns() // 4)
        probe.start()
        for at_ms, for_ms in block_ms.items():
            loop.call_at(at_ms / 1e3, loop.jump, for_ms / 1e3)
        await asyncio.sleep(1)
        probe.stop()
        return probe.result(peak_in_flight=7)

    return simulate(loop, go())


def test_an_idle_loop_has_no_lag() -> None:
    health = probe_in_simulated_time({})
    assert health.loop_lag_p99_s < 1e-6
    assert health.cpu_share == pytest.approx(0.25)
    assert health.peak_in_flight == 7


def test_a_loop_that_stands_still_is_late_by_as_much() -> None:
    # The timer that was due during the stop was so up to 20 ms after its beginning.
    assert 0.080 <= probe_in_simulated_time({500: 100}).loop_lag_p99_s <= 0.100


def test_a_loop_that_stands_still_at_the_end_shows_it() -> None:
    assert probe_in_simulated_time({990: 300}).loop_lag_p99_s >= 0.280


def test_stopping_ends_the_measurement() -> None:
    cpu_ns = iter([0, 0, 50, 1_000_000])
    clock_ns = iter([0, 0, 0, 100, 1_000_000])
    loop = SimulatedLoop()

    async def go() -> GeneratorHealth:
        probe = HealthProbe(lambda: next(clock_ns), cpu_ns=lambda: next(cpu_ns))
        probe.start()
        probe.stop()
        probe.stop()
        return probe.result(0)

    assert simulate(loop, go()).cpu_share == 0.5


# The collector


def test_the_collector_is_as_before_after_the_run() -> None:
    collector = Collector(time.monotonic_ns)
    assert gc.isenabled()
    frozen = gc.get_freeze_count()
    with collector.quiet():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > frozen
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_tidying_waits_for_a_moment_without_work_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(now_ns))
    collector = Collector(lambda: now_ns)
    for now_ns, until_due_ms in ((500, 100), (1500, 1), (2500, 1), (2600, 100), (3000, 100), (3700, None), (9000, 0)):
        now_ns *= MS
        collector.tidy(None if until_due_ms is None else until_due_ms * MS)
    assert [at // MS for at in collected] == [2600, 3700, 9000]


# The machine


def test_the_limit_of_open_files_is_raised_as_far_as_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert raise_file_limit(100) is None
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
        if hard != resource.RLIM_INFINITY:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
            warning = raise_file_limit(hard)
            assert warning is not None
            assert f"may open {hard} files" in warning
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_machine_is_described() -> None:
    facts = machine_facts("uvloop")
    assert facts["event_loop"] == "uvloop"
    cores, usable = facts["cores"], facts["cores_for_us"]
    assert isinstance(cores, int)
    assert isinstance(usable, int)
    assert cores >= usable >= 1
    assert facts["processor"]
