"""Which sequence is copied to close a hole between streams, and when that pays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.compaction import moves_of
from headrace.scheduling.sequence import SequenceState, Slot
from headrace.scheduling.step import Move


class Times:
    """A row takes a millisecond, a copy ``copy_s``."""

    def __init__(self, copy_s: float = 1e-3) -> None:
        self._copy_s = copy_s

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return rows * 1e-3

    def move_s(self, tokens: int, band: int) -> float:
        return self._copy_s


def decoding(*streams: int, left: int = 100) -> list[SequenceState]:
    """Sequences that decode in these streams, with so many tokens to come."""
    return [
        SequenceState(
            f"s{stream}",
            10,
            1000,
            0,
            0.0,
            known_tokens=11,
            computed_tokens=10,
            slot=Slot(0, stream),
            expected_tokens=left,
        )
        for stream in streams
    ]


def test_the_highest_goes_to_the_lowest_hole() -> None:
    assert moves_of(decoding(0, 1, 4, 7), 0, Times()) == (Move("s7", 2),)


def test_streams_below_all_others_are_no_holes() -> None:
    """They cost nothing, and what is kept in them would be lost."""
    assert moves_of(decoding(5, 6, 7), 0, Times()) == ()
    assert moves_of(decoding(7), 0, Times()) == ()
    assert moves_of(decoding(3, 4, 9), 0, Times()) == (Move("s9", 5),)


def test_a_copy_must_be_repaid_by_the_tokens_to_come() -> None:
    """The only row saved is the hole's: a millisecond a token, twice the copy's time at least."""
    for left, copied in ((11, False), (30, True)):
        assert bool(moves_of(decoding(0, 2, left=left), 0, Times(copy_s=8e-3))) == copied


def test_who_does_not_decode_is_not_copied() -> None:
    computing = decoding(0, 3)
    computing[1].computed_tokens = 5
    assert moves_of(computing, 0, Times()) == ()


@given(st.sets(st.integers(0, 20), min_size=1))
def test_moves_end_and_leave_no_hole(streams: set[int]) -> None:
    """One after the other they go down into the span of the others until it is dense, and the lowest stays."""
    lowest, left = min(streams), 20
    while moves := moves_of(decoding(*sorted(streams)), 0, Times(copy_s=1e-9)):
        (move,) = moves
        assert move.request_id == f"s{max(streams)}" and lowest < move.stream < max(streams)
        streams = (streams - {max(streams)}) | {move.stream}
        left -= 1
        assert left > 0
    assert max(streams) - lowest + 1 == len(streams)
