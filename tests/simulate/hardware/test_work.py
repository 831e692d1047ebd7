"""What a pass holds, from its sums."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.simulate.hardware.work import Chunk, Work


@given(st.integers(1, 4096), st.integers(0, 10**6))
def test_decodes_alone_are_known_from_their_sums(decodes: int, context_tokens: int) -> None:
    assert Work.of_call(decodes, context_tokens) == Work(decodes, context_tokens)


@given(st.integers(1, 8192), st.integers(0, 100_000))
def test_one_chunk_alone_is_known_from_its_sums(tokens: int, done: int) -> None:
    chunk = Chunk(done, tokens)
    assert Work.of_call(tokens, 0, chunk.pairs) == Work(chunks=(chunk,))


@given(st.integers(1, 500), st.integers(1, 10**6), st.integers(1, 4096))
def test_a_chunk_from_a_beginning_is_found_beside_decodes(decodes: int, context_tokens: int, tokens: int) -> None:
    chunk = Chunk(0, tokens)
    assert Work.of_call(decodes + tokens, context_tokens, chunk.pairs) == Work(decodes, context_tokens, (chunk,))


@given(st.integers(0, 5000), st.integers(0, 10**6), st.integers(0, 10**7))
def test_rows_are_never_lost(rows: int, context_tokens: int, pairs: int) -> None:
    """Whatever the sums, as many rows are computed as there are."""
    assert Work.of_call(rows, context_tokens, pairs).rows == rows
