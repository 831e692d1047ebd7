"""Whether an arrival cuts the prefill pass under way, as the embedded engine decides it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headrace.scheduling.bands import first_band
from headrace.scheduling.cut import ArrivalFacts, RunningPass, first_token_s, saves_deadline
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import SchedulerState
from headrace.simulate.passes import Pass


def worth_a_cut(
    arrival: SequenceState,
    passes: Sequence[Pass],
    ends_s: float,
    now_s: float,
    state: SchedulerState,
    spared: Collection[str],
) -> bool:
    """True when the pass under way, the first of ``passes``, which ends at ``ends_s``, should be cut for ``arrival``.
    A pass over anybody in ``spared`` is not cut: it was before."""
    under_way = passes[0]
    if not under_way.call.pairs or any(request_id in spared for request_id, _ in under_way.items):
        return False
    running = {sequence.request_id: sequence for sequence in state.running}
    members = [running[request_id] for request_id, _ in under_way.items]
    due = [s.deadline_s for s in members if s.deadline_s is not None and s.first_token_s is None]
    facts = RunningPass(ends_s, min([s.priority for s in members]), min(due, default=None))
    arrived = ArrivalFacts(arrival.deadline_s, arrival.priority, _has_room(arrival, state))
    return saves_deadline(arrived, now_s, facts, _first_token_s(arrival, state))


def _has_room(arrival: SequenceState, state: SchedulerState) -> bool:
    """Whether a stream is free for it, or held by something less urgent."""
    margin = state.knobs.band_margin_tokens
    band = first_band(arrival.prompt_tokens, arrival.limit_tokens, state.bands, margin, arrival.min_kv_dtype)
    if band is None:
        return False
    return state.free_streams[band] > 0 or any(
        s.priority > arrival.priority and s.slot is not None and s.slot.band == band for s in state.running
    )


def _first_token_s(arrival: SequenceState, state: SchedulerState) -> float:
    """Predicted time to its first token when its chunks come next, with a decode step before each."""
    decoding = [s.computed_tokens for s in state.running if s.decoding]
    return first_token_s(
        arrival.prompt_tokens,
        arrival.cached_tokens,
        state.times,
        chunk_tokens=min(state.knobs.max_prefill_tokens, state.knobs.step_tokens),
        decode_s=state.times.call_s(len(decoding), sum(decoding)) if decoding else 0.0,
    )
