"""First-come continuous batching with chunked prefill, as vLLM (its V1 scheduler) does it by default.

One pass a step, of at most ``step_tokens`` (``max_num_batched_tokens``) tokens. Running sequences come first, in the
order in which they entered: a token each for those that decode, as much of the prompt as fits for those that do not.
When a running one finds no KV block, the one that entered last gives up all of its blocks and is computed again later.
Only in a step without such a preemption the waiting ones follow, first come first served, each with as many prompt
tokens as are left of the step; the first that does not fit ends the step. Nobody has a priority or a deadline.

Defaults on GPUs below 70 GiB and on the A100: 2,048 tokens a step, 256 sequences; larger ones 8,192 and 1,024. Blocks
of 16 tokens.
"""

from __future__ import annotations

from typing import Final

from headrace.scheduling.admissible import Room
from headrace.scheduling.bands import band_for
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import Admission, PrefillChunk, SchedulerState, StepPlan
from headrace.scheduling.token_budget import by_urgency
from headrace.simulate.baselines.blocks import FreeBlocks

BLOCK_TOKENS: Final = 16


class Vllm:
    """The policy. Stateless. Whoever runs it gives all requests the same priority: first come, first served."""

    def plan(self, state: SchedulerState) -> StepPlan:
        blocks = FreeBlocks(state, BLOCK_TOKENS)
        budget = state.knobs.step_tokens
        running = list(state.running)
        victims: list[str] = []
        decode: list[str] = []
        chunks: list[PrefillChunk] = []
        place = 0
        while place < len(running) and budget > 0:
            sequence = running[place]
            place += 1
            tokens = min(sequence.pending_tokens, budget)
            if tokens < 1 or sequence.computed_tokens + tokens > _room_tokens(state, sequence):
                continue
            needed = blocks.needed(sequence, tokens)
            while needed > blocks.free and len(running) > place:
                last = running.pop()
                blocks.give_back(last)
                victims.append(last.request_id)
            if needed > blocks.free:
                # It entered last itself: it goes, unless it is alone and memory is too small for it.
                if place > 1:
                    victims.append(sequence.request_id)
                break
            blocks.free -= needed
            budget -= tokens
            if sequence.decoding:
                decode.append(sequence.request_id)
            else:
                chunks.append(PrefillChunk(sequence.request_id, tokens))
        admissions: list[Admission] = []
        if not victims:
            admissions = self._admit(state, blocks, budget, chunks)
        return StepPlan(
            victims=tuple(victims),
            admissions=tuple(admissions),
            decode=tuple(decode),
            prefill=tuple(chunks),
            strategy="vllm",
        )

    def _admit(
        self, state: SchedulerState, blocks: FreeBlocks, budget: int, chunks: list[PrefillChunk]
    ) -> list[Admission]:
        """Waiting sequences for what is left of the step; adds their chunks."""
        room = Room(state)
        admissions: list[Admission] = []
        for sequence in by_urgency(state, room):
            if budget <= 0 or room.sequences <= 0:
                break
            band = band_for(sequence.limit_tokens, state.bands)
            if band is None:
                band = len(state.bands) - 1
            cached = max(sequence.cached_tokens, sequence.computed_tokens)
            tokens = min(sequence.uncached_tokens, budget)
            needed = blocks.needed(sequence, cached + tokens, from_tokens=0)
            if needed > blocks.free or not room.admits(sequence.lane, band):
                break
            blocks.free -= needed
            budget -= tokens
            room.take(sequence, band)
            admissions.append(Admission(sequence.request_id, band))
            chunks.append(PrefillChunk(sequence.request_id, tokens))
        return admissions


def _room_tokens(state: SchedulerState, sequence: SequenceState) -> int:
    assert sequence.slot is not None
    return state.bands[sequence.slot.band].max_context_tokens
