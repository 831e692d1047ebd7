"""One pass over the running sequences: what ``hybrid`` needs to know of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from headrace.scheduling.sequence import RELAXED_PACE_S, SequenceState
from headrace.scheduling.step import SchedulerState

ACHIEVABLE_SHARE = 0.9
"""A pace counts as kept only while a decode step takes at most this share of it: else slack would never grow, and a
prefill that waits for slack would wait for ever."""


@dataclass(slots=True)
class BandView:
    """Decoding sequences of one band. ``top`` and ``bottom`` are the highest and lowest of their streams."""

    decoders: list[SequenceState] = field(default_factory=list)
    context_tokens: int = 0
    members: int = 0
    top: int = -1
    bottom: int = 1 << 30
    urgent: bool = False
    earliest_due_s: float = math.inf

    def rows(self, *, fused: bool) -> int:
        """Rows of a decode batch: holes between streams are computed too, where streams matter (not ``fused``)."""
        return len(self.decoders) if fused else self.top - self.bottom + 1


@dataclass(slots=True)
class RunningView:
    """All bands, sequences that are still computing their prompt, and whether one has filled its band."""

    bands: list[BandView]
    prefilling: list[SequenceState]
    full: bool


def view_of(state: SchedulerState) -> RunningView:
    """The view of ``state.running``. O(n), and written for speed: it runs before every step."""
    bands = [BandView() for _ in state.bands]
    limits = [band.max_context_tokens for band in state.bands]
    prefilling: list[SequenceState] = []
    full = False
    for sequence in state.running:
        slot = sequence.slot
        assert slot is not None
        band = bands[slot.band]
        band.members += 1
        computed = sequence.computed_tokens
        pending = sequence.known_tokens - computed
        if computed >= limits[slot.band]:
            full = True
        if pending == 1 and sequence.first_token_s is not None:
            band.decoders.append(sequence)
            band.context_tokens += computed
            stream = slot.stream
            if stream > band.top:
                band.top = stream
            if stream < band.bottom:
                band.bottom = stream
            if sequence.due_s < band.earliest_due_s:
                band.earliest_due_s = sequence.due_s
            if sequence.pace_s != math.inf:
                band.urgent = True
        elif pending:
            prefilling.append(sequence)
    return RunningView(bands, prefilling, full)


def kept_paces_s(view: RunningView, decode_s: float) -> dict[int, float]:
    """By priority, the shortest pace of a decoding sequence that can be kept with decode steps of ``decode_s``."""
    least_s: dict[int, float] = {}
    for band in view.bands:
        if band.urgent:
            for sequence in band.decoders:
                pace_s = sequence.pace_s
                if decode_s <= ACHIEVABLE_SHARE * pace_s < math.inf and pace_s < least_s.get(
                    sequence.priority, math.inf
                ):
                    least_s[sequence.priority] = pace_s
    return least_s


def slack_s(decoders: list[SequenceState], now_s: float, decode_s: float, *, fused: bool) -> float:
    """How long a prefill chunk may take so that every decoding sequence still keeps its pace.

    ``decode_s`` is the predicted time of one decode step of all of them. Where decodes are computed before the chunk
    (not ``fused``), this step's token comes in any case: it is the next one, due a pace later, that waits for the
    chunk and for the decode step after it. Sequences that cannot keep their pace any more, or whose pace is shorter
    than a decode step, do not constrain: they lose nothing by it, and others gain. inf when nobody constrains.
    """
    least_s = math.inf
    steps = 1 if fused else 2
    for sequence in decoders:
        pace_s = sequence.pace_s
        if pace_s == math.inf:
            left_s = RELAXED_PACE_S - decode_s if not fused else sequence.due_s - now_s - decode_s
        else:
            if decode_s > ACHIEVABLE_SHARE * pace_s:
                continue
            left_s = sequence.due_s - now_s - steps * decode_s + (0.0 if fused else pace_s)
            if left_s < 0:
                to_come = sequence.output_tokens_to_expect - sequence.generated_tokens
                if to_come * (pace_s - decode_s) < -left_s:
                    continue
        if left_s < least_s:
            least_s = left_s
    return least_s
