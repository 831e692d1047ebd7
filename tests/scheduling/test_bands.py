"""Which band a sequence starts in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.bands import Band, band_for, first_band

BANDS = (Band(2048, 32), Band(8192, 16), Band(16384, 4))
ASCENDING = st.lists(st.integers(2, 200), min_size=1, max_size=4, unique=True).map(
    lambda sizes: tuple(Band(size, 1) for size in sorted(sizes))
)


@given(ASCENDING, st.integers(1, 250))
def test_band_for_is_the_shortest_that_holds(bands: tuple[Band, ...], tokens: int) -> None:
    """Equal to a plain search through all bands."""
    holding = [index for index, band in enumerate(bands) if band.max_context_tokens >= tokens]
    assert band_for(tokens, bands) == (min(holding) if holding else None)


@given(ASCENDING, st.integers(1, 250), st.integers(0, 250), st.integers(0, 100))
def test_a_prompt_that_fits_anywhere_gets_a_band_with_room_for_a_token(
    bands: tuple[Band, ...], prompt: int, output: int, margin: int
) -> None:
    """The first band holds the prompt and one token; there is none only when no band does."""
    band = first_band(prompt, prompt + output, bands, margin)
    if prompt >= bands[-1].max_context_tokens:
        assert band is None
    else:
        assert band is not None and bands[band].max_context_tokens > prompt


def test_the_margin_counts_but_not_beyond_the_limit() -> None:
    """A chat without ``max_tokens`` starts in the short band; a short answer needs no room for a long one."""
    assert first_band(100, 16384, BANDS, 256) == 0
    assert first_band(1900, 16384, BANDS, 256) == 1
    assert first_band(1900, 1910, BANDS, 256) == 0
    assert first_band(2047, 2047, BANDS, 256) == 0
    assert first_band(2048, 2048, BANDS, 256) == 1
    assert first_band(16383, 16384, BANDS, 256) == 2
    assert first_band(16384, 16384, BANDS, 256) is None
