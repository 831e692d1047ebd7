"""The ledger counts right whatever happens to requests, in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.admission.ledger import Entry, Ledger


def test_a_sequence_waits_runs_and_ends() -> None:
    ledger = Ledger()
    entry = ledger.admit("a", (10, 20), held=True, now_s=0.0)
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
    entries = [ledger.admit("a", (100,), held=False, now_s=10.0) for _ in range(5)]
    for number, entry in enumerate(entries[:4], 1):
        ledger.started(entry, 0, 10.0 + number)
    rate = ledger.drain(14.0)
    assert rate.sequences_per_s == pytest.approx(1.0)
    assert rate.prefill_tokens_per_s == pytest.approx(100.0)


def test_idle_time_does_not_slow_the_rate() -> None:
    ledger = Ledger()
    ledger.started(ledger.admit("a", (1,), held=False, now_s=0.0), 0, 1.0)
    entry = ledger.admit("a", (1,), held=False, now_s=1000.0)
    ledger.started(entry, 0, 1000.5)
    ledger.admit("a", (1,), held=False, now_s=1000.5)
    assert ledger.drain(1000.5).sequences_per_s is None
    assert ledger.drain(1001.0).sequences_per_s is None


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.entries: list[Entry] = []
        self.now_s = 0.0

    @rule(lane=st.sampled_from("ab"), prompts=st.lists(st.integers(1, 99), min_size=1, max_size=3), held=st.booleans())
    def admit(self, lane: str, prompts: list[int], held: bool) -> None:
        self.now_s += 1
        self.entries.append(self.ledger.admit(lane, tuple(prompts), held=held, now_s=self.now_s))

    @rule(data=st.data(), what=st.sampled_from(["release_hold", "started", "ended", "restarted", "close"]))
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
