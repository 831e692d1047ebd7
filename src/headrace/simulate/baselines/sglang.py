"""Continuous batching as SGLang does it by default: prompts first, in passes of their own.

While a prompt is half computed, or a waiting one fits, a step is a prefill batch of at most ``step_tokens``
(``chunked_prefill_size``: 8,192; 2,048 to 4,096 on small GPUs) tokens, first come first served; otherwise all that run
decode. A waiting sequence fits when KV memory has room for its prompt, its own output limit (at most
``CLIP_TOKENS``) and, of what the running ones may still generate, ``RESERVE``. That reserve is
``new_token_ratio``, which begins at 0.7 and falls to about a seventh of it over 600 decode steps without a retraction;
here it has its first value throughout: the policy keeps nothing between steps. When a decode step finds no memory,
sequences are retracted until it does: the ones with the fewest output tokens first, among them those with the longest
prompts.
"""

from __future__ import annotations

from typing import Final

from headrace.scheduling.admissible import Room
from headrace.scheduling.bands import band_for
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import Admission, PrefillChunk, SchedulerState, StepPlan
from headrace.scheduling.token_budget import by_urgency
from headrace.simulate.baselines.blocks import FreeBlocks

CLIP_TOKENS: Final = 4096
RESERVE: Final = 0.7
_TOKEN: Final = 1
"""Its pages hold one token by default."""


class Sglang:
    """The policy. Stateless. Whoever runs it gives all requests the same priority."""

    def plan(self, state: SchedulerState) -> StepPlan:
        blocks = FreeBlocks(state, _TOKEN)
        admissions, chunks = self._prefill(state, blocks)
        if chunks:
            return StepPlan(admissions=tuple(admissions), prefill=tuple(chunks), strategy="sglang")
        decoding = [s for s in state.running if s.decoding and not _full(state, s)][: state.knobs.step_tokens]
        victims: list[str] = []
        weakest = sorted(decoding, key=lambda s: (s.generated_tokens, -s.prompt_tokens, s.request_id))
        while len(decoding) > 1 and len(decoding) > blocks.free:
            victim = weakest.pop(0)
            decoding.remove(victim)
            victims.append(victim.request_id)
            blocks.give_back(victim)
        decode = tuple([sequence.request_id for sequence in decoding])
        return StepPlan(victims=tuple(victims), decode=decode, strategy="sglang")

    def _prefill(self, state: SchedulerState, blocks: FreeBlocks) -> tuple[list[Admission], list[PrefillChunk]]:
        budget = min(state.knobs.step_tokens, state.knobs.max_prefill_tokens)
        chunks: list[PrefillChunk] = []
        for sequence in state.running:
            pending = sequence.pending_tokens
            if not sequence.decoding and pending and budget > 0:
                tokens = min(pending, budget)
                budget -= tokens
                chunks.append(PrefillChunk(sequence.request_id, tokens))
                blocks.free -= tokens
        reserved = sum([RESERVE * _to_come(sequence) for sequence in state.running])
        room = Room(state)
        admissions: list[Admission] = []
        for sequence in by_urgency(state, room):
            if budget <= 0 or room.sequences <= 0:
                break
            band = band_for(sequence.limit_tokens, state.bands)
            if band is None:
                band = len(state.bands) - 1
            pending = sequence.uncached_tokens
            alone = not state.running and not admissions
            if not room.admits(sequence.lane, band):
                break
            if not alone and sequence.known_tokens + _to_come(sequence) > blocks.free - reserved:
                break
            tokens = min(pending, budget)
            budget -= tokens
            blocks.free -= sequence.known_tokens
            reserved += RESERVE * _to_come(sequence)
            room.take(sequence, band)
            admissions.append(Admission(sequence.request_id, band))
            chunks.append(PrefillChunk(sequence.request_id, tokens))
        return admissions, chunks


def _to_come(sequence: SequenceState) -> int:
    """Output tokens that its limit leaves it, as far as they are reckoned with."""
    return min(CLIP_TOKENS, max(0, sequence.limit_tokens - sequence.known_tokens))


def _full(state: SchedulerState, sequence: SequenceState) -> bool:
    assert sequence.slot is not None
    return sequence.computed_tokens >= state.bands[sequence.slot.band].max_context_tokens
