"""A tuner beside a virtual engine."""

from __future__ import annotations

import random

import msgspec

from headrace.config.schema import BandConfig, Config, EngineConfig
from headrace.control.grid import grids_of
from headrace.control.tuner import Decision, Tuner
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.simulate.arrivals import RequestStream, feed, requests_of
from headrace.simulate.requests import RequestRecord, Targets
from headrace.simulate.simulation import Simulation
from headrace.simulate.step_times import SMOLLM2_2_THREADS
from headrace.simulate.tuned import TunedEngine
from headrace.simulate.virtual_engine import EngineShape, VirtualEngine

CONFIG = Config(engine=EngineConfig(bands=(BandConfig(2048, 16),)))
CHATS = RequestStream("a", "chat", "poisson(1.5)", "fixed(60)", "fixed(20)", targets=Targets(ttft_s=0.5))


def played(seed: int, duration_s: float = 600.0) -> tuple[list[tuple[float, Decision]], VirtualEngine]:
    """Chats for some time, with windows of 20 s and 5 s to settle."""
    engine = VirtualEngine(EngineShape((Band(2048, 16),)), SMOLLM2_2_THREADS, random.Random(seed))
    seen: list[tuple[float, Decision]] = []
    tuned = TunedEngine(
        engine,
        Tuner(grids_of(CONFIG, steps=1), min_requests=5),
        random.Random(seed),
        window_s=20.0,
        settle_s=5.0,
        batch_cap=16,
        watch=lambda now_s, decision: seen.append((now_s, decision)),
    )
    simulation = Simulation(seed)
    requests = requests_of([CHATS], seed=seed, duration_s=duration_s, longest_tokens=2048)
    simulation.add(*feed(requests, tuned.submit), *tuned.begin(0.0))
    simulation.run(duration_s)
    return seen, engine


def ended_good(records: list[RequestRecord], from_s: float, to_s: float) -> int:
    return sum(record.good for record in records if from_s < (record.ended_s or 0.0) <= to_s)


def test_a_window_counts_what_ended_in_it_and_a_change_is_followed_by_a_pause() -> None:
    seen, engine = played(1)
    records, began_s = list(engine.records.values()), 0.0
    assert any(decision.changes for _, decision in seen)
    for now_s, decision in seen:
        assert now_s == began_s + 20
        bad = sum(not r.good for r in records if began_s < (r.ended_s or 0.0) <= now_s)
        assert decision.reward == (ended_good(records, began_s, now_s) - bad) / 20
        began_s = now_s + (5 if decision.changes else 0)


def test_what_it_decides_is_what_the_engine_runs_with() -> None:
    seen, engine = played(1)
    expected = SchedulingKnobs()
    for _, decision in seen:
        expected = msgspec.structs.replace(expected, **decision.changes)
    assert engine.knobs == expected


def test_a_seed_decides_everything() -> None:
    assert played(2)[0] == played(2)[0]
    assert played(2)[0] != played(3)[0]
