"""Parked KV has a limit: the coldest goes on to files, or is given up and said to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engines.llama.parking import ParkedState, Parking
from headrace.engines.llama.spill import SpillStore


def state(size: int = 1000, fill: int = 0, tokens: int = 10) -> ParkedState:
    return ParkedState(bytearray([fill]) * size, 0, 8, tokens)


def test_beyond_the_limit_the_coldest_is_given_up() -> None:
    parking = Parking(2500)
    assert parking.park("warm", state(), rank_s=1.0) == []
    assert parking.park("cold", state(), rank_s=9.0) == []
    assert parking.park("middle", state(), rank_s=5.0) == ["cold"]
    assert (len(parking), parking.bytes, parking.dropped, parking.tokens("cold")) == (2, 2000, 1, None)
    assert parking.park("coldest", state(), rank_s=10.0) == ["coldest"]
    assert parking.check_integrity({"warm": 10, "middle": 10}) is None


def test_one_that_is_larger_than_the_limit_is_given_up_alone() -> None:
    parking = Parking(2500)
    parking.park("small", state(), rank_s=1.0)
    assert parking.park("large", state(3000), rank_s=2.0) == ["large"]
    assert parking.tokens("small") == 10


def test_with_files_the_coldest_goes_there_and_comes_back(tmp_path: Path) -> None:
    parking = Parking(1500, SpillStore(tmp_path, 1 << 20))
    parking.park("cold", state(fill=1), rank_s=9.0)
    assert parking.park("warm", state(fill=2), rank_s=1.0) == []
    assert (parking.on_disk, parking.spilled, parking.dropped, parking.bytes) == (1, 1, 0, 1000)
    assert dict((name, place) for name, place, _, _ in parking.places()) == {"warm": "ram", "cold": "disk"}
    back = parking.get("cold")
    assert back is not None and back.data[0] == 1
    parking.close()
    assert list(tmp_path.iterdir()) == []


def test_when_files_are_full_too_it_is_given_up(tmp_path: Path) -> None:
    parking = Parking(1500, SpillStore(tmp_path, 1200))
    parking.park("a", state(), rank_s=3.0)
    assert parking.park("b", state(), rank_s=2.0) == []
    assert parking.park("c", state(), rank_s=1.0) == ["b"]
    parking.close()


def test_nobody_is_parked_twice(tmp_path: Path) -> None:
    parking = Parking(0, SpillStore(tmp_path, 1 << 20))
    parking.park("a", state())
    with pytest.raises(ValueError, match="parked already"):
        parking.park("a", state())
    parking.close()


DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["park", "get", "drop", "settle"]),
        st.integers(0, 5),
        st.integers(1, 3000),
        st.floats(0, 10),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DEEDS, st.integers(0, 6000), st.integers(0, 6000), st.booleans())
def test_after_anything_what_is_parked_is_right_or_said_to_be_lost(
    tmp_path: Path, deeds: list[tuple[str, int, int, float]], limit: int, disk: int, with_files: bool
) -> None:
    """A model of it holds exactly those that were not said to be lost; each comes back with its own bytes."""
    parking = Parking(limit, SpillStore(tmp_path, disk) if with_files else None)
    model: dict[str, bytes] = {}
    for number, (deed, who, size, rank) in enumerate(deeds):
        name = f"r{who}"
        if deed == "park" and name not in model:
            data = bytes([number % 256]) * size
            model[name] = data
            for gone in parking.park(name, ParkedState(bytearray(data), 0, 8, size), rank):
                del model[gone]
        elif deed == "drop" or deed == "get":
            if deed == "get":
                back = parking.get(name)
                assert (None if back is None else bytes(back.data)) == model.get(name)
            parking.drop(name)
            model.pop(name, None)
        elif deed == "settle":
            assert parking.settle() == []
        assert parking.check_integrity({name: len(data) for name, data in model.items()}) is None
    parking.close()
