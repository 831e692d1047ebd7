"""A step within a token budget: decode first, then prefill in chunks. What strategies other than ``hybrid`` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from headrace.scheduling.admissible import Room
from headrace.scheduling.order import WaitingQueue
from headrace.scheduling.placement import admissions_of, promotions_of
from headrace.scheduling.sequence import SequenceState, urgency
from headrace.scheduling.step import PrefillChunk, SchedulerState, StepPlan

Order = Callable[[SequenceState], tuple[Any, ...]]
"""A sort key that is total: it ends with the id."""


def by_urgency(state: SchedulerState, room: Room) -> Iterable[SequenceState]:
    """The waiting sequences, most urgent first; none when nobody could enter, which saves the sort where no engine
    keeps them in order."""
    if not room.left:
        return ()
    return state.waiting.by_urgency() if isinstance(state.waiting, WaitingQueue) else sorted(state.waiting, key=urgency)


def step_within_budget(
    state: SchedulerState,
    room: Room,
    entrants: Iterable[SequenceState],
    *,
    strategy: str,
    prefill_order: Order = urgency,
) -> StepPlan:
    """Promote, admit as many of ``entrants``, in this order, as have room, decode, and prefill with what is left of
    ``step_tokens``, at most ``max_prefill_tokens``.

    Makes progress while any sequence can: decodes beyond the budget take turns (the sequence computed least goes
    first), so none starves when ``step_tokens`` is below the number of decoders.
    """
    promotions, stalled = promotions_of(state, room.streams)
    admissions, admitted = admissions_of(state, room, entrants)
    decode = [s for s in state.running if s.decoding and s.request_id not in stalled]
    budget = state.knobs.step_tokens
    if len(decode) > budget:
        decode.sort(key=lambda s: (s.computed_tokens - s.prompt_tokens, urgency(s)))
        decode = decode[:budget]
    prefilling = [s for s in state.running if not s.decoding and s.pending_tokens and s.request_id not in stalled]
    budget = min(budget - len(decode), state.knobs.max_prefill_tokens)
    return StepPlan(
        admissions=admissions,
        promotions=promotions,
        decode=tuple([s.request_id for s in decode]),
        prefill=_chunks(sorted([*prefilling, *admitted], key=prefill_order), budget),
        strategy=strategy,
    )


def _chunks(candidates: Iterable[SequenceState], budget: int) -> tuple[PrefillChunk, ...]:
    """Prefill chunks within ``budget`` tokens, in order."""
    chunks: list[PrefillChunk] = []
    for sequence in candidates:
        if budget <= 0:
            break
        # Who enters in this step may find a part of its prompt in a cache.
        pending = sequence.pending_tokens if sequence.slot is not None else sequence.uncached_tokens
        tokens = min(pending, sequence.chunk_limit_tokens or budget, budget)
        budget -= tokens
        chunks.append(PrefillChunk(sequence.request_id, tokens))
    return tuple(chunks)
