"""Streaming text: whole characters, never part of a stop string, independent of how tokens cut the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.llama.text_stream import TextStream

# Few letters, so that stops overlap themselves, each other and the text; some of 2, 3 and 4 bytes.
ALPHABET = "abé中🙂"
TEXT = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=3)
CUTS = st.lists(st.integers(0, 200), max_size=30)


def tokens_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` cut into tokens at arbitrary bytes; some tokens are empty (hidden control tokens)."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


def stream(tokens: list[bytes], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """The pieces that come out, the last one from ``finish``, and the stop string that was found."""
    text = TextStream(stops, include_stop=include)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped_by is not None:
            break
    return [*pieces, text.finish()], text.stopped_by


def cut_at_stop(text: str, stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """The yardstick, by reading character after character: the text before the stop string that is
    complete first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=600)
@given(TEXT, STOPS, CUTS, st.booleans())
def test_output_is_the_text_up_to_the_first_complete_stop(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """For any text, any stops and any split of the bytes into tokens."""
    pieces, stopped_by = stream(tokens_of(text.encode(), cuts), stops, include=include)
    assert ("".join(pieces), stopped_by) == cut_at_stop(text, stops, include=include)


@settings(max_examples=300)
@given(TEXT, STOPS, CUTS)
def test_nothing_is_sent_that_belongs_to_a_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    """At every moment what was sent is a beginning of the final text: nothing has to be taken back."""
    tokens = tokens_of(text.encode(), cuts)
    final, _ = cut_at_stop(text, stops)
    out = TextStream(stops)
    sent = ""
    for token in tokens:
        sent += out.push(token)
        assert final.startswith(sent)


@settings(max_examples=300)
@given(TEXT, STOPS, CUTS)
def test_no_more_is_held_back_than_could_become_a_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    """What is held is an unfinished character, or the beginning of a stop string; without stops, whole
    characters go out at once."""
    out, seen, sent = TextStream(stops), b"", ""
    for token in tokens_of(text.encode(), cuts):
        sent += out.push(token)
        seen += token
        if out.stopped_by is not None:
            return
        held = seen.decode(errors="ignore")[len(sent) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@settings(max_examples=300)
@given(st.binary(max_size=24), CUTS)
def test_bytes_that_are_no_text_come_out_as_replacement_characters(data: bytes, cuts: list[int]) -> None:
    """A model may emit any bytes: the result is that of decoding them at once, however they were split."""
    pieces, stopped_by = stream(tokens_of(data, cuts), [])
    assert "".join(pieces) == data.decode(errors="replace") and stopped_by is None
    assert all(piece == piece.encode().decode() for piece in pieces)


@pytest.mark.parametrize("character", ["é", "中", "🙂", "👩‍🚀"])
def test_a_character_comes_out_with_its_last_byte(character: str) -> None:
    """Byte by byte nothing, then each code point whole: never U+FFFD for valid text."""
    out = TextStream()
    pieces = [out.push(bytes([byte])) for byte in character.encode()]
    assert [piece for piece in pieces if piece] == list(character)
    assert out.finish() == ""


def test_an_unfinished_character_is_released_at_the_end_as_a_replacement() -> None:
    """The bytes exist, so they are not dropped in silence."""
    out = TextStream()
    assert out.push("中".encode()[:2]) == "" and out.finish() == "\ufffd"


def test_text_held_for_a_stop_that_never_completes_is_released_at_the_end() -> None:
    """``finish`` gives out what was only possibly a stop string."""
    out = TextStream(["END."])
    assert out.push(b"the EN") == "the "
    assert out.push(b"D") == ""
    assert out.finish() == "END" and out.stopped_by is None


def test_after_a_stop_nothing_comes_out() -> None:
    """Neither the rest of the token that held it, nor later tokens, nor the end."""
    out = TextStream(["stop"])
    assert out.push(b"go stop more") == "go "
    assert out.stopped_by == "stop"
    assert out.push(b"even more") == "" and out.finish() == ""


def test_an_empty_stop_string_stops_nothing() -> None:
    """It would be complete before the first character."""
    out = TextStream([""])
    assert out.push(b"text") == "text" and out.stopped_by is None
