"""Streams have one owner or none, the lowest goes out first, and density is measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.scheduling.bands import Band
from headrace.scheduling.sequence import Slot
from headrace.scheduling.slots import SlotTable


class SlotMachine(RuleBasedStateMachine):
    """The table against a plain dictionary of who owns what."""

    @initialize(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def begin(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.table = SlotTable([Band(64 * (index + 1), size) for index, size in enumerate(sizes)])
        self.owned: dict[Slot, str] = {}
        self.taken = 0

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        band = data.draw(st.integers(0, len(self.sizes) - 1))
        self.taken += 1
        free = [s for s in range(self.sizes[band]) if Slot(band, s) not in self.owned]
        if not free:
            with pytest.raises(ValueError, match="no free stream"):
                self.table.take(band, f"r{self.taken}")
            return
        slot = self.table.take(band, f"r{self.taken}")
        assert slot == Slot(band, min(free))
        self.owned[slot] = f"r{self.taken}"

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.owned, key=lambda s: (s.band, s.stream))))
        with pytest.raises(ValueError, match="does not own"):
            self.table.release(slot, "somebody else")
        self.table.release(slot, self.owned.pop(slot))
        with pytest.raises(ValueError, match="does not own"):
            self.table.release(slot, "nobody any more")

    @invariant()
    def table_agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        assert self.table.check_integrity() is None
        assert self.table.owners() == self.owned
        for band, size in enumerate(self.sizes):
            used = [slot.stream for slot in self.owned if slot.band == band]
            assert self.table.used_count(band) == len(used)
            assert self.table.free_count(band) == size - len(used)
            span = range(min(used), max(used) + 1) if used else range(0)
            holes = [stream for stream in span if stream not in used]
            assert self.table.fragmentation(band) == (len(holes) / len(span) if used else 0.0)
            for stream in range(size):
                assert self.table.owner(Slot(band, stream)) == self.owned.get(Slot(band, stream))


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.integers(1, 40))
def test_without_releases_streams_are_dense(count: int) -> None:
    """The streams handed out are 0, 1, 2, ...: libllama needs them consecutive."""
    table = SlotTable([Band(64, 40)])
    assert [table.take(0, f"r{n}").stream for n in range(count)] == list(range(count))
    assert table.fragmentation(0) == 0.0


def test_only_holes_between_streams_count() -> None:
    """Of streams 0 to 5 with 0 and 1 given back, none is a hole; with 3 given back too, one of 2 to 5 is."""
    table = SlotTable([Band(64, 8)])
    slots = [table.take(0, f"r{n}") for n in range(6)]
    table.release(slots[0], "r0")
    table.release(slots[1], "r1")
    assert table.fragmentation(0) == 0.0
    table.release(slots[3], "r3")
    assert table.fragmentation(0) == table.most_fragmented() == 1 / 4


def test_integrity_notices_a_lost_a_doubled_and_a_shared_stream() -> None:
    """The self-check can fail: each kind of damage is named."""
    lost = SlotTable([Band(64, 2)])
    lost._free[0].pop()
    assert "do not add up" in (lost.check_integrity() or "")
    doubled = SlotTable([Band(64, 2)])
    doubled._free[0].append(0)
    assert "do not add up" in (doubled.check_integrity() or "")
    greedy = SlotTable([Band(64, 2)])
    greedy.take(0, "r")
    greedy.take(0, "r")
    assert "more than one" in (greedy.check_integrity() or "")
