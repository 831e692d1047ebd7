"""A virtual engine with a simulation of its own, for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState, StepPlan, StepTimes
from headrace.simulate.requests import RequestRecord, VirtualRequest
from headrace.simulate.simulation import Simulation
from headrace.simulate.virtual_engine import EngineShape, VirtualEngine


class RowTimes:
    """A row takes a millisecond, copying a token 10 µs: times that can be worked out by hand."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return rows * 1e-3

    def move_s(self, tokens: int, band: int) -> float:
        return tokens * 1e-5


@dataclass
class Scripted:
    """A policy that gives prepared plans, then empty ones."""

    plans: list[StepPlan]
    states: list[SchedulerState] = field(default_factory=list)

    def plan(self, state: SchedulerState) -> StepPlan:
        self.states.append(state)
        return self.plans.pop(0) if self.plans else StepPlan()


class Rig:
    """One engine, submitted to and looked at by hand. Copying KV takes no time unless ``shape`` says so."""

    def __init__(
        self,
        bands: Sequence[Band] = (Band(4096, 4),),
        *,
        times: StepTimes | None = None,
        seed: int = 0,
        shape: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self.simulation = Simulation(seed)
        self.engine = VirtualEngine(
            EngineShape(tuple(bands), **{"copy_s_per_token": 0.0, **(shape or {})}),
            RowTimes() if times is None else times,
            self.simulation.random("engine"),
            **{"knobs": SchedulingKnobs(strategy="continuous"), "checked": True, **engine},
        )

    def submit(self, request_id: str, prompt_tokens: int, output_tokens: int, **more: Any) -> None:
        """Send a request now."""
        now_s = self.simulation.now_s
        request = VirtualRequest(request_id, now_s, prompt_tokens, output_tokens, **more)
        self.simulation.add(*self.engine.submit(request, now_s))

    def run(self, until_s: float = math.inf) -> None:
        """Up to a time, or until nothing happens any more."""
        self.simulation.run(until_s)
        problem = self.engine.check_integrity()
        assert problem is None, problem

    def record(self, request_id: str) -> RequestRecord:
        return self.engine.records[request_id]

    def sequence(self, request_id: str) -> SequenceState:
        """A live sequence."""
        return next(s for s in (*self.engine.running, *self.engine.waiting) if s.request_id == request_id)
