"""``continuous``: decode first, then prefill in chunks within a token budget."""

from __future__ import annotations

from headrace.scheduling.placement import admissions_of, promotions_of
from headrace.scheduling.sequence import SequenceState, urgency
from headrace.scheduling.step import PrefillChunk, SchedulerState, StepPlan


class DecodeFirst:
    """Decode first, then prefill in chunks within a token budget; waiting sequences enter by urgency as
    their band has room, and one full band never blocks another.

    Every plan makes progress while any sequence can: decodes beyond the budget take turns (the sequence
    computed least goes first), so none starves when ``step_tokens`` is below the number of decoders.
    """

    def plan(self, state: SchedulerState) -> StepPlan:
        free = list(state.free_streams)
        promotions, stalled = promotions_of(state, free)
        admissions, admitted = admissions_of(state, free)
        decode = [s for s in state.running if s.decoding and s.request_id not in stalled]
        budget = state.knobs.step_tokens
        if len(decode) > budget:
            decode.sort(key=lambda s: (s.computed_tokens - s.prompt_tokens, urgency(s)))
            decode = decode[:budget]
        prefill = _chunks(
            [s for s in state.running if not s.decoding and s.pending_tokens and s.request_id not in stalled]
            + admitted,
            min(budget - len(decode), state.knobs.max_prefill_tokens),
        )
        return StepPlan(
            admissions=admissions,
            promotions=promotions,
            decode=tuple([s.request_id for s in decode]),
            prefill=prefill,
            strategy="continuous",
        )


def _chunks(candidates: list[SequenceState], budget: int) -> tuple[PrefillChunk, ...]:
    """Prefill chunks within ``budget`` tokens, most urgent first."""
    if not candidates or budget <= 0:
        return ()
    chunks: list[PrefillChunk] = []
    for sequence in sorted(candidates, key=urgency):
        tokens = min(sequence.pending_tokens, sequence.chunk_limit_tokens or budget, budget)
        if tokens <= 0:
            break
        budget -= tokens
        chunks.append(PrefillChunk(sequence.request_id, tokens))
    return tuple(chunks)
