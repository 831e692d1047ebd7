"""The account of where KV is: totals add up, and what cannot be is noticed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv.account import IN_STREAMS, OF_NOBODY, PLACES, KvAccount, KvHolding, KvLimits

LIMITS = KvLimits([(256, 4), (1024, 2)], [10, 10], {"ram": 30_000, "disk": None})


@st.composite
def accounts(draw: st.DrawFn) -> KvAccount:
    """Possible ones: every stream is empty, idle or somebody's, and some requests are parked."""
    holdings: list[KvHolding] = []
    for band, (most, streams) in enumerate(LIMITS.stream_tokens):
        for stream in range(streams):
            place = draw(st.sampled_from([None, *IN_STREAMS]))
            if place is not None:
                tokens = draw(st.integers(0, most))
                name = f"{band}.{stream}"
                users = (f"r{name}",) if place == "live" else ()
                shared = draw(st.integers(0, tokens))
                holdings.append(KvHolding(name, place, tokens, tokens * 10, users, band=band, shared_tokens=shared))
    for number in range(draw(st.integers(0, 3))):
        tokens = draw(st.integers(1, 900))
        in_ram = draw(st.booleans())
        holdings.append(KvHolding(f"p{number}", "ram" if in_ram else "disk", tokens, tokens * 11, (f"p{number}",)))
    for number in range(draw(st.integers(0, 3))):
        for place in draw(st.sets(st.sampled_from(OF_NOBODY[1:]))):
            holdings.append(KvHolding(f"p{number}", place, 128, 128 * 9))
    return KvAccount(holdings)


@given(accounts())
def test_a_possible_account_is_sound_and_its_places_add_up(account: KvAccount) -> None:
    assert account.check_integrity(LIMITS) is None
    totals = [account.total(place) for place in PLACES]
    assert sum([total.holdings for total in totals]) == len(account.holdings)
    assert sum([total.tokens for total in totals]) == sum([holding.tokens for holding in account.holdings])
    assert sum([total.bytes for total in totals]) == sum([holding.bytes for holding in account.holdings])
    assert all(total.blocks * 128 >= total.tokens for total in totals)
    assert 0 <= account.waste_ratio(LIMITS) <= 1


DAMAGE: dict[str, dict[str, Any]] = {
    "more tokens than a stream": {"tokens": 2000, "bytes": 20000},
    "bytes that are not its tokens'": {"bytes": 1},
    "more shared than there is": {"shared_tokens": 5000},
    "no band": {"band": None},
    "a band that is not there": {"band": 7},
    "a parked one in a band": {"place": "ram"},
    "nobody's, and live": {"users": ()},
    "somebody's, and idle": {"place": "idle"},
    "somebody's, and stored": {"place": "stored_ram", "band": None},
    "fewer than none": {"tokens": -1, "bytes": -10},
}


@pytest.mark.parametrize("damage", DAMAGE)
@given(accounts())
def test_an_impossible_holding_is_noticed(damage: str, account: KvAccount) -> None:
    sound = KvHolding("1.9", "live", 100, 1000, ("new",), band=1)
    broken = msgspec.structs.replace(sound, **DAMAGE[damage])
    assert KvAccount([*account.holdings, broken]).check_integrity(LIMITS) is not None


@given(accounts())
def test_who_has_kv_twice_is_noticed(account: KvAccount) -> None:
    parked = KvHolding("a", "ram", 1, 10, ("a",))
    assert KvAccount([*account.holdings, parked, parked]).check_integrity(LIMITS) is not None
    also_live = KvHolding("1.9", "live", 1, 10, ("a",), band=1)
    assert "two places" in str(KvAccount([parked, also_live]).check_integrity(LIMITS))


def test_more_than_a_place_holds_is_noticed() -> None:
    assert KvAccount([KvHolding("a", "ram", 3001, 30_010, ("a",))]).check_integrity(LIMITS) is not None
    assert KvAccount([KvHolding("a", "disk", 3001, 30_010, ("a",))]).check_integrity(LIMITS) is None
    full = [KvHolding(f"1.{n}", "idle", 1, 10, band=1) for n in range(3)]
    assert KvAccount(full).check_integrity(LIMITS) == "band 1 has 2 streams, 3 hold something"


def test_it_says_who_uses_what_and_how_much_of_used_streams_is_empty() -> None:
    live = KvHolding("0.0", "live", 64, 640, ("a",), band=0)
    account = KvAccount([live, KvHolding("0.1", "idle", 200, 2000, band=0)])
    assert account.used_by("a") == [live] and account.used_by("b") == []
    assert account.waste_ratio(LIMITS) == 0.75
