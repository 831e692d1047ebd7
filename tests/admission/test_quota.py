"""What tenants may ask for: buckets, places, settling, reload."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.admission.quota import Bucket, Left, Pass, Quotas, Refusal, TenantLimits


def entered(quotas: Quotas, limits: TenantLimits, now_s: float, tenant: str = "t") -> Pass:
    found = quotas.enter(tenant, limits, now_s)
    assert isinstance(found, Pass), found
    return found


def refused(quotas: Quotas, limits: TenantLimits, now_s: float, tenant: str = "t") -> Refusal:
    found = quotas.enter(tenant, limits, now_s)
    assert isinstance(found, Refusal)
    return found


def test_a_burst_is_admitted_and_then_the_rate() -> None:
    """Six a minute with a burst of 20 s: two at once, then one every ten seconds, and the refusal says when."""
    quotas, limits = Quotas(), TenantLimits(requests_per_min=6, burst_s=20)
    entered(quotas, limits, 0.0)
    entered(quotas, limits, 0.0)
    refusal = refused(quotas, limits, 4.0)
    assert refusal.limit == "tenant_requests" and refusal.retry_after_s == pytest.approx(6.0)
    refused(quotas, limits, 9.99)
    entered(quotas, limits, 10.0)


def test_tenants_do_not_share() -> None:
    """One tenant's use leaves the other's whole."""
    quotas, limits = Quotas(), TenantLimits(requests_per_min=1, max_concurrent=1)
    entered(quotas, limits, 0.0, "a")
    refused(quotas, limits, 0.0, "a")
    entered(quotas, limits, 0.0, "b")


def test_places_come_back_when_requests_end_and_a_second_end_changes_nothing() -> None:
    quotas, limits = Quotas(), TenantLimits(max_concurrent=2)
    first, _ = entered(quotas, limits, 0.0), entered(quotas, limits, 0.0)
    assert refused(quotas, limits, 1.0).limit == "tenant_concurrency"
    quotas.leave(first, limits, 1.0, tokens=0)
    quotas.leave(first, limits, 1.0, tokens=0)
    entered(quotas, limits, 1.0)
    assert refused(quotas, limits, 1.0).limit == "tenant_concurrency"
    assert quotas.in_flight() == {"t": 2}


def test_the_wait_for_a_place_follows_how_long_requests_take() -> None:
    """Two places and requests of twenty seconds: one comes free every ten."""
    quotas, limits, now_s = Quotas(), TenantLimits(max_concurrent=2), 0.0
    for _ in range(100):
        one = entered(quotas, limits, now_s)
        now_s += 20.0
        quotas.leave(one, limits, now_s, tokens=0)
    entered(quotas, limits, now_s), entered(quotas, limits, now_s)
    assert refused(quotas, limits, now_s).retry_after_s == pytest.approx(10.0, rel=0.01)  # the mean has come to 20 s


def test_tokens_are_settled_with_what_was_computed() -> None:
    """Charged 80, needed 20: 60 come back. Charged 20, needed 150: the next one waits for the debt."""
    quotas, limits = Quotas(), TenantLimits(tokens_per_min=60, burst_s=100)
    one = entered(quotas, limits, 0.0)
    assert quotas.charge(one, limits, 80, 0.0) is None
    assert quotas.left("t", limits, 0.0) == Left(None, 20)
    quotas.leave(one, limits, 0.0, tokens=20)
    assert quotas.left("t", limits, 0.0) == Left(None, 80)
    two = entered(quotas, limits, 0.0)
    assert quotas.charge(two, limits, 20, 0.0) is None
    quotas.leave(two, limits, 0.0, tokens=150)
    three = entered(quotas, limits, 0.0)
    refusal = quotas.charge(three, limits, 10, 0.0)
    assert refusal is not None and refusal.limit == "tenant_tokens" and refusal.retry_after_s == pytest.approx(80.0)
    assert quotas.charge(three, limits, 10, 80.0) is None


def test_a_request_larger_than_the_bucket_is_admitted_when_it_is_full_and_paid_for_afterwards() -> None:
    quotas, limits = Quotas(), TenantLimits(tokens_per_min=60, burst_s=10)
    one = entered(quotas, limits, 0.0)
    assert quotas.charge(one, limits, 100, 0.0) is None
    again = quotas.charge(one, limits, 100, 0.0)
    assert again is not None and again.limit == "tenant_tokens" and again.retry_after_s == pytest.approx(100.0)
    assert quotas.charge(one, limits, 100, 100.0) is None


def test_what_does_not_count_gives_everything_back() -> None:
    """A request that was shed costs its tenant nothing."""
    quotas, limits = Quotas(), TenantLimits(requests_per_min=1, tokens_per_min=100, max_concurrent=1)
    one = entered(quotas, limits, 0.0)
    assert quotas.charge(one, limits, 100, 0.0) is None
    quotas.leave(one, limits, 0.0, tokens=0, counts=False)
    two = entered(quotas, limits, 0.0)
    assert quotas.charge(two, limits, 100, 0.0) is None


def test_other_limits_hold_at_once_and_use_stays() -> None:
    """After a reload: raised, the tenant goes on; lowered, it waits as if the lower limit had always been there."""
    quotas, low, high = Quotas(), TenantLimits(requests_per_min=1), TenantLimits(requests_per_min=60)
    entered(quotas, low, 0.0)
    refused(quotas, low, 0.0)
    entered(quotas, high, 0.0)
    assert refused(quotas, low, 0.0).retry_after_s == pytest.approx(120.0)


def test_tenants_that_are_gone_are_forgotten_once_nothing_runs() -> None:
    quotas, limits = Quotas(), TenantLimits()
    one = entered(quotas, limits, 0.0, "old")
    quotas.keep({"new"})
    assert quotas.in_flight() == {"old": 1}
    quotas.leave(one, limits, 1.0, tokens=0)
    quotas.keep({"new"})
    assert quotas.in_flight() == {}


times = st.lists(st.floats(0, 30), min_size=1, max_size=60)


@given(st.floats(0.5, 600), st.floats(1, 120), times)
def test_in_any_span_no_more_than_the_burst_and_the_rate(per_min: float, burst_s: float, gaps: list[float]) -> None:
    """Of whatever arrivals, between any two admitted ones there are at most B + R t others and themselves."""
    quotas, limits, now_s = Quotas(), TenantLimits(requests_per_min=per_min, burst_s=burst_s), 0.0
    admitted: list[float] = []
    for gap_s in gaps:
        now_s += gap_s
        if isinstance(quotas.enter("t", limits, now_s), Pass):
            admitted.append(now_s)
    assert limits.requests_held is not None
    for first, start_s in enumerate(admitted):
        for last in range(first, len(admitted)):
            allowed = limits.requests_held + per_min / 60 * (admitted[last] - start_s)
            assert last - first + 1 <= allowed + 1e-6  # floats


@given(st.floats(0.5, 600), st.floats(1, 120), times)
def test_whoever_waits_as_told_is_admitted(per_min: float, burst_s: float, gaps: list[float]) -> None:
    """Retry-After is true: after it, and not much sooner, the request fits, when nobody else came meanwhile."""
    quotas, limits, now_s = Quotas(), TenantLimits(requests_per_min=per_min, burst_s=burst_s), 0.0
    for gap_s in gaps:
        now_s += gap_s
        found = quotas.enter("t", limits, now_s)
        if isinstance(found, Refusal):
            if found.retry_after_s > 0.1:
                assert isinstance(quotas.enter("t", limits, now_s + found.retry_after_s * 0.9), Refusal)
            now_s += found.retry_after_s * (1 + 1e-9)
            assert isinstance(quotas.enter("t", limits, now_s), Pass)


steps = st.lists(
    st.tuples(st.floats(0, 20), st.integers(0, 500), st.integers(0, 500), st.booleans()), min_size=1, max_size=40
)


@given(st.floats(10, 6000), steps)
def test_in_the_long_run_tokens_computed_keep_to_the_rate(per_min: float, given_steps: list[Any]) -> None:
    """However wrong expectations are, what was computed never exceeds burst and rate by more than the last request."""
    quotas, limits, now_s = Quotas(), TenantLimits(tokens_per_min=per_min), 0.0
    computed = largest = 0.0
    for gap_s, expected, real, wait in given_steps:
        now_s += gap_s
        one = entered(quotas, limits, now_s)
        refusal = quotas.charge(one, limits, expected, now_s)
        if refusal is not None and wait:
            now_s += refusal.retry_after_s * (1 + 1e-9)
            refusal = quotas.charge(one, limits, expected, now_s)
            assert refusal is None
        quotas.leave(one, limits, now_s, tokens=0 if refusal else real)
        if refusal is None:
            computed += real
            largest = max(largest, real, expected)
        assert limits.tokens_held is not None
        assert computed <= limits.tokens_held + per_min / 60 * now_s + largest + 1e-6
    assert all(count == 0 for count in quotas.in_flight().values())


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans()), max_size=60), st.integers(1, 5))
def test_never_more_at_once_than_allowed(given_steps: list[tuple[float, bool, bool]], most: int) -> None:
    quotas, limits, now_s = Quotas(), TenantLimits(max_concurrent=most), 0.0
    running: list[Pass] = []
    for gap_s, come, counts in given_steps:
        now_s += gap_s
        if come or not running:
            found = quotas.enter("t", limits, now_s)
            if isinstance(found, Pass):
                running.append(found)
            else:
                assert len(running) == most and found.limit == "tenant_concurrency" and found.retry_after_s > 0
        else:
            quotas.leave(running.pop(0), limits, now_s, tokens=0, counts=counts)
        assert quotas.in_flight().get("t", 0) == len(running) <= most


def test_a_clock_that_goes_back_leaks_nothing() -> None:
    bucket = Bucket(used=5.0, as_of_s=10.0)
    bucket.leak(60.0, 4.0)
    assert (bucket.used, bucket.as_of_s) == (5.0, 10.0)
