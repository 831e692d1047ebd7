"""The step policy: what the next forward pass computes.

``StepPolicy`` is the seam that DESIGN describes: plain state in, a ``StepPlan`` out, no clock, no I/O. The
embedded engine applies the plan; the simulator and the vLLM plug-in carry out the same terms (order,
admissibility, step budget). ``DecodeFirst`` is the simplest right policy: every decoding sequence gets its
token in every step, what is left of the step's token budget goes to prefill chunks, most urgent first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from headrace.scheduling.bands import Band, first_band
from headrace.scheduling.sequence import SequenceState, urgency


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Live limits of a step. ``step_tokens`` bounds decode tokens plus prefill tokens of one step,
    ``prefill_chunk_tokens`` the prompt tokens of one sequence in it; ``band_margin_tokens`` is the output
    room with which a sequence's first band is chosen."""

    step_tokens: int = 512
    prefill_chunk_tokens: int = 256
    band_margin_tokens: int = 256

    def __post_init__(self) -> None:
        if self.step_tokens < 1 or self.prefill_chunk_tokens < 1:
            raise ValueError("step_tokens and prefill_chunk_tokens must be at least 1")


class SchedulerState(Struct, frozen=True):
    """What a policy may look at. ``free_streams[b]`` counts free streams of band ``b``."""

    now_s: float
    bands: tuple[Band, ...]
    free_streams: tuple[int, ...]
    waiting: Sequence[SequenceState]
    running: Sequence[SequenceState]
    limits: StepLimits


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


class StepPlan(Struct, frozen=True):
    """One step: admissions and promotions first, then one forward pass per band that has work.

    A sequence may be admitted and prefilled in the same plan. No sequence is in ``decode`` and ``prefill``
    both; the tokens of the plan add up to at most ``StepLimits.step_tokens``.
    """

    admissions: tuple[Admission, ...] = ()
    promotions: tuple[Promotion, ...] = ()
    decode: tuple[str, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()

    @property
    def empty(self) -> bool:
        """True when nothing would be computed."""
        return not self.decode and not self.prefill


class StepPolicy(Protocol):
    """Decides one step. Must be pure."""

    def plan(self, state: SchedulerState) -> StepPlan: ...


class DecodeFirst:
    """Decode first, then prefill in chunks within a token budget; waiting sequences enter by urgency as
    their band has room, and one full band never blocks another.

    Every plan makes progress while any sequence can: decodes beyond the budget take turns (the sequence
    computed least goes first), so none starves when ``step_tokens`` is below the number of decoders.
    """

    def plan(self, state: SchedulerState) -> StepPlan:
        free = list(state.free_streams)
        promotions, stalled = _promote(state, free)
        admissions, admitted = _admit(state, free)
        decode = [s for s in state.running if s.decoding and s.request_id not in stalled]
        budget = state.limits.step_tokens
        if len(decode) > budget:
            decode.sort(key=lambda s: (s.computed_tokens - s.prompt_tokens, urgency(s)))
            decode = decode[:budget]
        prefill = _chunks(
            [s for s in state.running if not s.decoding and s.pending_tokens and s.request_id not in stalled]
            + admitted,
            budget - len(decode),
            state.limits.prefill_chunk_tokens,
        )
        return StepPlan(admissions, promotions, tuple([s.request_id for s in decode]), prefill)


def _promote(state: SchedulerState, free: list[int]) -> tuple[tuple[Promotion, ...], frozenset[str]]:
    """Moves for sequences whose band is full, and those that must wait for room above. Takes from ``free``."""
    full = [
        s
        for s in state.running
        if s.slot is not None and s.computed_tokens >= state.bands[s.slot.band].max_context_tokens
    ]
    if not full:
        return (), frozenset()
    moves: list[Promotion] = []
    stalled: set[str] = set()
    for sequence in sorted(full, key=urgency):
        assert sequence.slot is not None
        above = next((b for b in range(sequence.slot.band + 1, len(free)) if free[b] > 0), None)
        if above is None:
            stalled.add(sequence.request_id)
            continue
        free[above] -= 1
        moves.append(Promotion(sequence.request_id, above))
    return tuple(moves), frozenset(stalled)


def _admit(state: SchedulerState, free: list[int]) -> tuple[tuple[Admission, ...], list[SequenceState]]:
    """Waiting sequences that get a stream now, most urgent first. Takes from ``free``."""
    if not state.waiting:
        return (), []
    admissions: list[Admission] = []
    admitted: list[SequenceState] = []
    for sequence in sorted(state.waiting, key=urgency):
        band = first_band(sequence.prompt_tokens, sequence.limit_tokens, state.bands, state.limits.band_margin_tokens)
        if band is None or free[band] == 0:
            continue  # a full band stays full for the rest of this plan: nobody overtakes in it, others go on
        free[band] -= 1
        admissions.append(Admission(sequence.request_id, band))
        admitted.append(sequence)
    return tuple(admissions), admitted


def _chunks(candidates: list[SequenceState], budget: int, chunk_tokens: int) -> tuple[PrefillChunk, ...]:
    """Prefill chunks within ``budget`` tokens, most urgent first."""
    if not candidates or budget <= 0:
        return ()
    chunks: list[PrefillChunk] = []
    for sequence in sorted(candidates, key=urgency):
        most = min(chunk_tokens, sequence.chunk_limit_tokens or chunk_tokens)
        tokens = min(sequence.pending_tokens, most, budget)
        if tokens <= 0:
            break
        budget -= tokens
        chunks.append(PrefillChunk(sequence.request_id, tokens))
    return tuple(chunks)
