"""Which rows of a trace are turns of one conversation, found while reading from front to back."""

from __future__ import annotations

from msgspec import Struct


class Ties(Struct, frozen=True):
    """What a row says of its conversation: its own key and that of the turn before (Bailian), or the
    conversation's name, with or without the turn's number (BurstGPT, our own)."""

    key: str | None = None
    parent_key: str | None = None
    session: str | None = None
    turn: int | None = None


class Place(Struct, frozen=True):
    """A row's conversation and turn; ``row`` is the position of the last row of it that was replayed, up to
    and including this one."""

    session: str
    turn: int
    row: int | None


class Conversations:
    """Remembers the turns seen, by key or by conversation."""

    def __init__(self) -> None:
        self._by_key: dict[str, Place] = {}
        self._last: dict[str, Place] = {}

    def before(self, ties: Ties) -> Place | None:
        """The turn before this row, if it was seen."""
        if ties.parent_key is not None:
            return self._by_key.get(ties.parent_key)
        return None if ties.session is None else self._last.get(ties.session)

    def add(self, ties: Ties, row: int | None) -> Place | None:
        """This row's place; None when it belongs to no conversation. ``row``: its position among the rows
        replayed, None when it is not one of them."""
        before = self.before(ties)
        session = ties.session
        if session is None:
            # An unseen parent (the trace begins in mid-conversation) lends its key to all that follow it.
            session = before.session if before is not None else (ties.parent_key or ties.key)
        if session is None:
            return None
        turn = ties.turn
        if turn is None:
            turn = 0 if before is None else before.turn + 1
        if row is None and before is not None:
            row = before.row
        place = Place(session, turn, row)
        if ties.key is not None:
            self._by_key[ties.key] = place
        else:
            self._last[session] = place
        return place
