"""Prefix reuse between bands of different precision: what may serve whom, and what stays worn."""

from __future__ import annotations

from headrace.kv.reuse import PrefixReuse
from headrace.kv.sources import Placement, Source
from headrace.scheduling.bands import Band
from headrace.scheduling.cost import CostModel
from headrace.scheduling.sequence import Slot

BANDS = (Band(512, 2, "q8_0"), Band(1024, 2), Band(2048, 2, "q4_0"))
TOKENS = list(range(400))
TIMES = CostModel()


def run_in(reuse: PrefixReuse, name: str, slot: Slot) -> None:
    """A sequence of ``TOKENS`` computed in ``slot``."""
    reuse.wait(name, "", TOKENS)
    reuse.began(name, Placement(slot, Source("compute", None, 0, 0.0, 0.0)), 0.0)
    reuse.computed(slot, TOKENS)


def source_in(reuse: PrefixReuse, band: int) -> Slot | None:
    """Whose KV a new sequence of the same tokens would begin with in ``band``."""
    reuse.wait("new", "", TOKENS)
    try:
        return reuse.place("new", band, 1.0, TIMES, chunk_tokens=512).source.holder
    finally:
        reuse.gone("new")


def test_kv_serves_bands_of_its_precision_and_of_coarser_ones() -> None:
    reuse = PrefixReuse(BANDS)
    run_in(reuse, "a", Slot(0, 0))
    assert source_in(reuse, 0) == Slot(0, 0) and source_in(reuse, 2) == Slot(0, 0)
    assert source_in(reuse, 1) is None


def test_kv_that_came_up_from_a_coarser_band_stays_worn_until_it_is_computed_again() -> None:
    reuse = PrefixReuse(BANDS)
    run_in(reuse, "a", Slot(0, 0))
    reuse.moved(Slot(0, 0), Slot(1, 0))
    assert reuse.precision(Slot(1, 0)) == "q8_0" and source_in(reuse, 1) is None
    assert reuse.check_integrity() is None
    reuse.ended(Slot(1, 0), 1.0)
    assert source_in(reuse, 1) is None and source_in(reuse, 0) == Slot(1, 0)
    reuse.cleared(Slot(1, 0))
    assert reuse.precision(Slot(1, 0)) == "f16" and reuse.check_integrity() is None


def test_a_restarted_sequence_is_not_worn_any_more() -> None:
    reuse = PrefixReuse(BANDS)
    run_in(reuse, "a", Slot(0, 0))
    reuse.moved(Slot(0, 0), Slot(1, 0))
    reuse.restarted(Slot(1, 0))
    assert reuse.precision(Slot(1, 0)) == "f16" and reuse.check_integrity() is None


def test_what_was_restored_from_a_coarser_band_is_worn() -> None:
    reuse = PrefixReuse(BANDS)
    reuse.wait("a", "", TOKENS, resumed=True)
    placement = Placement(Slot(1, 0), Source("restore", None, 399, 0.0, 0.0))
    reuse.began("a", placement, 0.0, precision="q4_0")
    assert reuse.precision(Slot(1, 0)) == "q4_0" and source_in(reuse, 0) is None
    assert source_in(reuse, 2) == Slot(1, 0)


def test_streams_that_are_exchanged_take_their_wear_along() -> None:
    reuse = PrefixReuse(BANDS)
    run_in(reuse, "fine", Slot(1, 1))
    reuse.ended(Slot(1, 1), 0.0)
    run_in(reuse, "a", Slot(0, 0))
    reuse.moved(Slot(0, 0), Slot(1, 0))
    reuse.exchanged(Slot(1, 0), Slot(1, 1))
    assert [reuse.precision(Slot(1, stream)) for stream in (0, 1)] == ["f16", "q8_0"]
    assert reuse.check_integrity() is None


def test_nothing_goes_between_precisions_where_it_cannot_be_converted_or_that_takes_longer() -> None:
    reuse = PrefixReuse(BANDS)
    run_in(reuse, "a", Slot(1, 0))
    assert source_in(reuse, 0) == Slot(1, 0)
    assert reuse.conversion_pays(400, TIMES, chunk_tokens=512)
    reuse.convert_time.s_per_token = 10.0
    assert source_in(reuse, 0) is None and not reuse.conversion_pays(400, TIMES, chunk_tokens=512)
    assert source_in(reuse, 1) == Slot(1, 0)
    reuse.convert_time.s_per_token = 0.0
    reuse.can_convert = False
    assert source_in(reuse, 0) is None and not reuse.conversion_pays(400, TIMES, chunk_tokens=512)
