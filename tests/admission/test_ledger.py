"""The ledger counts right whatever happens to requests, in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.admission.ledger import RATE_MEMORY_S, Entry, Ledger
from headrace.admission.lengths import OutputLength
from headrace.admission.predict import Waiting

LENGTH = OutputLength(expected_tokens=8, likely_tokens=20)


def test_a_sequence_waits_runs_and_ends() -> None:
    ledger = Ledger()
    entry = ledger.admit("a", (10, 20), length=LENGTH, held=True, now_s=0.0)
    assert (ledger.waiting, ledger.waiting_prefill_tokens, ledger.lane("a").held) == (2, 30, 2)
    ledger.release_hold(entry)
    ledger.started(entry, 0, 1.0)
    ledger.started(entry, 0, 1.0)
    assert (ledger.waiting, ledger.running, ledger.waiting_prefill_tokens) == (1, 1, 20)
    ledger.ended(entry, 0)
    ledger.close(entry)
    ledger.close(entry)
    assert (ledger.waiting, ledger.running, ledger.waiting_prefill_tokens, ledger.empty) == (0, 0, 0, True)


def test_the_drain_rate_is_measured_while_something_waits() -> None:
    ledger = Ledger()
    assert ledger.drain(0.0).sequences_per_s is None
    entries = [ledger.admit("a", (100,), length=LENGTH, held=False, now_s=10.0) for _ in range(5)]
    for number, entry in enumerate(entries[:4], 1):
        ledger.started(entry, 0, 10.0 + number)
    rate = ledger.drain(14.0)
    assert rate.sequences_per_s == pytest.approx(1.0)
    assert rate.prefill_tokens_per_s == pytest.approx(100.0)


def test_idle_time_does_not_slow_the_rate() -> None:
    ledger = Ledger()
    ledger.started(ledger.admit("a", (1,), length=LENGTH, held=False, now_s=0.0), 0, 1.0)
    entry = ledger.admit("a", (1,), length=LENGTH, held=False, now_s=1000.0)
    ledger.started(entry, 0, 1000.5)
    ledger.admit("a", (1,), length=LENGTH, held=False, now_s=1000.5)
    assert ledger.drain(1000.5).sequences_per_s is None
    assert ledger.drain(1001.0).sequences_per_s is None


def test_a_running_sequence_has_fewer_and_fewer_tokens_to_come_and_a_long_one_the_likely_rest() -> None:
    ledger = Ledger()
    entry = ledger.admit("a", (10,), length=LENGTH, held=False, now_s=0.0)
    assert ledger.backlog("a", 0.0).lanes["a"].waiting == Waiting(1, 10, 8)
    ledger.started(entry, 0, 1.0)
    remaining = []
    for _ in range(21):
        ledger.generated(entry, 0, 1)
        remaining.append(ledger.backlog("a", 1.0).lanes["a"].running_output_tokens)
    assert remaining == [7, 6, 5, 4, 3, 2, 1, *range(12, -1, -1), 0]
    ledger.restarted(entry)
    assert ledger.backlog("a", 1.0).lanes["a"].waiting == Waiting(1, 10, 8)


def test_what_waits_in_a_lane_is_told_by_tenant() -> None:
    ledger = Ledger()
    ledger.admit("a", (10, 20), length=LENGTH, held=True, now_s=0.0, tenant="x")
    started = ledger.admit("a", (30,), length=LENGTH, held=False, now_s=0.0)
    ledger.admit("b", (40,), length=LENGTH, held=False, now_s=0.0, tenant="x")
    assert ledger.backlog("a", 0.0).tenants == {"x": Waiting(2, 30, 16), None: Waiting(1, 30, 8)}
    ledger.started(started, 0, 0.0)
    assert ledger.backlog("a", 0.0).tenants == {"x": Waiting(2, 30, 16)}


def test_the_rate_of_arrivals_is_that_of_the_last_seconds() -> None:
    """100 tokens a second; after as long as the memory without any, e times less."""
    ledger = Ledger()
    for second in range(100):
        ledger.close(ledger.admit("a", (100,), length=LENGTH, held=False, now_s=float(second)))
    rate = ledger.backlog("a", 99.0).lanes["a"].arriving_prefill_tokens_per_s
    # A sum of steps instead of an integral: up to half a step of 1 s in 10 too much.
    assert rate == pytest.approx(100, rel=0.06)
    later = ledger.backlog("a", 99.0 + RATE_MEMORY_S).lanes["a"].arriving_prefill_tokens_per_s
    assert later == pytest.approx(rate / 2.71828, rel=1e-4)


def test_the_oldest_that_waits_in_a_lane_is_known() -> None:
    ledger = Ledger()
    first = ledger.admit("a", (1, 1), length=LENGTH, held=False, now_s=10.0)
    second = ledger.admit("a", (1,), length=LENGTH, held=True, now_s=12.0)
    ledger.started(first, 0, 13.0)
    assert ledger.backlog("a", 14.0).lanes["a"].oldest_s == 4
    ledger.ended(first, 1)
    assert ledger.backlog("a", 14.0).lanes["a"].oldest_s == 2
    ledger.close(second)
    assert ledger.backlog("a", 14.0).lanes["a"].oldest_s == 0


def test_time_without_a_first_token_counts_while_something_waits() -> None:
    ledger = Ledger()
    assert ledger.backlog("a", 5.0).since_progress_s == 0
    first = ledger.admit("a", (1,), length=LENGTH, held=False, now_s=10.0)
    ledger.admit("a", (1,), length=LENGTH, held=False, now_s=12.0)
    assert ledger.backlog("a", 13.0).since_progress_s == 3
    ledger.started(first, 0, 13.0)
    assert ledger.backlog("a", 14.0).since_progress_s == 1


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.entries: list[Entry] = []
        self.now_s = 0.0

    @rule(
        lane=st.sampled_from("ab"),
        tenant=st.sampled_from([None, "x"]),
        prompts=st.lists(st.integers(1, 99), min_size=1, max_size=3),
        expected=st.integers(0, 9),
        held=st.booleans(),
    )
    def admit(self, lane: str, tenant: str | None, prompts: list[int], expected: int, held: bool) -> None:
        self.now_s += 1
        length = OutputLength(expected, 2 * expected)
        entry = self.ledger.admit(lane, tuple(prompts), length=length, held=held, now_s=self.now_s, tenant=tenant)
        self.entries.append(entry)

    @rule(data=st.data(), what=st.sampled_from(["release_hold", "started", "generated", "ended", "restarted", "close"]))
    def happen(self, data: st.DataObject, what: str) -> None:
        if not self.entries:
            return
        entry = data.draw(st.sampled_from(self.entries))
        index = data.draw(st.integers(0, len(entry.stages) - 1))
        self.now_s += 1
        match what:
            case "release_hold":
                self.ledger.release_hold(entry)
            case "started":
                self.ledger.started(entry, index, self.now_s)
            case "generated":
                self.ledger.generated(entry, index, data.draw(st.integers(0, 12)))
            case "ended":
                self.ledger.ended(entry, index)
            case "restarted":
                self.ledger.restarted(entry)
            case "close":
                self.ledger.close(entry)
                self.entries.remove(entry)

    @invariant()
    def counts_agree(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.empty == (not self.entries)


TestLedger = LedgerMachine.TestCase
