"""From a plan to its forward passes, as the engine that carries it out divides them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from headrace.scheduling.cost import Call, prefill_pairs
from headrace.scheduling.runs import decode_runs, prefill_groups
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import StepPlan, StepTimes

PassLayout = Literal["fused", "apart", "libllama"]
"""``fused``: one pass for everything (vLLM). ``apart``: one pass for a band's decodes, those of all bands first, then
one for each chunk. ``libllama``: apart, and only consecutive streams share a pass (``scheduling.runs``)."""

MOST_ROWS = 512
"""Of one pass in ``libllama``: its micro-batch."""


class Pass(Struct, frozen=True):
    """One forward pass: what it costs, and how many tokens of whom it computes."""

    call: Call
    items: tuple[tuple[str, int], ...]


def passes_of(
    plan: StepPlan, running: Mapping[str, SequenceState], layout: PassLayout, believed: StepTimes
) -> list[Pass]:
    """The forward passes of a plan, in order. The sequences that it names are in ``running`` and have their streams;
    ``believed`` are the times by which libllama's passes are joined."""
    decodes = [running[request_id] for request_id in plan.decode]
    # A sequence that lost its KV on the way to a longer band has more pending than was planned for, never less.
    chunks = [(running[chunk.request_id], chunk.tokens) for chunk in plan.prefill]
    if layout == "fused":
        return [_pass(decodes, chunks)]
    by_band: dict[int, list[SequenceState]] = {}
    for sequence in decodes:
        assert sequence.slot is not None
        by_band.setdefault(sequence.slot.band, []).append(sequence)
    if layout == "apart":
        return [_pass(group, []) for group in by_band.values()] + [_pass([], [chunk]) for chunk in chunks]
    passes = [one for group in by_band.values() for one in _decode_passes(group, running, believed)]
    chunks_by_band: dict[int, list[tuple[SequenceState, int]]] = {}
    for sequence, tokens in chunks:
        assert sequence.slot is not None
        chunks_by_band.setdefault(sequence.slot.band, []).append((sequence, tokens))
    prefills = [one for group in chunks_by_band.values() for one in _prefill_passes(group)]
    place = {chunk.request_id: number for number, chunk in enumerate(plan.prefill)}
    # Whoever the plan names first goes first; stable, so that the passes over one sequence stay in order.
    prefills.sort(key=lambda one: min([place[request_id] for request_id, _ in one.items]))
    return passes + prefills


def _decode_passes(
    decodes: list[SequenceState], running: Mapping[str, SequenceState], believed: StepTimes
) -> list[Pass]:
    """One band's decodes in runs of consecutive streams; streams between them that idle in this step may be computed
    along, so that a run goes on."""
    by_stream = {sequence.slot.stream: sequence for sequence in decodes if sequence.slot is not None}
    first, last = min(by_stream), max(by_stream)
    if last - first + 1 == len(by_stream) <= MOST_ROWS:
        return [_pass(decodes, [])]
    contexts = {stream: by_stream[stream].computed_tokens for stream in sorted(by_stream)}
    band = decodes[0].slot.band if decodes[0].slot is not None else 0
    held = {
        sequence.slot.stream: sequence.computed_tokens
        for sequence in running.values()
        if sequence.slot is not None and sequence.slot.band == band
    }
    idle = {stream: held.get(stream, 0) for stream in range(first, last) if stream not in by_stream}
    passes = []
    for run in decode_runs(contexts, idle, believed, most_rows=MOST_ROWS):
        computed = _pass([by_stream[stream] for stream in run.streams], [])
        padded_tokens = sum([idle[stream] for stream in run.padding])
        call = Call(computed.call.rows + len(run.padding), computed.call.context_tokens + padded_tokens)
        passes.append(Pass(call, computed.items))
    return passes


def _prefill_passes(chunks: list[tuple[SequenceState, int]]) -> list[Pass]:
    """One band's chunks: consecutive streams share a pass with as many tokens each as the shortest has left."""
    by_stream = {sequence.slot.stream: sequence for sequence, _ in chunks if sequence.slot is not None}
    sizes = {sequence.slot.stream: tokens for sequence, tokens in chunks if sequence.slot is not None}
    done = dict.fromkeys(by_stream, 0)
    passes = []
    for group in prefill_groups([(stream, sizes[stream]) for stream in sorted(sizes)], MOST_ROWS):
        pairs = 0
        for stream, tokens in group:
            pairs += prefill_pairs(by_stream[stream].computed_tokens + done[stream], tokens)
            done[stream] += tokens
        items = tuple([(by_stream[stream].request_id, tokens) for stream, tokens in group])
        passes.append(Pass(Call(sum([tokens for _, tokens in group]), 0, pairs), items))
    return passes


def _pass(decodes: list[SequenceState], chunks: list[tuple[SequenceState, int]]) -> Pass:
    rows, pairs = len(decodes), 0
    context_tokens = sum([sequence.computed_tokens for sequence in decodes])
    items = [(sequence.request_id, 1) for sequence in decodes]
    for sequence, tokens in chunks:
        rows += tokens
        pairs += prefill_pairs(sequence.computed_tokens, tokens)
        items.append((sequence.request_id, tokens))
    return Pass(Call(rows, context_tokens, pairs), tuple(items))
