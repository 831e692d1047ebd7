"""The step policy: what the next forward pass computes.

``StepPolicy`` is the seam that DESIGN describes: plain state in, a ``StepPlan`` out, no clock, no I/O. The
embedded engine applies the plan; the simulator and the vLLM plug-in carry out the same terms (order,
admissibility, step budget, caps, victim).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.memory import MemoryLimits
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.traffic import Traffic


class StepTimes(Protocol):
    """Predicted times, seconds; ``scheduling.cost.CostModel`` is one. Never changes by being asked."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """One forward pass over ``rows`` tokens (see ``cost.Call``)."""

    def move_s(self, tokens: int, band: int) -> float:
        """Copying the KV of one sequence of ``tokens`` within a band."""


class FlatTimes:
    """Knows nothing: a row costs a millisecond, a move nothing. For engines that measure nothing, and for tests."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return rows * 1e-3

    def move_s(self, tokens: int, band: int) -> float:
        return 0.0


class SchedulerState(Struct, frozen=True):
    """What a policy may look at. ``free_streams[b]`` counts free streams of band ``b``.

    ``fused`` says whether decodes and prefill chunks of one plan share a forward pass (vLLM) or are computed one
    after the other (libllama), so that a chunk only delays what comes after it. ``lane_shares`` is each lane's
    share of engine time lately, 0 to 1 (``scheduling.shares``). ``urgent_seen_s`` is when a sequence with a target
    was last alive. ``traffic`` describes the latest requests, for ``auto``.
    ``batch_cap`` is the knee of step time and ``crowd`` a batch size nearly as good as any (``scheduling.caps``; 0: not
    known). ``strategy`` is what the last plan said of itself (``StepPlan.strategy``), empty at first. ``memory`` bounds
    what sequences may hold together; None where every stream has memory of its own.
    """

    now_s: float
    bands: tuple[Band, ...]
    free_streams: tuple[int, ...]
    waiting: Collection[SequenceState]
    running: Sequence[SequenceState]
    knobs: SchedulingKnobs
    times: StepTimes = FlatTimes()
    fused: bool = True
    lane_shares: Mapping[str, float] = {}
    urgent_seen_s: float = -math.inf
    traffic: Traffic = Traffic()
    batch_cap: int = 0
    crowd: int = 0
    strategy: str = ""
    memory: MemoryLimits | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting sequence that gets a stream of ``band`` before the step."""

    request_id: str
    band: int


@dataclass(frozen=True, slots=True)
class Promotion:
    """A running sequence that has filled its band and moves, with its KV, to ``band`` before the step."""

    request_id: str
    band: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """The next ``tokens`` pending tokens of a sequence."""

    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Move:
    """A running sequence whose KV is copied to the free stream ``stream`` of its band before the step, so that the
    band is dense."""

    request_id: str
    stream: int


class StepPlan(Struct, frozen=True):
    """One step: victims, moves, admissions and promotions in this order, then the forward passes.

    ``victims`` are running sequences that give up their stream and wait again; they keep their KV where the engine
    can park it (``SequenceState.computed_tokens`` stays), else it is computed again. A sequence may be admitted and
    prefilled in the same plan. No sequence is in ``decode`` and ``prefill`` both; the tokens of the plan add up to
    at most ``SchedulingKnobs.step_tokens``. An empty plan with ``wait_s`` asks to be called again after so many
    seconds, or at the next arrival; ``strategy`` and ``reason`` say who decided and why.
    """

    victims: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    admissions: tuple[Admission, ...] = ()
    promotions: tuple[Promotion, ...] = ()
    decode: tuple[str, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    wait_s: float | None = None
    strategy: str = ""
    reason: str = ""

    @property
    def empty(self) -> bool:
        """True when nothing would be computed."""
        return not self.decode and not self.prefill


class StepPolicy(Protocol):
    """Decides one step. Must be pure."""

    def plan(self, state: SchedulerState) -> StepPlan: ...
