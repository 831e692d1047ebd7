"""Which rows share a pass: every stream once, holes filled only where that is predicted to pay."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.runs import (
    ALONE_TOKENS,
    Run,
    consecutive,
    decode_runs,
    prefill_groups,
    trial_runs,
    widening,
)


class Line:
    """A pass takes ``fixed_s`` and more for every row and cell."""

    def __init__(self, fixed_s: float, row_s: float, cell_s: float = 0.0) -> None:
        self.fixed_s, self.row_s, self.cell_s = fixed_s, row_s, cell_s

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return self.fixed_s + rows * self.row_s + context_tokens * self.cell_s

    def move_s(self, tokens: int, band: int) -> float:
        return 0.0


def test_every_second_stream_becomes_one_pass_where_a_pass_costs_more_than_a_row() -> None:
    """And stays sixteen passes where rows are what costs."""
    contexts = {stream: 100 for stream in range(0, 32, 2)}
    idle = {stream: 0 for stream in range(1, 32, 2)}
    cheap_rows = decode_runs(contexts, idle, Line(10.0, 1.0), most_rows=512)
    assert cheap_rows == (Run(tuple(contexts), tuple(range(1, 31, 2))),)
    dear_rows = decode_runs(contexts, idle, Line(0.5, 1.0), most_rows=512)
    assert dear_rows == tuple(Run((stream,)) for stream in contexts)


def test_a_long_idle_stream_is_not_worth_its_cells() -> None:
    """A padding row reads its stream's KV as well."""
    times = Line(10.0, 1.0, 0.01)
    assert len(decode_runs({0: 10, 2: 10}, {1: 100}, times, most_rows=512)) == 1
    assert len(decode_runs({0: 10, 2: 10}, {1: 2000}, times, most_rows=512)) == 2


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[int, int], dict[int, int]]:
    kinds = draw(st.lists(st.sampled_from("dif"), min_size=1, max_size=12))
    cells = draw(st.lists(st.integers(0, 2000), min_size=len(kinds), max_size=len(kinds)))
    kinds[draw(st.integers(0, len(kinds) - 1))] = "d"
    decoding = {n: c for n, (kind, c) in enumerate(zip(kinds, cells, strict=True)) if kind == "d"}
    return decoding, {n: c for n, (kind, c) in enumerate(zip(kinds, cells, strict=True)) if kind == "i"}


@settings(max_examples=200, deadline=None)
@given(layouts(), st.floats(0, 20), st.floats(0.1, 2), st.floats(0, 0.01), st.sampled_from([3, 512]))
def test_no_other_way_to_join_runs_is_faster(
    layout: tuple[dict[int, int], dict[int, int]], fixed_s: float, row_s: float, cell_s: float, most_rows: int
) -> None:
    """Against every partition of the runs: none is faster, and the one chosen computes each stream once, in order,
    pads only idle streams, and leaves no hole."""
    contexts, idle = layout
    times = Line(fixed_s, row_s, cell_s)
    chosen = decode_runs(contexts, idle, times, most_rows=most_rows)
    assert [stream for run in chosen for stream in run.streams] == list(contexts)
    for run in chosen:
        assert set(run.padding) <= set(idle)
        rows = sorted([*run.streams, *run.padding])
        assert rows == list(range(rows[0], rows[-1] + 1))

    def cost_s(parts: list[list[tuple[int, ...]]]) -> float | None:
        total_s = 0.0
        for part in parts:
            streams = [stream for run in part for stream in run]
            rows = range(streams[0], streams[-1] + 1)
            gaps = [stream for stream in rows if stream not in contexts]
            if not set(gaps) <= set(idle) or (len(rows) > most_rows and len(part) > 1):
                return None
            total_s += times.call_s(len(rows), sum(contexts[s] for s in streams) + sum(idle[s] for s in gaps))
        return total_s

    runs = consecutive(list(contexts))
    costs = []
    for cuts in itertools.product([False, True], repeat=len(runs) - 1):
        parts = [[runs[0]]]
        for following, cut in zip(runs[1:], cuts, strict=True):
            parts.append([following]) if cut else parts[-1].append(following)
        cost = cost_s(parts)
        if cost is not None:
            costs.append(cost)
    ours = sum(
        times.call_s(len(r.streams) + len(r.padding), sum((contexts | idle)[s] for s in (*r.streams, *r.padding)))
        for r in chosen
    )
    assert ours <= min(costs) + 1e-9  # sums of floats in another order


@given(
    st.dictionaries(st.integers(0, 20), st.integers(1, 200), min_size=1, max_size=8),
    st.sampled_from([1, 4, 24, 512]),
)
def test_passes_hold_every_token_once_and_are_even(chunks: dict[int, int], micro_batch_tokens: int) -> None:
    """A pass is one micro-batch: consecutive streams, as many tokens of each, no more than fit."""
    groups = prefill_groups(sorted(chunks.items()), micro_batch_tokens)
    for group in groups:
        streams = [stream for stream, _ in group]
        assert streams == list(range(streams[0], streams[0] + len(streams)))
        assert len({tokens for _, tokens in group}) == 1 and group[0][1] >= 1
        assert sum(tokens for _, tokens in group) <= micro_batch_tokens
    totals: dict[int, int] = {}
    for stream, tokens in itertools.chain.from_iterable(groups):
        totals[stream] = totals.get(stream, 0) + tokens
    assert totals == chunks


def test_a_large_chunk_is_computed_alone_and_small_ones_together() -> None:
    """An urgent prompt of some tokens does not wait for a cold chunk beside it."""
    assert prefill_groups([(0, 20), (1, 30), (2, ALONE_TOKENS), (3, 5)], 512) == [
        [(0, 20), (1, 20)],
        [(1, 10)],
        [(2, ALONE_TOKENS)],
        [(3, 5)],
    ]


def test_the_widest_batch_is_tried_while_it_is_not_predicted_to_be_far_too_slow() -> None:
    """A prediction that is too high can only be corrected by computing it."""
    contexts, idle = {0: 5, 2: 5}, {1: 0}
    times = Line(0.9, 1.0)  # two passes of a row: 3.8 s; one of three rows: 3.9 s
    chosen = decode_runs(contexts, idle, times, most_rows=512)
    assert len(chosen) == 2
    tried = trial_runs(chosen, contexts, idle, times, most_rows=512, at_most=1.1)
    assert tried == (Run((0, 2), (1,)),)
    assert trial_runs(chosen, contexts, idle, times, most_rows=512, at_most=1.01) == chosen
    assert trial_runs(tried, contexts, idle, times, most_rows=512, at_most=9.0) == tried


@given(st.integers(1, 40), st.integers(0, 8), st.integers(1, 64))
def test_a_batch_is_widened_by_at_most_three_streams_of_its_band(rows: int, first: int, max_sequences: int) -> None:
    """To a multiple of four rows, with the streams right after it, or not at all."""
    run = Run(tuple(range(first, first + rows)))
    wider = widening(run, max_sequences)
    if wider:
        assert (rows + len(wider)) % 4 == 0 and len(wider) <= 3
        assert wider == tuple(range(first + rows, first + rows + len(wider)))
        assert wider[-1] < max_sequences
    else:
        assert rows <= 4 or rows % 4 == 0 or first + rows + (-rows % 4) > max_sequences
