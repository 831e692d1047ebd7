"""Bands from a memory budget: never over it, ascending, within the trained context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.kv.budget import MIN_CONTEXT_TOKENS, MOST_STORE_BYTES, default_store_bytes, fit_bands
from headrace.kv.precision import KvDtype
from headrace.scheduling.bands import Band

WANTED = st.lists(
    st.tuples(st.integers(1, 128).map(lambda n: n * 256), st.integers(1, 40)),
    min_size=1,
    max_size=4,
    unique_by=lambda band: band[0],
).map(lambda bands: [Band(tokens, sequences) for tokens, sequences in sorted(bands)])


@given(WANTED, st.integers(1, 4096), st.integers(0, 1 << 33), st.integers(256, 40_000))
def test_bands_stay_within_budget_model_and_wish(
    wanted: list[Band], bytes_per_token: int, budget_bytes: int, trained: int
) -> None:
    """Whatever is asked: the sum fits, lengths ascend up to the trained context, nobody gets more than
    wished, and every step back is said. Only a budget below the least context is refused."""
    try:
        fitted = fit_bands(wanted, bytes_per_token, budget_bytes, trained)
    except ConfigError as error:
        assert budget_bytes // bytes_per_token < MIN_CONTEXT_TOKENS
        assert error.where == "engine.memory_budget_bytes"
        return
    assert fitted.total_bytes <= budget_bytes
    assert fitted.total_bytes == sum(fitted.band_bytes(index) for index in range(len(fitted.bands)))
    lengths = [band.max_context_tokens for band in fitted.bands]
    assert lengths == sorted(set(lengths)) and lengths[-1] <= trained
    within_model = [Band(min(b.max_context_tokens, trained), b.max_sequences) for b in wanted]
    for band, before in zip(fitted.bands, within_model, strict=False):
        assert 1 <= band.max_sequences <= before.max_sequences
        assert band.max_context_tokens <= before.max_context_tokens
    asked = list(dict.fromkeys(length for length in (b.max_context_tokens for b in within_model)))
    changed = lengths != asked or any(
        band.max_sequences != before.max_sequences for band, before in zip(fitted.bands, within_model, strict=False)
    )
    assert bool(fitted.reductions) == changed


@given(WANTED, st.integers(1, 64))
def test_what_fits_is_left_alone(wanted: list[Band], bytes_per_token: int) -> None:
    """With the exact sum as budget nothing gives way; with one byte less something does, and is named."""
    exact = sum(band.max_context_tokens * band.max_sequences for band in wanted) * bytes_per_token
    fitted = fit_bands(wanted, bytes_per_token, exact, 1 << 20)
    assert list(fitted.bands) == wanted and fitted.reductions == () and fitted.total_bytes == exact
    try:
        less = fit_bands(wanted, bytes_per_token, exact - 1, 1 << 20)
    except ConfigError:
        assert wanted == [Band(256, 1)]
    else:
        assert list(less.bands) != wanted and less.reductions


def test_the_model_ends_the_bands() -> None:
    """A band beyond the trained context is dropped, the one that crosses it ends there."""
    wanted = [Band(2048, 8), Band(8192, 4), Band(16384, 2), Band(32768, 1)]
    assert fit_bands(wanted, 1, 1 << 40, 10_000).bands == (Band(2048, 8), Band(8192, 4), Band(10_000, 2))
    assert fit_bands(wanted, 1, 1 << 40, 8192).bands == (Band(2048, 8), Band(8192, 4))
    assert fit_bands(wanted, 1, 1 << 40, 512).bands == (Band(512, 8),)


def test_the_largest_band_gives_up_sequences_first_then_the_longest_goes() -> None:
    """Down to one sequence each before a whole length is given up, and the context is cut last."""
    wanted = [Band(1024, 4), Band(4096, 4)]
    assert fit_bands(wanted, 1, 4 * 1024 + 4096, 1 << 20).bands == (Band(1024, 4), Band(4096, 1))
    assert fit_bands(wanted, 1, 1024 + 4096, 1 << 20).bands == (Band(1024, 1), Band(4096, 1))
    gone = fit_bands(wanted, 1, 4096, 1 << 20)
    assert gone.bands == (Band(1024, 1),) and "no band up to 4096" in gone.reductions[0]
    cut = fit_bands(wanted, 1, 700, 1 << 20)
    assert cut.bands == (Band(512, 1),) and "cut from 1024 to 512" in cut.reductions[-2]


def test_lengths_are_charged_as_libllama_allocates_them() -> None:
    """libllama rounds a stream up to 256 cells: 300 tokens take the memory of 512."""
    assert fit_bands([Band(300, 2)], 10, 1 << 20, 1 << 20).total_bytes == 2 * 512 * 10
    assert fit_bands([Band(300, 2)], 10, 2 * 512 * 10 - 1, 1 << 20).bands == (Band(300, 1),)


def test_a_fixed_part_of_every_sequence_is_charged() -> None:
    """Recurrent layers keep a state per sequence: with 1,000 bytes of it, two sequences need it twice, and what no
    longer fits is cut as ever, also where tokens cost nothing."""

    def stream(context_tokens: int, _dtype: KvDtype) -> int:
        return 1000 + 10 * context_tokens

    wanted = [Band(512, 2)]
    assert fit_bands(wanted, 10, 2 * 6120, 1 << 20, stream_bytes=stream).total_bytes == 2 * 6120
    assert fit_bands(wanted, 10, 2 * 6120 - 1, 1 << 20, stream_bytes=stream).bands == (Band(512, 1),)
    assert fit_bands(wanted, 10, 6119, 1 << 20, stream_bytes=stream).bands == (Band(256, 1),)
    with pytest.raises(ConfigError, match=r"hold 255 tokens .* \(10 bytes each and 1000 per sequence"):
        fit_bands(wanted, 10, 3559, 1 << 20, stream_bytes=stream)
    assert fit_bands(wanted, 0, 3000, 1 << 20, stream_bytes=lambda *_: 1000).bands == tuple(wanted)
    with pytest.raises(ConfigError, match="1000 per sequence"):
        fit_bands(wanted, 0, 999, 1 << 20, stream_bytes=lambda *_: 1000)


def test_a_budget_below_the_least_context_is_refused_with_the_numbers() -> None:
    """The message holds what is there and what is needed."""
    with pytest.raises(ConfigError, match=r"hold 255 tokens .* at least 256"):
        fit_bands([Band(2048, 4)], 100, 25_599, 4096)


def test_stores_take_a_quarter_of_what_bands_leave_within_a_limit() -> None:
    """Nothing where bands take all."""
    assert default_store_bytes(16 << 30, 8 << 30) == 2 << 30
    assert default_store_bytes(1 << 40, 8 << 30) == MOST_STORE_BYTES
    assert default_store_bytes(8 << 30, 9 << 30) == 0
