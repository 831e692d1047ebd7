"""Token sequences that share prefixes often, end anywhere in a block, and differ in few places."""

from __future__ import annotations

from hypothesis import strategies as st

RUNS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from((1, 2, 60, 127, 128, 129, 200))), max_size=4)


def tokens_of(runs: list[tuple[int, int]]) -> list[int]:
    """``(token, length)`` runs spelled out."""
    return [token for token, length in runs for _ in range(length)]


SEQUENCES = RUNS.map(tokens_of)


def common_length(one: list[int], other: list[int]) -> int:
    """The longest common prefix, token by token."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length
